//! Estimated contents of each rank's prefix cache: a bounded table of chained block hashes per rank.
//!
//! An engine caches the keys and values of prompt blocks and does not recompute a prompt's longest cached prefix. The
//! table models that cache from outside: [`PrefixTable::record`] adds a request's blocks to the rank it was sent to,
//! and evicts that rank's least recently used blocks beyond `blocks_per_rank`; [`PrefixTable::cached`] returns how many
//! leading tokens of a prompt each rank holds. A block is identified by a hash of its own tokens and all tokens before
//! it (`chain`), so equal prefixes have equal identifiers and a lookup never compares tokens.
//!
//! Reads take no lock and allocate nothing: one probe per block finds the bit set of the ranks that hold it (`index`).
//! Writes take the table's only lock and maintain the exact LRU order of each rank (`lru`). A read concurrent with a
//! write may count a block too many or too few, which is acceptable because the table only estimates a cache that
//! cannot be observed.
//!
//! Maximum memory: `blocks_per_rank x ranks x (100 + 16 x ceil(ranks / 64))` bytes for powers of two
//! ([`PrefixTable::memory_bytes`]). With the default 8,192 blocks per rank, that is 7 MiB for 8 ranks and 58 MiB for
//! 64.

mod chain;
mod index;
mod lru;

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::settings::{SettingsError, check_ranges};
pub use chain::block_hashes;
use index::Index;
use lru::{Lru, Touched};

/// The block size of prompts, and the number of blocks that each rank is assumed to cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixSettings {
    /// Tokens per block; only full blocks are shared. Should be a multiple of the engine's page size.
    pub block_tokens: u32,
    /// Blocks that a rank caches: its cache size in tokens divided by `block_tokens`. Zero means that engines are
    /// assumed to cache nothing.
    pub blocks_per_rank: u32,
}

impl Default for PrefixSettings {
    fn default() -> Self {
        PrefixSettings { block_tokens: 64, blocks_per_rank: 8192 }
    }
}

/// Maximum number of words in the half of an index that blocks can fill, `ranks x blocks x (1 + ceil(ranks / 64))`;
/// limits the index to 1 GiB.
const MAX_NUMBERS: u64 = 1 << 26;

impl PrefixSettings {
    /// Checks both fields against their ranges.
    ///
    /// # Errors
    /// [`SettingsError`], naming the field.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let fields =
            [("block_tokens", self.block_tokens, 1, 65_536), ("blocks_per_rank", self.blocks_per_rank, 0, 1 << 20)];
        check_ranges(fields.map(|(name, value, least, most)| (name, value.into(), least.into(), most.into())))
    }
}

/// The blocks of all ranks; see the module documentation.
#[derive(Debug)]
pub struct PrefixTable {
    index: Index,
    /// One list per rank, created on the rank's first request.
    ranks: Mutex<Vec<Option<Lru>>>,
    block_tokens: u32,
    blocks_per_rank: u32,
}

impl PrefixTable {
    /// Creates an empty table; `None` if `blocks_per_rank` is zero or there are no ranks. If the index would exceed 1
    /// GiB, each rank keeps fewer blocks (see [`blocks_per_rank`](Self::blocks_per_rank)); from 65,472 ranks upwards
    /// this is `None` too.
    pub fn new(ranks: u16, settings: &PrefixSettings) -> Option<Self> {
        let numbers = u64::from(ranks) * (1 + u64::from(ranks.div_ceil(64)));
        let even_part = MAX_NUMBERS.checked_div(numbers)?;
        let blocks_per_rank = settings.blocks_per_rank.min(even_part as u32);
        if blocks_per_rank == 0 {
            return None;
        }
        Some(PrefixTable {
            index: Index::new(ranks, u64::from(blocks_per_rank) * u64::from(ranks)),
            ranks: Mutex::new((0..ranks).map(|_| None).collect()),
            block_tokens: settings.block_tokens.max(1),
            blocks_per_rank,
        })
    }

    /// Creates a table for a new set of ranks that continues from `old`, in which rank `r` was `from[r]`. Starts empty
    /// if the block length differs. Returns `None` under the same conditions as [`new`](Self::new).
    pub fn succeed(old: Option<&Self>, from: &[Option<u16>], settings: &PrefixSettings) -> Option<Self> {
        let table = Self::new(u16::try_from(from.len()).unwrap_or(u16::MAX), settings)?;
        let Some(old) = old.filter(|old| old.block_tokens == table.block_tokens) else { return Some(table) };
        let held = old.lock();
        for (rank, from) in (0..u16::MAX).zip(from) {
            let lru = from.and_then(|from| held.get(usize::from(from))?.as_ref());
            for block in lru.into_iter().flat_map(Lru::oldest_first) {
                table.record(rank, &[block]);
            }
        }
        drop(held);
        Some(table)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Lru>>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Maximum number of blocks per rank.
    pub fn blocks_per_rank(&self) -> u32 {
        self.blocks_per_rank
    }

    /// Returns the table's size in bytes when every rank is full.
    pub fn memory_bytes(&self) -> usize {
        let ranks = self.lock().len();
        self.index.memory_bytes() + ranks * Lru::memory_bytes(self.blocks_per_rank)
    }

    /// Writes to `cached` how many leading tokens of a prompt each rank holds: one value per rank, and zero for any
    /// extra ones. `chain` is the result of [`block_hashes`], or comes from a trace that identifies its blocks.
    pub fn cached(&self, chain: &[u64], cached: &mut [u64]) {
        self.index.held_blocks(chain, cached);
        for tokens in cached {
            *tokens *= u64::from(self.block_tokens);
        }
    }

    /// Records that a request with these blocks was sent to `rank`. Trailing blocks beyond the rank's capacity are
    /// omitted. Returns how many blocks are new to the rank; `None` if there is no such rank.
    pub fn record(&self, rank: u16, chain: &[u64]) -> Option<usize> {
        let mut ranks = self.lock();
        let slot = ranks.get_mut(usize::from(rank))?;
        let lru = slot.get_or_insert_with(|| Lru::new(self.blocks_per_rank));
        let kept = &chain[..chain.len().min(self.blocks_per_rank as usize)];
        let mut new = 0;
        // Touch the last block first so that it is also evicted first and the remaining blocks still form a prefix.
        for &block in kept.iter().rev() {
            if let Touched::New { forgotten } = lru.touch(block) {
                new += 1;
                if let Some(forgotten) = forgotten {
                    self.index.remove(forgotten, rank);
                }
                self.index.insert(block, rank);
            }
        }
        Some(new)
    }

    /// Reverses a [`record`](Self::record) whose request did not run: removes the last `new` of its blocks within the
    /// rank's capacity. Blocks evicted to make room for them stay evicted. Returns false if there is no such rank.
    pub fn take_back(&self, rank: u16, chain: &[u64], new: usize) -> bool {
        self.change(rank, |slot| {
            let Some(lru) = slot else { return };
            let kept = &chain[..chain.len().min(self.blocks_per_rank as usize)];
            for &block in &kept[kept.len().saturating_sub(new)..] {
                if lru.remove(block) {
                    self.index.remove(block, rank);
                }
            }
        })
    }

    /// Removes all blocks of a rank, for example because its engine may have restarted. Returns false if there is no
    /// such rank.
    pub fn forget(&self, rank: u16) -> bool {
        self.change(rank, |slot| {
            for block in slot.take().iter().flat_map(Lru::blocks) {
                self.index.remove(block, rank);
            }
        })
    }

    fn change(&self, rank: u16, change: impl FnOnce(&mut Option<Lru>)) -> bool {
        self.lock().get_mut(usize::from(rank)).map(change).is_some()
    }
}
