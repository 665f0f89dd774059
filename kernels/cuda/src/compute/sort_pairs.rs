//! Sorts (row, expert) pairs by expert.

use super::matmul::{TILE_BYTES, TILE_ROWS};
use super::params::SortPairsParams;
use super::route::{MAX_CHOSEN, MAX_EXPERTS};
use super::{address, apart, bytes_of};
use crate::error::LaunchError;
use crate::launch::Launch;
use crate::params::SORT_THREADS;
use crate::team::{Buffer, in_range};

/// Sorts pairs by expert, then by row. The results are the lists that [`MatMul`](super::MatMul) and
/// [`SumPairs`](super::SumPairs) read; the host reads none of them.
#[derive(Clone, Copy, Debug)]
pub struct SortPairs {
    /// The pairs.
    pub from: Pairs,
    /// `[rows, top_k]` f32
    pub weights: Buffer,
    /// `[pairs]` u32: each sorted pair's row.
    pub row_of: Buffer,
    /// `[pairs]` f32: each sorted pair's weight.
    pub sorted: Buffer,
    /// `[rows + 1]` u32
    pub first_pair: Buffer,
    /// `[pairs]` u32: the sorted pairs of each row, by ascending expert, followed by `u32::MAX` for absent ones.
    pub pair_of: Buffer,
    /// [`Tiles::count`] [`Tile`](super::Tile)s, the empty ones last.
    pub tiles: Buffer,
    /// Rows.
    pub rows: u64,
    /// Maximum number of experts per row.
    pub top_k: u64,
    /// Experts of the layer.
    pub num_experts: u64,
}

/// The pairs to sort. A kernel traps on an id out of range.
#[derive(Clone, Copy, Debug)]
pub enum Pairs {
    /// The router's choices, on a rank that has all experts.
    Chosen {
        /// `[rows, top_k]` u16
        experts: Buffer,
    },
    /// The routes that arrived in a [`Dispatch`](crate::Dispatch).
    Arrived {
        /// `[rows, top_k]` i32: the experts of each row, followed by -1.
        experts: Buffer,
        /// u32: how many of the rows have arrived.
        count: Buffer,
        /// `[num_experts]` u32: each expert's index on this rank.
        slot_of: Buffer,
        /// Experts of this rank. The kernel traps on an index that is not below.
        slots: u64,
    },
}

/// Upper bounds for the tiles of some pairs, however the pairs are distributed over experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tiles {
    /// Maximum number of tiles.
    pub count: u64,
    /// Maximum number of rows per tile.
    pub rows: u64,
}

impl Tiles {
    /// Chooses small tiles if experts have few rows on average: the matrix product's kernel is chosen by the largest
    /// possible tile.
    pub fn of(pairs: u64, experts: u64) -> Self {
        let rows = [8, 16].into_iter().find(|rows| pairs * 2 <= experts * rows).unwrap_or(u64::from(TILE_ROWS));
        Self { count: pairs.min(experts + pairs / rows), rows }
    }

    /// Returns the maximum number of tiles for up to this many pairs.
    pub fn most(pairs: u64, experts: u64) -> u64 {
        experts + (experts / 2).max(pairs.div_ceil(u64::from(TILE_ROWS)))
    }
}

impl SortPairs {
    /// Number of experts among which the pairs are sorted.
    fn slots(&self) -> u64 {
        match self.from {
            Pairs::Chosen { .. } => self.num_experts,
            Pairs::Arrived { slots, .. } => slots,
        }
    }

    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self) -> Result<Launch, LaunchError> {
        let (pairs, slots) = (self.rows.saturating_mul(self.top_k), self.slots());
        let tiles = Tiles::of(in_range("pairs", pairs, 0, i32::MAX as u64)?.into(), slots);
        let words = |what, buffer, words| address(what, buffer, bytes_of(&[words, 4]), 4);
        let (kernel, experts, arrived) = match self.from {
            Pairs::Chosen { experts } => {
                ("semmoe_sort_pairs", address("experts", experts, bytes_of(&[pairs, 2]), 2)?, [0; 3])
            }
            Pairs::Arrived { experts, count, slot_of, .. } => {
                let arrived = words("received experts", experts, pairs)?;
                let arrived = [arrived, words("received rows", count, 1)?, words("slots", slot_of, self.num_experts)?];
                ("semmoe_sort_arrived", 0, arrived)
            }
        };
        let params = SortPairsParams {
            experts,
            weights: words("weights", self.weights, pairs)?,
            row_of: words("rows of pairs", self.row_of, pairs)?,
            sorted: words("sorted weights", self.sorted, pairs)?,
            first_pair: words("first pairs", self.first_pair, self.rows + 1)?,
            pair_of: words("pairs of rows", self.pair_of, pairs)?,
            tiles: address("tiles", self.tiles, bytes_of(&[tiles.count, TILE_BYTES]), 4)?,
            arrived: arrived[0],
            arrived_rows: arrived[1],
            slot_of: arrived[2],
            rows: in_range("rows", self.rows, 0, i32::MAX as u64)?,
            top_k: in_range("experts per row", self.top_k, 1, MAX_CHOSEN)?,
            num_experts: in_range("experts", self.num_experts, 1, MAX_EXPERTS)?,
            slots: in_range("experts of a rank", slots, 0, MAX_EXPERTS)?,
            tile_count: in_range("tiles", tiles.count, 0, 65_535)?,
            tile_rows: tiles.rows as u32,
        };
        apart(kernel, [slots.max(1).div_ceil(32), 1], SORT_THREADS, &params)
    }
}
