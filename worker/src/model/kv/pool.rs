//! A rank's pages: their bookkeeping and their memory behind one lock.

use std::sync::{Arc, Mutex, MutexGuard};

use super::CacheShape;
use super::cache::KvCache;
use super::pages::{Chain, Pages};
use super::store::Store;
use crate::threads::lock;

/// A rank's pool of pages. Clones share the pool.
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

/// The pages of a pool at one moment: used + cached + free = capacity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct KvUsage {
    /// Distinct pages that sequences hold.
    pub used: u64,
    /// Pages that no sequence holds, kept for prompts with the same prefix.
    pub cached: u64,
    /// Maximum number of pages.
    pub capacity: u64,
    /// Pages that admitted sequences may still take.
    pub promised: u64,
    /// Cached pages evicted since the start.
    pub evicted: u64,
}

impl KvPool {
    /// A pool of at most `capacity` pages, allocated on demand; `reuse`: whether prefixes are shared.
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

    /// Admits a sequence that may grow to `tokens` tokens and begins with `prompt`; `None` while there are too few
    /// pages. It starts with the longest known prefix of the prompt that leaves at least one token to compute.
    pub fn admit(&self, prompt: &[u32], tokens: usize) -> Option<KvCache> {
        let chain = self.state().pages.admit(prompt, tokens)?;
        Some(KvCache::new(self.clone(), chain, |_| None))
    }

    /// A sequence that shares nothing and takes its pages on demand.
    pub fn alone(&self) -> KvCache {
        KvCache::new(self.clone(), Chain::default(), |_| None)
    }

    /// Drops all pages that no sequence holds and returns their memory to the system; returns their number.
    pub fn flush(&self) -> usize {
        let mut state = self.state();
        let State { pages, store } = &mut *state;
        let forgotten = pages.flush();
        store.release(&pages.free);
        forgotten
    }

    /// A thread that panicked while it held the lock leaves at most one surplus page.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
