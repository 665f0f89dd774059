//! One sequence's pages. Dropping it lets go of them.

use super::CacheShape;
use super::page::{PAGE_TOKENS, Page, value_stride};
use super::pool::{Held, KvPool, ROOT};

/// Keys and values of one sequence in every layer, at most `max_positions` tokens.
#[derive(Debug)]
pub struct KvCache {
    pool: KvPool,
    pages: Vec<Slot>,
    len: usize,
    /// The tokens of the page that is not full yet.
    tail: Vec<u32>,
    /// Tokens that were there from the start.
    reused: usize,
    /// None: it shares nothing and was promised nothing. Otherwise pages that it may still take.
    promised: Option<usize>,
}

#[derive(Debug)]
enum Slot {
    /// This sequence's alone: being filled, or never to be shared.
    Own(Page),
    /// Full, and known to the pool.
    Shared(Held),
}

impl Slot {
    fn page(&self) -> &Page {
        match self {
            Self::Own(page) => page,
            Self::Shared(held) => &held.page,
        }
    }
}

impl KvCache {
    pub(super) fn alone(pool: KvPool) -> Self {
        Self { pool, pages: Vec::new(), len: 0, tail: Vec::new(), reused: 0, promised: None }
    }

    pub(super) fn admitted(pool: KvPool, prefix: Vec<Held>, promised: usize) -> Self {
        let reused = prefix.len() * PAGE_TOKENS;
        let pages = prefix.into_iter().map(Slot::Shared).collect();
        Self { pool, pages, len: reused, tail: Vec::new(), reused, promised: Some(promised) }
    }

    /// Tokens of the sequence so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token has been taken yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that the sequence may still take.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.shape().max_positions - self.len
    }

    /// Tokens that another sequence had computed before this one began.
    #[must_use]
    pub fn reused(&self) -> usize {
        self.reused
    }

    /// Forgets all tokens after the first `len`; what remains is as if they had never been taken.
    ///
    /// # Panics
    /// If the sequence shares pages, which must not change.
    pub fn truncate(&mut self, len: usize) {
        assert!(self.promised.is_none(), "a sequence that shares pages cannot be cut");
        if len >= self.len {
            return;
        }
        let pages = len.div_ceil(PAGE_TOKENS);
        for slot in self.pages.drain(pages..).rev() {
            give_back(&self.pool, slot);
        }
        let held = (self.len - len / PAGE_TOKENS * PAGE_TOKENS).min(PAGE_TOKENS);
        if let Some(Slot::Own(page)) = self.pages.last_mut().filter(|_| !len.is_multiple_of(PAGE_TOKENS)) {
            page.truncate_routes(len % PAGE_TOKENS, held);
        }
        self.len = len;
    }

    /// Makes room for `tokens` more, which count only after [`KvCache::commit`]; false if there are too few pages, which
    /// cannot be for a sequence that was promised them.
    pub(in crate::model) fn reserve(&mut self, tokens: usize) -> bool {
        let pages = (self.len + tokens).div_ceil(PAGE_TOKENS);
        while self.pages.len() < pages {
            let promised = self.promised.is_some_and(|left| left > 0);
            let Some(page) = self.pool.take(promised) else { return false };
            if promised {
                self.promised = self.promised.map(|left| left - 1);
            }
            self.pages.push(Slot::Own(page));
        }
        true
    }

    /// The tokens that were written last count; `routes` is `[tokens, L, k]`.
    pub(in crate::model) fn commit(&mut self, tokens: &[u32], routes: &[u16]) {
        let width = routes.len() / tokens.len().max(1);
        let (mut tokens, mut routes) = (tokens, routes);
        while !tokens.is_empty() {
            let index = self.len / PAGE_TOKENS;
            let count = tokens.len().min(PAGE_TOKENS - self.len % PAGE_TOKENS);
            let (now, later) = tokens.split_at(count);
            let (new_routes, later_routes) = routes.split_at(count * width);
            if let Some(Slot::Own(page)) = self.pages.get_mut(index) {
                page.push_routes(new_routes, width);
            }
            self.len += count;
            if self.promised.is_some() {
                self.tail.extend_from_slice(now);
                if self.tail.len() == PAGE_TOKENS {
                    self.seal(index);
                }
            }
            (tokens, routes) = (later, later_routes);
        }
    }

    /// Lets others share the page, which is full.
    fn seal(&mut self, index: usize) {
        let before = match index.checked_sub(1).map(|before| &self.pages[before]) {
            None => ROOT,
            Some(Slot::Shared(held)) => held.id,
            // Without reuse.
            Some(Slot::Own(_)) => return self.tail.clear(),
        };
        // Pages are taken out of the middle: those of this very step may lie behind it.
        if let Slot::Own(page) = self.pages.remove(index) {
            let slot = match self.pool.seal(before, &self.tail, page) {
                Ok(held) => Slot::Shared(held),
                Err(page) => Slot::Own(page),
            };
            self.pages.insert(index, slot);
        }
        self.tail.clear();
    }

    pub(in crate::model) fn shape(&self) -> &CacheShape {
        self.pool.shape()
    }

    /// The pages of the first `tokens` tokens, each with its first position and how many of the tokens it holds.
    pub(in crate::model) fn pages(&self, tokens: usize) -> impl Iterator<Item = (usize, usize, &Page)> {
        let starts = (0..tokens).step_by(PAGE_TOKENS);
        starts.zip(&self.pages).map(move |(first, slot)| (first, (tokens - first).min(PAGE_TOKENS), slot.page()))
    }

    /// Elements from one value to the next.
    pub(in crate::model) fn value_stride(&self) -> usize {
        value_stride(self.shape())
    }

    /// Writes one head's key and value at a position that was reserved.
    pub(in crate::model) fn write(&mut self, layer: usize, head: usize, position: usize, key: &[f32], value: &[f32]) {
        match &mut self.pages[position / PAGE_TOKENS] {
            Slot::Own(page) => {
                page.write(self.pool.shape(), (layer, head), position % PAGE_TOKENS, key, value);
            }
            Slot::Shared(_) => unreachable!("a position that is not full is in a page of the sequence's own"),
        }
    }

    /// `[tokens from `first` on, L, k]`: the experts of the sequence's tokens, those of reused ones included.
    #[must_use]
    pub fn routes(&self, first: usize) -> Vec<u16> {
        let mut routes = Vec::new();
        for (start, held, page) in self.pages(self.len) {
            let skipped = first.saturating_sub(start).min(held);
            let width = page.routes().len() / held;
            routes.extend_from_slice(&page.routes()[skipped * width..held * width]);
        }
        routes
    }
}

fn give_back(pool: &KvPool, slot: Slot) {
    match slot {
        Slot::Own(page) => pool.give_back(page),
        Slot::Shared(held) => pool.release(held),
    }
}

impl Drop for KvCache {
    /// The last page first: see the pool on eviction.
    fn drop(&mut self) {
        for slot in self.pages.drain(..).rev() {
            give_back(&self.pool, slot);
        }
        self.pool.renounce(self.promised.unwrap_or(0));
    }
}

#[cfg(test)]
impl KvCache {
    /// Which pages it holds.
    pub(super) fn held_pages(&self) -> impl Iterator<Item = *const Page> {
        self.pages.iter().map(|slot| std::ptr::from_ref(slot.page()))
    }
}
