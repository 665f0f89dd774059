//! AG-Dispatch and RS-Combine (MixServe, Algorithms 2 and 1): while one piece crosses nodes, another is gathered or
//! reduced inside the node.
//!
//! In AG-Dispatch, a message inside a node contains the length (u64) of the message with the node's own rows, that
//! message, and the message that crossed in the previous step, unchanged. In RS-Combine, it contains the partial sums
//! (`T`) of the node's own rows, then those of the rows that cross.

use std::borrow::Cow;
use std::ops::Range;

use super::pieces::{Pieces, part};
use super::stage::{Stage, StageName, StageObserver, Unobserved};
use super::step::Step;
use crate::collectives::group::UnitLink;
use crate::collectives::lockstep::protocol;
use crate::collectives::rows::{Arrived, EachRank, Sums, add_returned};
use crate::collectives::wire::MessageError;
use crate::collectives::{Lockstep, Received, UnitError, wire};
use crate::dispatch::{DispatchPlan, RankRows};
use crate::element::Element;
use crate::vector::sum_rows;

pub(super) struct Fused<L, T> {
    link: UnitLink<L>,
    pieces: Pieces,
    /// This rank's local index.
    local: usize,
    step: Step,
    /// The message to the other ranks of this node in the current step.
    gather: Vec<u8>,
    /// The message that crossed in the previous step.
    crossed: Vec<u8>,
    /// `[P]`: the rows received through each local index.
    shards: Vec<Shard<T>>,
    arrived: Arrived,
    sums: Vec<T>,
    /// The sums that cross in the next step.
    reduced: Vec<T>,
    /// `[N]`: each node's sums of this rank's rows.
    returned: Vec<Vec<T>>,
    pub(super) observer: Box<dyn StageObserver + Send>,
}

/// Rows received through one local index, in arrival order.
#[derive(Debug)]
struct Shard<T> {
    rows: Vec<T>,
    /// `[N]`: the rows by their source's node.
    of_nodes: Vec<NodeShard>,
}

/// The rows of one source, in token order.
#[derive(Clone, Debug, Default)]
struct NodeShard {
    /// Each row's position among the shard's rows.
    places: Vec<u32>,
    pairs: Vec<u16>,
    experts: Vec<u16>,
    weights: Vec<f32>,
    /// Number of rows after each piece.
    ends: Vec<usize>,
    /// Index of the first row, in arrival order.
    first: usize,
}

impl NodeShard {
    /// Returns the rows of a piece, in arrival order.
    fn rows(&self, piece: usize) -> Range<usize> {
        let before = if piece == 0 { 0 } else { self.ends[piece - 1] };
        self.first + before..self.first + self.ends[piece]
    }
}

impl<T: Element> Shard<T> {
    fn clear(&mut self) {
        self.rows.clear();
        for NodeShard { places, pairs, experts, weights, ends, .. } in &mut self.of_nodes {
            places.clear();
            pairs.clear();
            experts.clear();
            weights.clear();
            ends.clear();
        }
    }

    /// Appends the next piece of a source on `node`.
    fn push(&mut self, node: usize, message: &[u8], hidden: usize) -> Result<(), MessageError> {
        let parts = wire::split_dispatch(message, hidden * size_of::<T>())?;
        let of_node = &mut self.of_nodes[node];
        let first = self.rows.len().checked_div(hidden).unwrap_or_default();
        of_node.places.extend((0..parts.rows).map(|row| (first + row) as u32));
        of_node.pairs.extend(wire::values::<u16>(parts.pair_counts));
        of_node.experts.extend(wire::values::<u16>(parts.experts));
        of_node.weights.extend(wire::values::<f32>(parts.weights));
        of_node.ends.push(of_node.places.len());
        self.rows.extend_from_slice(&values(parts.place));
        Ok(())
    }
}

/// Returns a message's elements, copied only if misaligned. The length must be a multiple of the element size.
fn values<T: Element>(bytes: &[u8]) -> Cow<'_, [T]> {
    bytemuck::try_cast_slice(bytes).map_or_else(|_| wire::values(bytes).collect(), Cow::Borrowed)
}

fn put_rows<T: Element>(rows: RankRows<'_>, x: &[T], hidden: usize, out: &mut Vec<u8>) {
    wire::put_dispatch(rows, out, |out| {
        rows.tokens.iter().for_each(|&token| wire::put(&x[token as usize * hidden..][..hidden], out));
    });
}

/// Returns the rows that a plan sends to a node in one of several pieces.
fn rows_of(plan: &DispatchPlan, node: usize, piece: usize, pieces: usize) -> RankRows<'_> {
    let rows = plan.rank(node);
    rows.slice(part(rows.tokens.len(), piece, pieces))
}

impl<L: Lockstep, T: Element> Fused<L, T> {
    pub(super) fn new(link: UnitLink<L>, chunks: usize) -> Self {
        let (grid, rank) = (link.grid(), link.rank());
        let shard = || Shard { rows: Vec::new(), of_nodes: vec![NodeShard::default(); grid.nodes()] };
        Self {
            link,
            pieces: Pieces { grid, node: grid.node(rank), chunks },
            local: grid.local(rank),
            step: Step::default(),
            gather: Vec::new(),
            crossed: Vec::new(),
            shards: (0..grid.width()).map(|_| shard()).collect(),
            arrived: Arrived::default(),
            sums: Vec::new(),
            reduced: Vec::new(),
            returned: vec![Vec::new(); grid.nodes()],
            observer: Box::new(Unobserved),
        }
    }

    /// Returns the rank on another node with this rank's local index.
    fn across(&self, node: usize) -> usize {
        self.pieces.grid.rank(node, self.local)
    }

    /// Returns the other ranks of this node with their local indices.
    fn others(&self) -> impl Iterator<Item = (usize, usize)> + use<L, T> {
        let (Pieces { grid, node, .. }, own) = (self.pieces, self.local);
        grid.inside(node).enumerate().filter(move |(local, _)| *local != own)
    }

    pub(super) fn dispatch(&mut self, x: &[T], hidden: usize, plan: &DispatchPlan) -> Result<(), UnitError> {
        let pieces = self.pieces;
        self.arrived.clear(hidden);
        self.shards.iter_mut().for_each(Shard::clear);
        for piece in 0..=pieces.crossing() {
            self.write_gather(piece, x, hidden, plan);
            self.step.begin();
            for (_, peer) in self.others() {
                let stage = Stage { name: StageName::Gather, piece };
                self.step.add(peer, stage).extend_from_slice(&self.gather);
            }
            let crosses = piece < pieces.crossing();
            if crosses {
                let stage = Stage { name: StageName::Dispatch, piece };
                let (to, from) = (self.across(pieces.to(piece)), self.across(pieces.from(piece)));
                let rows = rows_of(plan, pieces.to(piece), pieces.chunk(piece), pieces.chunks);
                put_rows(rows, x, hidden, self.step.add_pair(to, from, stage));
            }
            self.step.exchange(&mut self.link, &mut *self.observer)?;
            self.read_gathers(piece, hidden)?;
            if crosses {
                self.keep_crossed(piece, hidden)?;
            }
        }
        self.arrange();
        Ok(())
    }

    /// Writes the message to the other ranks of this node: this rank's rows for the node, and the rows that crossed in
    /// the previous step.
    fn write_gather(&mut self, piece: usize, x: &[T], hidden: usize, plan: &DispatchPlan) {
        let Pieces { node, .. } = self.pieces;
        self.gather.clear();
        wire::put(&[0u64], &mut self.gather);
        if piece < self.pieces.own() {
            put_rows(rows_of(plan, node, piece, self.pieces.own()), x, hidden, &mut self.gather);
        }
        let own = (self.gather.len() - wire::HEADER_BYTES) as u64;
        self.gather[..wire::HEADER_BYTES].copy_from_slice(&own.to_le_bytes());
        if piece > 0 {
            self.gather.extend_from_slice(&self.crossed);
        }
    }

    /// Reads the rows that the ranks of this node gather in a step, including this rank's own.
    fn read_gathers(&mut self, piece: usize, hidden: usize) -> Result<(), UnitError> {
        let pieces = self.pieces;
        for (local, rank) in pieces.grid.inside(pieces.node).enumerate() {
            let message = if local == self.local { &self.gather } else { self.step.from(rank) };
            let shard = &mut self.shards[local];
            let mut read = || {
                let (own, crossed) = split_gather(message)?;
                if piece < pieces.own() {
                    shard.push(pieces.node, own, hidden)?;
                }
                if piece > 0 {
                    shard.push(pieces.from(piece - 1), crossed, hidden)?;
                }
                Ok(())
            };
            read().map_err(protocol::<MessageError>(rank))?;
        }
        Ok(())
    }

    /// Stores the message that crossed. It is checked before it is passed on, so that an error names the rank that
    /// wrote it.
    fn keep_crossed(&mut self, piece: usize, hidden: usize) -> Result<(), UnitError> {
        let from = self.across(self.pieces.from(piece));
        let message = self.step.from(from);
        wire::split_dispatch(message, hidden * size_of::<T>()).map_err(protocol(from))?;
        self.crossed.clear();
        self.crossed.extend_from_slice(message);
        Ok(())
    }

    /// Orders the rows by local index, then by node, then by token.
    fn arrange(&mut self) {
        for (local, shard) in self.shards.iter_mut().enumerate() {
            let mut first = self.arrived.places.len();
            for of_node in &mut shard.of_nodes {
                of_node.first = first;
                first += of_node.places.len();
                self.arrived.experts.extend_from_slice(&of_node.experts);
                self.arrived.weights.extend_from_slice(&of_node.weights);
            }
            let places = shard.of_nodes.iter().flat_map(|of_node| of_node.places.iter().copied());
            let pairs = shard.of_nodes.iter().flat_map(|of_node| of_node.pairs.iter().copied());
            self.arrived.push(local, places, pairs);
        }
        self.sums.resize(self.arrived.places.len() * self.arrived.hidden, T::zeroed());
    }

    pub(super) fn received(&mut self) -> Received<'_, T> {
        let Self { arrived, shards, sums, .. } = self;
        arrived.received(shards.iter().map(|shard| shard.rows.as_slice()).collect(), sums)
    }

    pub(super) fn combine(&mut self, plan: &DispatchPlan, out: &mut [T]) -> Result<(), UnitError> {
        let (pieces, hidden) = (self.pieces, self.arrived.hidden);
        UnitError::check(self.link.rank(), "out", out.len(), plan.tokens() * hidden)?;
        self.returned.iter_mut().for_each(Vec::clear);
        for step in 0..=pieces.crossing() {
            self.step.begin();
            let reduces = step < pieces.own();
            for (local, peer) in self.others().filter(|_| reduces) {
                let message = self.step.add(peer, Stage { name: StageName::Reduce, piece: step });
                for rows in rows_to_reduce(&self.shards[local], pieces, step) {
                    wire::put(&self.sums[rows.start * hidden..rows.end * hidden], message);
                }
            }
            let crossing = step.checked_sub(1);
            if let Some(piece) = crossing {
                let stage = Stage { name: StageName::Combine, piece };
                let (to, from) = (self.across(pieces.from(piece)), self.across(pieces.to(piece)));
                let message = self.step.add_pair(to, from, stage);
                wire::put(&self.reduced, message);
            }
            self.step.exchange(&mut self.link, &mut *self.observer)?;
            if let Some(piece) = crossing {
                self.take_returned(piece, plan)?;
            }
            if reduces {
                self.reduce(step)?;
            }
        }
        let nodes = self.returned.iter().enumerate();
        let mut sums: EachRank<Sums<'_, T>> =
            nodes.map(|(node, rows)| Sums { tokens: plan.rank(node).tokens, rows }).collect();
        add_returned(&mut sums, hidden, out);
        Ok(())
    }

    /// Stores the sums of this rank's rows that a node has computed and sent back.
    fn take_returned(&mut self, piece: usize, plan: &DispatchPlan) -> Result<(), UnitError> {
        let (pieces, node) = (self.pieces, self.pieces.to(piece));
        let rows = rows_of(plan, node, pieces.chunk(piece), pieces.chunks).tokens.len();
        let from = self.across(node);
        let message =
            wire::exactly(self.step.from(from), rows * self.arrived.hidden * size_of::<T>()).map_err(protocol(from))?;
        self.returned[node].extend_from_slice(&values(message));
        Ok(())
    }

    /// Adds the sums that the ranks of this node computed for rows received through this rank. Sums of the node's own
    /// rows stay; the others cross next.
    fn reduce(&mut self, step: usize) -> Result<(), UnitError> {
        let Self { shards, sums, reduced, returned, step: messages, .. } = self;
        let (pieces, hidden) = (self.pieces, self.arrived.hidden);
        let ranges = rows_to_reduce(&shards[self.local], pieces, step);
        let bytes = ranges.iter().map(Range::len).sum::<usize>() * hidden * size_of::<T>();
        let mut parts: EachRank<Cow<'_, [T]>> = EachRank::new();
        for (local, rank) in pieces.grid.inside(pieces.node).enumerate() {
            parts.push(match local == self.local {
                true => ranges.iter().flat_map(|rows| &sums[rows.start * hidden..rows.end * hidden]).copied().collect(),
                false => values(wire::exactly(messages.from(rank), bytes).map_err(protocol(rank))?),
            });
        }
        let own = &mut returned[pieces.node];
        let (kept, mut at) = (own.len(), 0);
        own.resize(kept + ranges[0].len() * hidden, T::zeroed());
        reduced.resize(ranges[1].len() * hidden, T::zeroed());
        for out in own[kept..].chunks_exact_mut(hidden.max(1)).chain(reduced.chunks_exact_mut(hidden.max(1))) {
            let rows: EachRank<&[T]> = parts.iter().map(|part| &part[at..at + hidden]).collect();
            sum_rows(&rows, out);
            at += hidden;
        }
        Ok(())
    }
}

/// Splits a gather message into the node's own rows and those that crossed.
fn split_gather(message: &[u8]) -> Result<(&[u8], &[u8]), MessageError> {
    let split = message.split_first_chunk().and_then(|(own, rest)| {
        let own = usize::try_from(u64::from_le_bytes(*own)).ok()?;
        rest.split_at_checked(own)
    });
    split.ok_or(MessageError::Gather(message.len()))
}

/// Returns the rows of one local index that are reduced in a step, in arrival order: those of this node, then those
/// that cross next.
fn rows_to_reduce<T>(shard: &Shard<T>, pieces: Pieces, step: usize) -> [Range<usize>; 2] {
    let crossing = match step < pieces.crossing() {
        true => shard.of_nodes[pieces.from(step)].rows(pieces.chunk(step)),
        false => 0..0,
    };
    [shard.of_nodes[pieces.node].rows(step), crossing]
}
