//! Keys and values of sequences: pages of a bounded pool, in the layout that the attention kernel reads.
//!
//! | module | what |
//! |---|---|
//! | `pages` | the number of pages, which of them hold a known prefix, and the order of eviction: ids only |
//! | `page` | keys, values and routes of up to [`PAGE_TOKENS`] tokens in every layer |
//! | `store` | the memory of pages |
//! | `pool` | both together, behind a lock |
//! | `cache` | one sequence's pages |
//! | `switch` | replaces a pool when attention switches |
//! | `describe` | a pool as the planner of moves sees it |
//! | `arrival`, `transfer` | the new pool while its pages arrive, and pages in transit |
//!
//! A full page never changes, so sequences with equal tokens up to its end share it. A page's content depends only on
//! its tokens, never on the batch in which it was computed: results are bitwise equal with and without sharing.

mod arrival;
mod cache;
mod describe;
mod page;
mod pages;
mod pool;
mod store;
mod switch;
mod transfer;

pub use arrival::KvArrival;
pub use cache::KvCache;
pub use page::PAGE_TOKENS;
pub(super) use page::Page;
pub use pool::{KvPool, KvUsage};
pub(crate) use switch::KvSpan;
pub(super) use switch::KvSwitch;
#[cfg(feature = "gpu")]
pub(super) use switch::PageMoves;
pub use switch::{AttentionSwitch, MovingSequence, PreparedKv};
pub use transfer::{KvObjection, KvPhase};

use super::compute::NR;

/// The dimensions of a cache. Keys and values differ in width if attention is latent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheShape {
    /// Number of layers.
    pub layers: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of one head's key.
    pub key_width: usize,
    /// Elements of one head's value.
    pub value_width: usize,
    /// The longest sequence, in tokens.
    pub max_positions: usize,
}

impl CacheShape {
    /// Bytes of one page.
    pub fn page_bytes(&self) -> usize {
        page::elements(self) * size_of::<f32>()
    }

    /// For pages whose keys and values are stored elsewhere, under the same ids.
    #[cfg(feature = "gpu")]
    pub(super) fn elsewhere(self) -> Self {
        Self { layers: 0, ..self }
    }

    /// Elements from one value to the next.
    pub(super) fn value_stride(&self) -> usize {
        self.value_width.next_multiple_of(NR)
    }

    /// Bytes of one head of a page, in one layer.
    pub(super) fn head_bytes(&self) -> usize {
        page::head_elements(self) * size_of::<f32>()
    }
}
