//! A rank's KV cache pages: their page table and their memory, behind one lock.

use std::sync::{Arc, Mutex, MutexGuard};

use super::CacheShape;
use super::cache::KvCache;
use super::pages::{Chain, Pages};
use super::store::Store;
use crate::threads::lock;

/// A rank's KV cache pool. Clones share the same pool.
#[derive(Clone, Debug)]
pub struct KvPool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    shape: CacheShape,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) pages: Pages,
    pub(super) store: Store,
}

/// A snapshot of a pool's pages, where used + cached + free = capacity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct KvUsage {
    /// Distinct pages that sequences hold.
    pub used: u64,
    /// Pages that no sequence holds, kept for prompts with the same prefix.
    pub cached: u64,
    /// Maximum number of pages.
    pub capacity: u64,
    /// Pages that admitted sequences may still claim.
    pub promised: u64,
    /// Cached pages evicted since startup.
    pub evicted: u64,
}

impl KvPool {
    /// Creates a pool of at most `capacity` pages, which are allocated on demand; `reuse` enables prefix sharing.
    pub fn new(shape: CacheShape, capacity: usize, reuse: bool) -> Self {
        Self::of(shape, Pages::new(capacity, reuse), Store::default())
    }

    pub(super) fn of(shape: CacheShape, pages: Pages, store: Store) -> Self {
        Self(Arc::new(Shared { shape, state: Mutex::new(State { pages, store }) }))
    }

    pub(in crate::model) fn shape(&self) -> &CacheShape {
        &self.0.shape
    }

    /// The current usage.
    pub fn usage(&self) -> KvUsage {
        self.state().pages.usage()
    }

    /// Admits a sequence that begins with `prompt` and may grow to `tokens` tokens, or returns `None` if there are too
    /// few pages for now. The sequence starts with the longest known prefix of the prompt that leaves at least one
    /// token to compute.
    pub fn admit(&self, prompt: &[u32], tokens: usize) -> Option<KvCache> {
        let chain = self.state().pages.admit(prompt, tokens)?;
        Some(KvCache::new(self.clone(), chain, |_| None))
    }

    /// Creates a sequence without prefix sharing, which allocates its pages on demand.
    pub fn alone(&self) -> KvCache {
        KvCache::new(self.clone(), Chain::default(), |_| None)
    }

    /// Drops all pages that no sequence holds, releases their memory to the operating system, and returns how many
    /// there were.
    pub fn flush(&self) -> usize {
        let mut state = self.state();
        let State { pages, store } = &mut *state;
        let forgotten = pages.flush();
        store.release(&pages.free);
        forgotten
    }

    /// Locks the pool's state. A thread that panicked while holding the lock leaks at most one page.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
