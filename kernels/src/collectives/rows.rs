//! The collectives over messages, with row memory for peers within reach.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::group::GroupLink;
use super::lockstep::{Lockstep, UnitError};
use super::memory::{Half, PeerRows, RowMemory};
use super::wire::MessageError;
use super::{AllRows, Collectives, Norm, OwnRows, Received, ReceivedRows, wire};
use crate::dispatch::{DispatchPlan, RankRows};
use crate::element::{Dtype, Element};
use crate::lockstep_through;
use crate::split::RowSplit;
use crate::vector::{NormRow, norm_row, sum_rows, sum_rows_wide};

/// Number of ranks up to which a list with one item per rank needs no heap allocation.
pub(super) const INLINE_RANKS: usize = 64;

/// One item per rank.
pub(super) type EachRank<I> = SmallVec<[I; INLINE_RANKS]>;

/// Size of a dispatch message without rows.
pub const DISPATCH_HEADER_BYTES: usize = wire::HEADER_BYTES;

/// Returns the bytes of a row with `pairs` pairs in its dispatch message plus the combine message that answers it.
pub fn dispatch_row_bytes(dtype: Dtype, pairs: usize, hidden: usize) -> usize {
    wire::ROW_BYTES + wire::PAIR_BYTES * pairs + 2 * hidden * dtype.bytes()
}

/// Returns the size of the message from one rank to another in a reduce-scatter of `rows` rows, or in an allgather that
/// also sends `labels` labels.
pub fn split_bytes(dtype: Dtype, rows: usize, hidden: usize, labels: usize) -> usize {
    wire::HEADER_BYTES + rows * hidden * dtype.bytes() + labels * size_of::<u16>()
}

/// One rank's end of the collectives, over messages and memory.
#[derive(Debug)]
pub struct RowCollectives<L, M, T> {
    link: L,
    memory: M,
    /// The half used by the current or last collective.
    half: Half,
    outgoing: Vec<Vec<u8>>,
    inbound: Inbound<T>,
    /// Number of elements of the last part.
    part: usize,
    arrived: Arrived,
    /// Scratch of the fused norm.
    wide_row: Vec<f32>,
    /// Unit rank numbers of a group's ranks, for errors; `None` if the group is the unit.
    names: Option<Arc<[usize]>>,
}

/// The messages of one exchange, and the positions of the rows in them.
#[derive(Debug)]
struct Inbound<T> {
    messages: Vec<Vec<u8>>,
    rows: Vec<Range<usize>>,
    /// Copies of misaligned rows.
    aligned: Vec<Vec<T>>,
}

/// The rows of the last dispatch, without their elements.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    pub(super) hidden: usize,
    pub(super) offsets: Vec<u32>,
    pub(super) places: Vec<u32>,
    pub(super) sources: Vec<u16>,
    pub(super) pair_rows: Vec<u32>,
    pub(super) experts: Vec<u16>,
    pub(super) weights: Vec<f32>,
}

impl<T: Element> Inbound<T> {
    fn new(world: usize) -> Self {
        Self { messages: vec![Vec::new(); world], rows: vec![0..0; world], aligned: vec![Vec::new(); world] }
    }

    /// Records the range of rows in a rank's message.
    fn locate(&mut self, rank: usize, rows: Range<usize>) {
        let bytes = &self.messages[rank][rows.clone()];
        if bytemuck::try_cast_slice::<u8, T>(bytes).is_err() {
            let aligned = &mut self.aligned[rank];
            aligned.clear();
            aligned.extend(wire::values::<T>(bytes));
        }
        self.rows[rank] = rows;
    }

    fn rows(&self, rank: usize) -> &[T] {
        bytemuck::try_cast_slice(&self.messages[rank][self.rows[rank].clone()]).unwrap_or(&self.aligned[rank])
    }
}

impl<L: Lockstep, M: RowMemory<T>, T: Element> RowCollectives<GroupLink<L>, M, T> {
    /// Combines a group's messages with memory shared by the group, on one rank. Errors use the unit's rank numbers.
    pub fn of_group(link: GroupLink<L>, memory: M) -> Self {
        let names = Some(Arc::clone(&link.members));
        Self { names, ..Self::new(link, memory) }
    }
}

impl<L: Lockstep, M: RowMemory<T>, T: Element> RowCollectives<L, M, T> {
    /// Combines messages and memory on one rank.
    pub fn new(link: L, memory: M) -> Self {
        let world = link.world();
        Self {
            link,
            memory,
            half: Half::default(),
            outgoing: vec![Vec::new(); world],
            inbound: Inbound::new(world),
            part: 0,
            arrived: Arrived::default(),
            wide_row: Vec::new(),
            names: None,
        }
    }

    /// Returns a rank's number in the unit.
    fn name(&self, rank: usize) -> usize {
        self.names.as_ref().map_or(rank, |names| names[rank])
    }

    fn operands(&self, detail: String) -> UnitError {
        UnitError::Operands { rank: self.name(self.link.rank()), detail }
    }

    fn protocol(&self, rank: usize, detail: impl Into<String>) -> UnitError {
        UnitError::protocol(self.name(rank), detail)
    }

    fn check(&self, what: &str, found: usize, expected: usize) -> Result<(), UnitError> {
        UnitError::check(self.name(self.link.rank()), what, found, expected)
    }

    /// Whether this rank reads the rows of `rank` in place.
    fn is_direct(&self, rank: usize) -> bool {
        rank == self.link.rank() || self.memory.reaches(rank)
    }

    /// Returns this rank's half for the next collective.
    fn next_half(&mut self, len: usize) -> Result<&mut [T], UnitError> {
        self.check_room(len)?;
        Ok(self.memory.halves(self.half.other(), len).0)
    }

    fn check_room(&self, len: usize) -> Result<(), UnitError> {
        match self.memory.limit() {
            Some(limit) if len > limit => {
                Err(self.operands(format!("{len} row elements exceed the {limit} that fit in its memory")))
            }
            _ => Ok(()),
        }
    }

    /// Exchanges messages, which `fill` writes from this rank's rows. The rows are `None` for a peer that reads them in
    /// place.
    fn exchange(&mut self, mut fill: impl FnMut(usize, Option<&[T]>, &mut Vec<u8>)) -> Result<(), UnitError> {
        self.half = self.half.other();
        let me = self.link.rank();
        let own = self.memory.read(self.half).of(me);
        for (peer, message) in self.outgoing.iter_mut().enumerate().filter(|(peer, _)| *peer != me) {
            message.clear();
            fill(peer, (!self.memory.reaches(peer)).then_some(own), message);
        }
        self.link.all_to_all(&self.outgoing, &mut self.inbound.messages)
    }

    /// Passes each peer's message to `read`, along with whether it carries rows; `read` returns the range of rows.
    fn read_messages(
        &mut self,
        mut read: impl FnMut(usize, &[u8], bool) -> Result<Range<usize>, MessageError>,
    ) -> Result<(), UnitError> {
        for peer in (0..self.link.world()).filter(|&peer| peer != self.link.rank()) {
            let carries_rows = !self.memory.reaches(peer);
            let rows = read(peer, &self.inbound.messages[peer], carries_rows)
                .map_err(|error| self.protocol(peer, error.to_string()))?;
            self.inbound.locate(peer, rows);
        }
        Ok(())
    }

    /// Sums this rank's rows, read in place or from messages, and applies the norm in the same pass. `wide` is scratch
    /// for one row.
    fn finish_rows(
        &self,
        hidden: usize,
        split: RowSplit<'_>,
        mut norm: Option<Norm<'_, T>>,
        wide: &mut [f32],
        out: &mut [T],
    ) {
        let bases = self.bases();
        let mut rows: EachRank<&[T]> = EachRank::new();
        let positions = split.positions(self.link.rank());
        for (i, (to, position)) in out.chunks_exact_mut(hidden.max(1)).zip(positions).enumerate() {
            let token = split.token(position);
            rows.clear();
            rows.extend(bases.iter().enumerate().map(|(rank, base)| {
                let row = if self.is_direct(rank) { token } else { i };
                &base[row * hidden..][..hidden]
            }));
            let Some(norm) = &mut norm else {
                sum_rows(&rows, to);
                continue;
            };
            sum_rows_wide(&rows, wide);
            norm_row(NormRow {
                sum: wide,
                residual: &norm.residual[token * hidden..][..hidden],
                weight: norm.weight,
                epsilon: norm.epsilon,
                residual_out: &mut norm.residual_out[i * hidden..][..hidden],
                out: to,
            });
        }
    }

    /// Reads a dispatch's messages and adds this rank's own rows.
    fn read_dispatch(&mut self, plan: &DispatchPlan, arrived: &mut Arrived) -> Result<(), UnitError> {
        let (me, hidden) = (self.link.rank(), arrived.hidden);
        for rank in 0..self.link.world() {
            let message = &self.inbound.messages[rank];
            let outcome = if rank == me {
                arrived.push_own(me, plan.rank(me));
                Ok(0..0)
            } else if self.memory.reaches(rank) {
                let rows = self.memory.read(self.half).of(rank).len().checked_div(hidden).unwrap_or(usize::MAX);
                arrived.push_places(rank, message, rows)
            } else {
                arrived.push_rows(rank, message, hidden * size_of::<T>())
            };
            let rows = outcome.map_err(|error| self.protocol(rank, error.to_string()))?;
            self.inbound.locate(rank, rows);
        }
        Ok(())
    }

    /// Returns every rank's rows, in its message or in place.
    fn bases(&self) -> EachRank<&[T]> {
        bases(&self.inbound, self.memory.read(self.half), |rank| self.is_direct(rank))
    }
}

fn bases<'a, T: Element>(
    inbound: &'a Inbound<T>,
    memory: PeerRows<'a, T>,
    is_direct: impl Fn(usize) -> bool,
) -> EachRank<&'a [T]> {
    let base = |rank| if is_direct(rank) { memory.of(rank) } else { inbound.rows(rank) };
    (0..inbound.messages.len()).map(base).collect()
}

/// Returns the bytes of rows in a message.
fn row_bytes<T>(rows: usize, hidden: usize, are_carried: bool) -> usize {
    if are_carried { rows * hidden * size_of::<T>() } else { 0 }
}

impl<L: Lockstep, M: RowMemory<T>, T: Element> Collectives<T> for RowCollectives<L, M, T> {
    fn part(&mut self, len: usize) -> Result<&mut [T], UnitError> {
        self.part = len;
        self.next_half(len)
    }

    fn reduce_scatter(
        &mut self,
        hidden: usize,
        split: RowSplit<'_>,
        norm: Option<Norm<'_, T>>,
        out: &mut [T],
    ) -> Result<(), UnitError> {
        let (me, digest) = (self.link.rank(), split.digest());
        self.check("the ranks of the split", split.ranks(), self.link.world())?;
        self.check("the part", self.part, split.tokens() * hidden)?;
        let positions = split.positions(me);
        self.check("out", out.len(), positions.len() * hidden)?;
        norm.iter().try_for_each(|norm| norm.check(self.name(me), self.part, out.len(), hidden))?;
        self.exchange(|peer, rows, message| {
            wire::put(&[digest], message);
            for position in split.positions(peer).take_while(|_| rows.is_some()) {
                wire::put(&rows.unwrap_or_default()[split.token(position) * hidden..][..hidden], message);
            }
        })?;
        self.read_messages(|_, message, carries_rows| {
            let bytes = row_bytes::<T>(positions.len(), hidden, carries_rows);
            wire::after_digest(message, digest, bytes)?;
            Ok(wire::HEADER_BYTES..wire::HEADER_BYTES + bytes)
        })?;
        let mut wide = std::mem::take(&mut self.wide_row);
        wide.resize(if norm.is_some() { hidden } else { 0 }, 0.0);
        self.finish_rows(hidden, split, norm, &mut wide, out);
        self.wide_row = wide;
        Ok(())
    }

    fn allgather(&mut self, own: OwnRows<'_, T>, split: RowSplit<'_>, out: AllRows<'_, T>) -> Result<(), UnitError> {
        let (me, digest) = (self.link.rank(), split.digest());
        let OwnRows { rows, hidden, labels, width, bound } = own;
        self.check("the ranks of the split", split.ranks(), self.link.world())?;
        self.check("the rows", rows.len(), split.positions(me).len() * hidden)?;
        self.check("the labels", labels.len(), split.positions(me).len() * width)?;
        self.check("all rows", out.rows.len(), split.tokens() * hidden)?;
        self.check("all labels", out.labels.len(), split.tokens() * width)?;
        self.next_half(rows.len())?.copy_from_slice(rows);
        self.exchange(|_, own, message| {
            wire::put(&[digest], message);
            if own.is_some() {
                wire::put(rows, message);
            }
            wire::put(labels, message);
        })?;
        let place = |labels: &mut dyn Iterator<Item = u16>, rank: usize, to: &mut [u16]| {
            for position in split.positions(rank) {
                for (to, label) in to[split.token(position) * width..][..width].iter_mut().zip(&mut *labels) {
                    if usize::from(label) >= bound {
                        return Err(MessageError::Label { label, bound });
                    }
                    *to = label;
                }
            }
            Ok(())
        };
        place(&mut labels.iter().copied(), me, out.labels).map_err(|error| self.operands(error.to_string()))?;
        self.read_messages(|peer, message, carries_rows| {
            let count = split.positions(peer).len();
            let bytes = row_bytes::<T>(count, hidden, carries_rows);
            let body = wire::after_digest(message, digest, bytes + count * width * size_of::<u16>())?;
            place(&mut wire::values(&body[bytes..]), peer, out.labels)?;
            Ok(wire::HEADER_BYTES..wire::HEADER_BYTES + bytes)
        })?;
        for (rank, base) in self.bases().iter().enumerate() {
            for (row, position) in base.chunks_exact(hidden.max(1)).zip(split.positions(rank)) {
                out.rows[split.token(position) * hidden..][..hidden].copy_from_slice(row);
            }
        }
        Ok(())
    }

    fn dispatch(&mut self, x: &[T], hidden: usize, plan: &DispatchPlan) -> Result<(), UnitError> {
        self.check("the rows", x.len(), plan.tokens() * hidden)?;
        self.check("the ranks of the plan", plan.ranks(), self.link.world())?;
        self.next_half(x.len())?.copy_from_slice(x);
        self.exchange(|peer, rows, message| {
            let sent = plan.rank(peer);
            wire::put_dispatch(sent, message, |out| match rows {
                None => wire::put(sent.tokens, out),
                Some(rows) => {
                    sent.tokens.iter().for_each(|&token| wire::put(&rows[token as usize * hidden..][..hidden], out));
                }
            });
        })?;
        let mut arrived = std::mem::take(&mut self.arrived);
        arrived.clear(hidden);
        let outcome = self.read_dispatch(plan, &mut arrived);
        self.arrived = arrived;
        outcome?;
        self.check_room(self.arrived.places.len() * hidden)
    }

    fn received(&mut self) -> Received<'_, T> {
        let Self { link, memory, half, inbound, arrived, .. } = self;
        let me = link.rank();
        let direct: EachRank<bool> =
            (0..inbound.messages.len()).map(|rank| rank == me || memory.reaches(rank)).collect();
        let (sums, rows) = memory.halves(half.other(), arrived.places.len() * arrived.hidden);
        arrived.received(bases(inbound, rows, |rank| direct[rank]), sums)
    }

    fn combine(&mut self, plan: &DispatchPlan, out: &mut [T]) -> Result<(), UnitError> {
        let hidden = self.arrived.hidden;
        self.check("out", out.len(), plan.tokens() * hidden)?;
        let offsets = std::mem::take(&mut self.arrived.offsets);
        let sent = self.exchange(|peer, rows, message| match rows {
            None => wire::put(&offsets[peer..=peer], message),
            Some(rows) => {
                wire::put(&rows[offsets[peer] as usize * hidden..offsets[peer + 1] as usize * hidden], message);
            }
        });
        self.arrived.offsets = offsets;
        sent?;
        // The first row of the sums for this rank, in each rank's rows.
        let mut firsts: EachRank<usize> = SmallVec::from_elem(0, self.link.world());
        firsts[self.link.rank()] = self.arrived.offsets[self.link.rank()] as usize;
        self.read_messages(|peer, message, carries_rows| {
            let bytes = row_bytes::<T>(plan.rank(peer).tokens.len(), hidden, carries_rows);
            if carries_rows {
                wire::exactly(message, bytes)?;
            } else {
                firsts[peer] = bytemuck::pod_read_unaligned::<u32>(wire::exactly(message, size_of::<u32>())?) as usize;
            }
            Ok(0..bytes)
        })?;
        let bases = self.bases();
        let mut sums: EachRank<Sums<'_, T>> = EachRank::new();
        for (rank, base) in bases.iter().enumerate() {
            let tokens = plan.rank(rank).tokens;
            let rows = base.get(firsts[rank] * hidden..(firsts[rank] + tokens.len()) * hidden);
            let rows = rows.ok_or_else(|| self.protocol(rank, "its sums exceed its memory"))?;
            sums.push(Sums { tokens, rows });
        }
        add_returned(&mut sums, hidden, out);
        Ok(())
    }
}

/// The sums that one rank returned, in token order.
pub(super) struct Sums<'a, T> {
    pub(super) tokens: &'a [u32],
    pub(super) rows: &'a [T],
}

/// Computes `out[t]`, the sum of the results returned for token t, in the order of `sums`.
pub(super) fn add_returned<T: Element>(sums: &mut [Sums<'_, T>], hidden: usize, out: &mut [T]) {
    let mut rows: EachRank<&[T]> = EachRank::new();
    for (token, to) in (0..).zip(out.chunks_exact_mut(hidden.max(1))) {
        rows.clear();
        rows.extend(sums.iter_mut().filter_map(|sums| sums.next_of(token, hidden)));
        sum_rows(&rows, to);
    }
}

impl<'a, T> Sums<'a, T> {
    /// Returns the token's row if the token was sent to this rank; must be called in token order.
    fn next_of(&mut self, token: u32, hidden: usize) -> Option<&'a [T]> {
        let (_, tokens) = self.tokens.split_first().filter(|(next, _)| **next == token)?;
        let (row, rows) = self.rows.split_at(hidden);
        (self.tokens, self.rows) = (tokens, rows);
        Some(row)
    }
}

impl Arrived {
    pub(super) fn clear(&mut self, hidden: usize) {
        self.hidden = hidden;
        self.offsets.clear();
        self.offsets.push(0);
        self.places.clear();
        self.sources.clear();
        self.pair_rows.clear();
        self.experts.clear();
        self.weights.clear();
    }

    /// Adds the next source, which is this rank.
    fn push_own(&mut self, rank: usize, sent: RankRows<'_>) {
        self.push(rank, sent.tokens.iter().copied(), sent.pairs.iter().copied());
        self.experts.extend_from_slice(sent.experts);
        self.weights.extend_from_slice(sent.weights);
    }

    /// Adds the next source, whose message contains its rows; returns the range of rows.
    fn push_rows(&mut self, source: usize, message: &[u8], row_bytes: usize) -> Result<Range<usize>, MessageError> {
        let parts = wire::split_dispatch(message, row_bytes)?;
        self.push(source, 0..parts.rows as u32, wire::values(parts.pair_counts));
        self.push_pairs(parts);
        let start = wire::HEADER_BYTES.min(message.len());
        Ok(start..start + parts.place.len())
    }

    /// Adds the next source, whose message refers to rows in its memory, which has `limit` rows.
    fn push_places(&mut self, source: usize, message: &[u8], limit: usize) -> Result<Range<usize>, MessageError> {
        let parts = wire::split_dispatch(message, size_of::<u32>())?;
        if let Some(row) = wire::values::<u32>(parts.place).find(|row| *row as usize >= limit) {
            return Err(MessageError::Place { row, limit });
        }
        self.push(source, wire::values(parts.place), wire::values(parts.pair_counts));
        self.push_pairs(parts);
        Ok(0..0)
    }

    fn push_pairs(&mut self, parts: wire::DispatchParts<'_>) {
        self.experts.extend(wire::values::<u16>(parts.experts));
        self.weights.extend(wire::values::<f32>(parts.weights));
    }

    pub(super) fn received<'a, T: Element>(&'a self, bases: EachRank<&'a [T]>, sums: &'a mut [T]) -> Received<'a, T> {
        let Self { hidden, offsets, places, sources, pair_rows, experts, weights } = self;
        let rows = ReceivedRows { hidden: *hidden, offsets, places, sources, bases };
        Received { rows, pair_rows, experts, weights, sums }
    }

    /// Adds a source's rows, given each row's index among the source's rows and its number of pairs.
    pub(super) fn push(&mut self, source: usize, places: impl Iterator<Item = u32>, pairs: impl Iterator<Item = u16>) {
        let first = self.places.len() as u32;
        self.places.extend(places);
        self.sources.resize(self.places.len(), source as u16);
        for (row, count) in (first..).zip(pairs) {
            self.pair_rows.extend(std::iter::repeat_n(row, usize::from(count)));
        }
        self.offsets.push(self.places.len() as u32);
    }
}

lockstep_through!([L: Lockstep, M: Send, T: Element] RowCollectives<L, M, T>, end => end.link);
