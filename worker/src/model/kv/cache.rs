//! One sequence's pages with their memory. Dropping the cache releases the pages.

use std::sync::Arc;

use super::CacheShape;
use super::page::{PAGE_TOKENS, Page};
use super::pages::{Chain, PageId, Seal};
use super::pool::{KvPool, State};

/// Keys and values of one sequence in every layer, at most `max_positions` tokens.
#[derive(Debug)]
pub struct KvCache {
    pool: KvPool,
    chain: Chain,
    /// Memory of the chain's pages.
    memory: Vec<Memory>,
}

#[derive(Debug)]
pub(super) enum Memory {
    /// Private to this sequence: still being filled, or never shared.
    Own(Page),
    /// Full, and registered in the pool.
    Shared(Arc<Page>),
}

impl Memory {
    fn page(&self) -> &Page {
        match self {
            Self::Own(page) => page,
            Self::Shared(page) => page,
        }
    }
}

impl KvCache {
    /// Creates the cache of a chain. All of the chain's pages are shared, except those that `own` returns.
    pub(super) fn new(pool: KvPool, chain: Chain, mut own: impl FnMut(PageId) -> Option<Page>) -> Self {
        let state = pool.state();
        let memory = |id| own(id).map_or_else(|| Memory::Shared(state.store.shared(id)), Memory::Own);
        let memory = chain.pages.iter().copied().map(memory).collect();
        drop(state);
        Self { pool, chain, memory }
    }

    /// Number of tokens in the sequence so far.
    pub fn len(&self) -> usize {
        self.chain.tokens.len()
    }

    /// All tokens of the sequence so far.
    pub fn tokens(&self) -> &[u32] {
        &self.chain.tokens
    }

    /// Whether the sequence has no tokens yet.
    pub fn is_empty(&self) -> bool {
        self.chain.tokens.is_empty()
    }

    /// Number of tokens that can still be added to the sequence.
    pub fn remaining(&self) -> usize {
        self.shape().max_positions - self.len()
    }

    /// Truncates the sequence to its first `len` tokens, as if the others had never been added.
    ///
    /// # Panics
    /// If the sequence shares pages, which must not change.
    pub fn truncate(&mut self, len: usize) {
        assert!(self.chain.promised.is_none(), "a sequence with shared pages cannot be truncated");
        if len >= self.len() {
            return;
        }
        let held = (self.len() - len / PAGE_TOKENS * PAGE_TOKENS).min(PAGE_TOKENS);
        self.keep_pages(len.div_ceil(PAGE_TOKENS));
        if let Some(Memory::Own(page)) = self.memory.last_mut().filter(|_| !len.is_multiple_of(PAGE_TOKENS)) {
            page.truncate_routes(len % PAGE_TOKENS, held);
        }
        self.chain.tokens.truncate(len);
    }

    /// Reserves space for `tokens` more tokens, which become part of the sequence in [`KvCache::commit`]. Returns false
    /// if there are too few pages, which cannot happen to a sequence with promised pages.
    pub(in crate::model) fn reserve(&mut self, tokens: usize) -> bool {
        let pages = (self.len() + tokens).div_ceil(PAGE_TOKENS);
        while self.memory.len() < pages {
            let mut state = self.pool.state();
            let State { pages, store } = &mut *state;
            let Some(id) = pages.take(&mut self.chain) else { return false };
            let Some(page) = store.page(self.pool.shape(), id) else {
                pages.release_last(&mut self.chain);
                return false;
            };
            self.memory.push(Memory::Own(page));
        }
        self.chain.tokens.reserve(pages * PAGE_TOKENS - self.chain.tokens.len());
        true
    }

    /// Adds the most recently written tokens to the sequence; `routes` is `[tokens, L, k]`.
    pub(in crate::model) fn commit(&mut self, tokens: &[u32], routes: &[u16]) {
        let width = routes.len() / tokens.len().max(1);
        let (mut tokens, mut routes) = (tokens, routes);
        while !tokens.is_empty() {
            let index = self.len() / PAGE_TOKENS;
            let count = tokens.len().min(PAGE_TOKENS - self.len() % PAGE_TOKENS);
            let (now, later) = tokens.split_at(count);
            let (new_routes, later_routes) = routes.split_at(count * width);
            if let Some(Memory::Own(page)) = self.memory.get_mut(index) {
                page.push_routes(new_routes, width);
            }
            self.chain.tokens.extend_from_slice(now);
            if self.chain.promised.is_some() && self.len().is_multiple_of(PAGE_TOKENS) {
                self.seal(index);
            }
            (tokens, routes) = (later, later_routes);
        }
    }

    /// Makes a full page shareable.
    fn seal(&mut self, index: usize) {
        let mut state = self.pool.state();
        let State { pages, store } = &mut *state;
        let id = self.chain.pages[index];
        let seal = pages.seal(&mut self.chain, index);
        // The page may be followed by others from the current step, so it is removed from the middle.
        if seal != Seal::Own
            && let Memory::Own(page) = self.memory.remove(index)
        {
            let page = match seal {
                Seal::Duplicate { known } => {
                    store.free.push(page);
                    store.shared(known)
                }
                Seal::Own | Seal::Known => store.share(id, page),
            };
            self.memory.insert(index, Memory::Shared(page));
        }
    }

    pub(in crate::model) fn shape(&self) -> &CacheShape {
        self.pool.shape()
    }

    /// Returns the pages of the first `tokens` tokens, each with its first position and the number of these tokens in
    /// it.
    pub(in crate::model) fn pages(&self, tokens: usize) -> impl Iterator<Item = (usize, usize, &Page)> {
        let starts = (0..tokens).step_by(PAGE_TOKENS);
        starts.zip(&self.memory).map(move |(first, memory)| (first, (tokens - first).min(PAGE_TOKENS), memory.page()))
    }

    /// Returns the pages of the first `tokens` tokens as [`KvCache::pages`] does, each with the page that follows it.
    pub(in crate::model) fn pages_ahead(
        &self,
        tokens: usize,
    ) -> impl Iterator<Item = (usize, usize, &Page, Option<&Page>)> {
        let after = self.pages(tokens).skip(1).map(|(_, _, page)| Some(page)).chain([None]);
        self.pages(tokens).zip(after).map(|((first, held, page), after)| (first, held, page, after))
    }

    /// Writes one head's key and value at a reserved position.
    pub(in crate::model) fn write(&mut self, layer: usize, head: usize, position: usize, key: &[f32], value: &[f32]) {
        match &mut self.memory[position / PAGE_TOKENS] {
            Memory::Own(page) => {
                page.write(self.pool.shape(), layer, head, position % PAGE_TOKENS, key, value);
            }
            Memory::Shared(_) => unreachable!("tokens are only written to pages private to the sequence"),
        }
    }

    /// Returns the experts of the sequence's tokens from `first` on, including tokens from reused pages, as `[tokens,
    /// L, k]`.
    pub fn routes(&self, first: usize) -> Vec<u16> {
        let mut routes = Vec::new();
        for (start, held, page) in self.pages(self.len()) {
            let skipped = first.saturating_sub(start).min(held);
            let width = page.routes.len() / held;
            routes.extend_from_slice(&page.routes[skipped * width..held * width]);
        }
        routes
    }

    /// Returns the sequence's page ids, in token order.
    #[cfg(feature = "gpu")]
    pub(in crate::model) fn page_ids(&self) -> &[PageId] {
        &self.chain.pages
    }

    pub(super) fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Returns each page id with the page's memory.
    pub(super) fn held(&self) -> impl Iterator<Item = (PageId, &Page)> {
        self.chain.pages.iter().copied().zip(self.memory.iter().map(Memory::page))
    }

    /// Releases all pages after the first `count`, last page first; [`super::pages`] explains why.
    fn keep_pages(&mut self, count: usize) {
        let mut state = self.pool.state();
        let State { pages, store } = &mut *state;
        for memory in self.memory.drain(count..).rev() {
            match memory {
                Memory::Own(page) => store.free.push(page),
                // The store still has a reference, which eviction removes.
                Memory::Shared(page) => drop(page),
            }
            pages.release_last(&mut self.chain);
        }
    }
}

impl Drop for KvCache {
    fn drop(&mut self) {
        self.keep_pages(0);
        self.pool.state().pages.renounce(&mut self.chain);
    }
}
