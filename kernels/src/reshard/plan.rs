//! A switch as data: which bytes move where, and in which layer order.

use super::checksum::PieceId;
use super::error::ReshardError;
use super::layout::{HostedAt, Layout, Place, Pool, Side};
use crate::hash::mix;

/// A copy of `rows` rows of `bytes` bytes (like `cudaMemcpy2D`): one array's part of an expert slice. Slice-major
/// experts have one row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// Layer.
    pub layer: usize,
    /// Logical expert id.
    pub expert: u16,
    /// Slice of the expert's width.
    pub slice: u16,
    /// The source.
    pub from: Place,
    /// The destination. It overlaps no source of this layer or of any layer that moves later.
    pub to: Place,
    /// Number of rows, at least 1.
    pub rows: usize,
    /// Bytes per row, at least 1.
    pub bytes: usize,
}

impl Move {
    /// Returns the expert slice that the move belongs to.
    pub fn piece(&self) -> PieceId {
        PieceId { layer: self.layer, expert: self.expert, slice: self.slice }
    }

    /// Bytes of all rows.
    pub fn total_bytes(&self) -> usize {
        self.rows * self.bytes
    }
}

/// A unit's switch from one layout to another. Ranks that pass equal arguments get equal switches, which they verify by
/// comparing [`Switch::digest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Switch<'a> {
    pool: &'a Pool,
    from: &'a Layout,
    to: &'a Layout,
    side: Side,
}

impl<'a> Switch<'a> {
    /// Plans a switch from the layout on `side` to another, which will occupy the other side.
    ///
    /// # Errors
    /// If a layout does not fit the pool, or both have the same slices, so that nothing would change.
    pub fn new(pool: &'a Pool, from: &'a Layout, to: &'a Layout, side: Side) -> Result<Self, ReshardError> {
        pool.check(from)?;
        pool.check(to)?;
        if from == to && from.hosts().is_none() {
            return Err(ReshardError::Same);
        }
        Ok(Self { pool, from, to, side })
    }

    /// Returns the reverse switch.
    pub fn inverse(&self) -> Self {
        Self { pool: self.pool, from: self.to, to: self.from, side: self.side.other() }
    }

    /// The buffers.
    pub fn pool(&self) -> &'a Pool {
        self.pool
    }

    /// The layout before.
    pub fn from(&self) -> &'a Layout {
        self.from
    }

    /// The layout after.
    pub fn to(&self) -> &'a Layout {
        self.to
    }

    /// The side before the switch; the new layout occupies the other one.
    pub fn side(&self) -> Side {
        self.side
    }

    /// Returns the layer that moves in step `step`: ascending from the high side, descending from the low side.
    pub fn layer(&self, step: usize) -> usize {
        match self.side {
            Side::High => step,
            Side::Low => self.pool.layers() - 1 - step,
        }
    }

    /// Fills `moves` with all moves of a layer, between all ranks, ordered by destination rank, position in its slot,
    /// slice and array. The moves of one piece are consecutive. They may run in any order, but must all finish before
    /// the next layer starts.
    ///
    /// If an expert has several copies, a rank prefers its own, then one on its node, then any other; among equally
    /// close ones, it picks the rank read least so far. From TP to EP nothing therefore crosses nodes, and to TP each
    /// slice that a node lacks crosses once. Groups and hybrid nodes are treated like nodes.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn moves(&self, layer: usize, moves: &mut Vec<Move>) {
        moves.clear();
        let pool = self.pool;
        let copies = self.copies(layer);
        let mut taken = vec![0; pool.grid.ranks()];
        for rank in 0..pool.grid.ranks() {
            for hosted in pool.hosted(self.to, layer, rank) {
                for slice in pool.slices(self.to, rank) {
                    let from = self.source(&copies, &taken, rank, hosted.expert, slice);
                    taken[from.rank] += usize::from(from.rank != rank);
                    let to = HostedAt { rank, position: hosted.position };
                    let piece = PieceId { layer, expert: hosted.expert, slice: slice as u16 };
                    self.push(piece, from, to, moves);
                }
            }
        }
    }

    /// Returns the first rank of each host of an expert before the switch, `[N]`; empty without hosts.
    fn copies(&self, layer: usize) -> Vec<Vec<HostedAt>> {
        let mut copies = vec![Vec::new(); self.pool.experts()];
        if self.from.hosts().is_some() {
            for rank in (0..self.pool.grid.ranks()).step_by(self.pool.width(self.from)) {
                for hosted in self.pool.hosted(self.from, layer, rank) {
                    copies[usize::from(hosted.expert)].push(HostedAt { rank, position: hosted.position });
                }
            }
        }
        copies
    }

    fn source(&self, copies: &[Vec<HostedAt>], taken: &[usize], to: usize, expert: u16, slice: usize) -> HostedAt {
        let (expert, width) = (usize::from(expert), self.pool.width(self.from));
        let near = self.near();
        let distance = |rank: usize| match rank {
            _ if rank == to => 0,
            _ if rank / near == to / near => 1,
            _ => 2,
        };
        // Of the ranks that share the expert, picks the one that has this slice.
        let local = slice * width / self.pool.grid.width();
        let copies = copies[expert].iter().map(|host| HostedAt { rank: host.rank + local, ..*host });
        let nearest = copies.min_by_key(|copy| (distance(copy.rank), taken[copy.rank], copy.rank));
        // No host has the expert: the node, or the group, has each slice once.
        nearest.unwrap_or_else(|| HostedAt { rank: to / width * width + local, position: expert })
    }

    /// Returns the number of consecutive ranks that count as one node.
    fn near(&self) -> usize {
        match (self.to, self.from) {
            (Layout::Groups(_) | Layout::Hybrid(_), _) => self.pool.width(self.to),
            (_, Layout::Hybrid(_)) => self.pool.width(self.from),
            _ => self.pool.grid.width(),
        }
    }

    /// Appends the moves of one piece.
    fn push(&self, piece: PieceId, from: HostedAt, to: HostedAt, moves: &mut Vec<Move>) {
        let sources = self.pool.parts_of(self.from, self.side, piece, from);
        let targets = self.pool.parts_of(self.to, self.side.other(), piece, to);
        moves.extend(sources.zip(targets).map(|(from, to)| {
            let PieceId { layer, expert, slice } = piece;
            Move { layer, expert, slice, from: from.place, to: to.place, rows: to.rows, bytes: to.bytes }
        }));
    }

    /// Returns a digest of the switch. Two ranks with different switches almost certainly have different digests.
    pub fn digest(&self) -> u64 {
        // Not computed with `PieceHash`: its sums miss changes that cancel out, as those
        // of two swaps can.
        let mut hash = 0;
        let mut word = |word: usize| hash = mix(hash, word as u64 + 1);
        let pool = self.pool;
        let counts =
            [pool.bytes(), pool.layers(), pool.experts(), pool.grid.ranks(), pool.grid.width(), pool.shape.width()];
        counts.into_iter().for_each(&mut word);
        for array in pool.shape.arrays() {
            word(array.outer);
            word(array.inner_bytes);
        }
        word(usize::from(self.side == Side::Low));
        for layout in [self.from, self.to] {
            word(pool.slot_bytes(layout));
            if let Layout::Groups(_) | Layout::Hybrid(_) = layout {
                word(pool.width(layout));
            }
            let Some(hosts) = layout.hosts() else { continue };
            for layer in 0..pool.layers() {
                for host in 0..hosts.count() {
                    hosts.of_host(layer, host).iter().for_each(|&expert| word(usize::from(expert)));
                }
            }
        }
        hash ^ (hash >> 32)
    }
}
