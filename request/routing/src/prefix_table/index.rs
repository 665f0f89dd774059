//! Maps each block to the ranks that hold it: a hash table of bit sets with lock-free reads.
//!
//! A bucket has eight slots. Each slot contains a block and one bit per rank, and is free if all bits are clear. A
//! block is stored only in its own bucket, so entries never move and a reader checks just eight numbers. The table has
//! two slots per block that the ranks can hold. If a bucket is full, further blocks are not recorded and later lookups
//! miss them; this affects fewer than 1% of blocks even if every rank is full of blocks that no other rank holds.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::hash::scramble;

const PLACES: usize = 8;

#[derive(Debug)]
pub(super) struct Index {
    /// [buckets, 1 + words, PLACES]: for each bucket, its blocks followed by their rank bits, 64 ranks per word.
    cells: Box<[AtomicU64]>,
    buckets: u64,
    words: usize,
}

impl Index {
    /// Creates an index with room for `blocks` blocks, each held by one rank.
    pub(super) fn new(ranks: u16, blocks: u64) -> Self {
        let buckets = (2 * blocks).div_ceil(PLACES as u64).max(1);
        let words = usize::from(ranks).div_ceil(64);
        let cells = buckets as usize * (1 + words) * PLACES;
        Index { cells: (0..cells).map(|_| AtomicU64::new(0)).collect(), buckets, words }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.cells.len() * size_of::<AtomicU64>()
    }

    fn bucket(&self, block: u64) -> &[AtomicU64] {
        let stride = (1 + self.words) * PLACES;
        let bucket = (u128::from(scramble(block)) * u128::from(self.buckets)) >> 64;
        &self.cells[bucket as usize * stride..][..stride]
    }

    fn place(bucket: &[AtomicU64], block: u64) -> Option<usize> {
        bucket[..PLACES].iter().position(|held| held.load(Ordering::Relaxed) == block)
    }

    /// Returns the bit set of ranks that hold a block, for the up to 64 ranks starting at `word * 64`.
    fn holders(&self, block: u64, word: usize) -> u64 {
        let bucket = self.bucket(block);
        Self::place(bucket, block).map_or(0, |place| bucket[(1 + word) * PLACES + place].load(Ordering::Relaxed))
    }

    /// Computes how many leading blocks of the chain each rank holds.
    pub(super) fn held_blocks(&self, chain: &[u64], held: &mut [u64]) {
        held.fill(0);
        for (word, held) in held.chunks_mut(64).enumerate().take(self.words) {
            let mut holding = if held.len() == 64 { u64::MAX } else { (1 << held.len()) - 1 };
            for (depth, &block) in chain.iter().enumerate() {
                let now = holding & self.holders(block, word);
                mark(held, holding & !now, depth as u64);
                holding = now;
                if holding == 0 {
                    break;
                }
            }
            mark(held, holding, chain.len() as u64);
        }
    }

    /// Records that `rank` holds the block. The caller must hold the table's lock, as for [`remove`](Self::remove).
    pub(super) fn insert(&self, block: u64, rank: u16) {
        let bucket = self.bucket(block);
        let free = |place: &usize| (0..self.words).all(|word| self.bits(bucket, word, *place) == 0);
        let Some(place) = Self::place(bucket, block).or_else(|| (0..PLACES).find(free)) else { return };
        bucket[place].store(block, Ordering::Relaxed);
        let (word, bit) = word_and_bit(rank);
        // Release ordering: a thread that sees the bit also sees the block.
        bucket[(1 + word) * PLACES + place].fetch_or(bit, Ordering::Release);
    }

    pub(super) fn remove(&self, block: u64, rank: u16) {
        let bucket = self.bucket(block);
        let Some(place) = Self::place(bucket, block) else { return };
        let (word, bit) = word_and_bit(rank);
        bucket[(1 + word) * PLACES + place].fetch_and(!bit, Ordering::Relaxed);
    }

    fn bits(&self, bucket: &[AtomicU64], word: usize, place: usize) -> u64 {
        bucket[(1 + word) * PLACES + place].load(Ordering::Relaxed)
    }
}

fn word_and_bit(rank: u16) -> (usize, u64) {
    (usize::from(rank / 64), 1 << (rank % 64))
}

/// Writes `depth` for every rank whose bit is set.
fn mark(held: &mut [u64], mut ranks: u64, depth: u64) {
    while ranks != 0 {
        held[ranks.trailing_zeros() as usize] = depth;
        ranks &= ranks - 1;
    }
}
