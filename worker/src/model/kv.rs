//! The KV cache of sequences: pages from a bounded pool, in the layout that the attention kernel reads.
//!
//! | module | what |
//! |---|---|
//! | `pages` | page ids only: which are free, which hold a known prefix, and in which order they are evicted |
//! | `page` | keys, values and routes of up to [`PAGE_TOKENS`] tokens in every layer |
//! | `store` | page memory |
//! | `pool` | `pages` and `store` together, behind a lock |
//! | `cache` | one sequence's pages |
//! | `switch` | replaces a pool when attention switches to another layout |
//! | `describe` | describes a pool's pages to the move planner |
//! | `arrival`, `transfer` | the new pool while its pages are arriving, and pages in transit |
//!
//! A full page never changes, so sequences whose tokens match up to its end share it. A page's content depends only on
//! the tokens up to its end, never on the batch in which it was computed, so results are bitwise equal with and without
//! sharing.

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

/// Cache dimensions. Keys and values differ in width with latent attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheShape {
    /// Number of layers.
    pub layers: usize,
    /// Number of key-value heads.
    pub kv_heads: usize,
    /// Elements in one head's key.
    pub key_width: usize,
    /// Elements in one head's value.
    pub value_width: usize,
    /// Maximum sequence length in tokens.
    pub max_positions: usize,
}

impl CacheShape {
    /// Bytes of one page.
    pub fn page_bytes(&self) -> usize {
        page::elements(self) * size_of::<f32>()
    }

    /// Returns the host-side shape of pages whose keys and values are stored on a GPU, under the same ids.
    #[cfg(feature = "gpu")]
    pub(super) fn elsewhere(self) -> Self {
        Self { layers: 0, ..self }
    }

    /// Stride in elements from one value to the next.
    pub(super) fn value_stride(&self) -> usize {
        self.value_width.next_multiple_of(NR)
    }

    /// Bytes per head and layer in one page.
    pub(super) fn head_bytes(&self) -> usize {
        page::head_elements(self) * size_of::<f32>()
    }
}
