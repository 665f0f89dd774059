//! A rank's pages: a bounded number of them, those that hold a known prefix, and which of those goes first.
//!
//! **No deadlock.** A sequence is admitted only when all pages that it may ever need are either free or held by nobody
//! (`promised`); what was admitted therefore never waits for a page, and ends. What was not admitted waits for those.
//!
//! **Exact prefixes.** A page is known by the page before it and by its own tokens, compared whole: no hash is trusted. Of
//! pages that nobody holds the one that was let go of first is evicted first. A sequence lets go of its last page first, and
//! who holds a page holds all before it; so a page is never evicted before those that follow it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::CacheShape;
use super::cache::KvCache;
use super::page::{self, PAGE_TOKENS, Page};
use crate::model::compute::Arena;

/// Names the content of a full page; never used again for another.
pub(super) type PageId = u64;
/// Before a sequence's first page.
pub(super) const ROOT: PageId = 0;

/// See the module. Clones share the pool.
#[derive(Clone, Debug)]
pub struct KvPool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    shape: CacheShape,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Pages at most.
    capacity: usize,
    /// Whether full pages are kept and found again.
    reuse: bool,
    /// Distinct pages that sequences hold.
    used: usize,
    /// Pages that admitted sequences may still take.
    promised: usize,
    /// Memory of pages that hold nothing.
    free: Vec<Page>,
    /// Memory that no page has yet.
    arena: Option<Arena>,
    /// What is known, by what it is.
    index: HashMap<Content, PageId>,
    entries: HashMap<PageId, Entry>,
    /// Known pages that nobody holds, by when they were let go of.
    idle: BTreeMap<u64, PageId>,
    next_id: PageId,
    clock: u64,
    /// Pages that gave way to others, since the start.
    evicted: u64,
}

/// What a full page holds: its tokens after those of the page before it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Content {
    before: PageId,
    tokens: Box<[u32]>,
}

#[derive(Debug)]
struct Entry {
    page: Arc<Page>,
    content: Content,
    /// Sequences that hold it.
    holders: usize,
    /// Its key in `idle`, while nobody holds it.
    idle_since: u64,
}

/// A full page that a sequence holds.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) id: PageId,
    pub(super) page: Arc<Page>,
}

/// The pages of a pool at one moment: used + cached + free = capacity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct KvUsage {
    /// Distinct pages that sequences hold.
    pub used: u64,
    /// Pages that nobody holds, kept for prompts that begin as theirs did.
    pub cached: u64,
    /// Pages at most.
    pub capacity: u64,
    /// Pages that admitted sequences may still take.
    pub promised: u64,
    /// Cached pages that gave way to others, since the start.
    pub evicted: u64,
}

impl KvPool {
    /// A pool of at most `capacity` pages, which are allocated as they are needed; `reuse`: whether prefixes are shared.
    #[must_use]
    pub fn new(shape: CacheShape, capacity: usize, reuse: bool) -> Self {
        let state = State {
            capacity,
            reuse,
            used: 0,
            promised: 0,
            free: Vec::new(),
            arena: None,
            index: HashMap::new(),
            entries: HashMap::new(),
            idle: BTreeMap::new(),
            next_id: ROOT + 1,
            clock: 0,
            evicted: 0,
        };
        Self(Arc::new(Shared { shape, state: Mutex::new(state) }))
    }

    pub(super) fn shape(&self) -> &CacheShape {
        &self.0.shape
    }

    /// The pages at this moment.
    #[must_use]
    pub fn usage(&self) -> KvUsage {
        let state = self.state();
        let count = |pages: usize| pages as u64;
        KvUsage {
            used: count(state.used),
            cached: count(state.idle.len()),
            capacity: count(state.capacity),
            promised: count(state.promised),
            evicted: state.evicted,
        }
    }

    /// A sequence that may come to hold `tokens` tokens, of which `prompt` are known; none while there are too few pages for
    /// that. It begins with the longest known prefix of the prompt that leaves at least one token to compute.
    #[must_use]
    pub fn admit(&self, prompt: &[u32], tokens: usize) -> Option<KvCache> {
        let mut state = self.state();
        let prefix = state.find(prompt);
        let idle = prefix.iter().filter(|id| state.entries[id].holders == 0).count();
        let new = tokens.div_ceil(PAGE_TOKENS).saturating_sub(prefix.len());
        let wanted = state.used.checked_add(state.promised)?.checked_add(idle)?.checked_add(new)?;
        if wanted > state.capacity {
            return None;
        }
        state.promised += new;
        let pages = prefix.into_iter().map(|id| state.hold(id)).collect();
        drop(state);
        Some(KvCache::admitted(self.clone(), pages, new))
    }

    /// A sequence of its own, which shares nothing and takes its pages as it comes to need them.
    #[must_use]
    pub fn alone(&self) -> KvCache {
        KvCache::alone(self.clone())
    }

    /// Forgets all pages that nobody holds, and gives how many they were; their memory goes back to the system.
    pub fn flush(&self) -> usize {
        let mut state = self.state();
        let idle = state.idle.len();
        while let Some(page) = state.evict() {
            state.free.push(page);
        }
        state.evicted -= idle as u64;
        state.free.iter_mut().for_each(Page::release);
        idle
    }

    /// A page to write to; `promised`: whether it counts against what its sequence was promised. None when all are held.
    pub(super) fn take(&self, promised: bool) -> Option<Page> {
        let mut state = self.state();
        // Unpromised pages may not use up what others were promised.
        if !promised && state.used + state.promised >= state.capacity {
            return None;
        }
        if promised {
            state.promised -= 1;
        }
        let page = match state.free.pop() {
            Some(page) => page,
            None if state.used + state.idle.len() < state.capacity => state.new_page(&self.0.shape)?,
            None => state.evict()?,
        };
        state.used += 1;
        Some(page)
    }

    /// Makes a full page known, so that others can share it; gives the one to go on with, which is another's if the same
    /// content is known already. Without reuse it stays the sequence's own.
    pub(super) fn seal(&self, before: PageId, tokens: &[u32], page: Page) -> Result<Held, Page> {
        let mut state = self.state();
        if !state.reuse {
            return Err(page);
        }
        let content = Content { before, tokens: tokens.into() };
        if let Some(&id) = state.index.get(&content) {
            state.used -= 1;
            state.recycle(page);
            return Ok(state.hold(id));
        }
        let id = state.next_id;
        state.next_id += 1;
        let page = Arc::new(page);
        state.index.insert(content.clone(), id);
        state.entries.insert(id, Entry { page: Arc::clone(&page), content, holders: 1, idle_since: 0 });
        Ok(Held { id, page })
    }

    /// A sequence lets go of a page that is its own.
    pub(super) fn give_back(&self, page: Page) {
        let mut state = self.state();
        state.used -= 1;
        state.recycle(page);
    }

    /// A sequence lets go of a page that others may hold.
    pub(super) fn release(&self, held: Held) {
        let mut state = self.state();
        // The pool's own reference is the last one from here on: eviction takes the page out of it.
        drop(held.page);
        state.release(held.id);
    }

    /// A sequence will not take so many pages after all.
    pub(super) fn renounce(&self, pages: usize) {
        self.state().promised -= pages;
    }

    /// A thread that panicked while it held the lock left a page too many behind at worst.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The known pages with which a prompt begins, without its last token.
    fn find(&self, prompt: &[u32]) -> Vec<PageId> {
        let mut found = Vec::new();
        let mut before = ROOT;
        let known = prompt.len().saturating_sub(1) / PAGE_TOKENS;
        for tokens in prompt.chunks_exact(PAGE_TOKENS).take(known) {
            let content = Content { before, tokens: tokens.into() };
            let Some(&id) = self.index.get(&content) else { break };
            found.push(id);
            before = id;
        }
        found
    }

    fn hold(&mut self, id: PageId) -> Held {
        let entry = self.entries.get_mut(&id).expect("an indexed page has an entry until it is evicted");
        if entry.holders == 0 {
            self.idle.remove(&entry.idle_since);
            self.used += 1;
        }
        entry.holders += 1;
        Held { id, page: Arc::clone(&entry.page) }
    }

    fn release(&mut self, id: PageId) {
        let entry = self.entries.get_mut(&id).expect("a held page has an entry");
        entry.holders -= 1;
        if entry.holders == 0 {
            self.clock += 1;
            entry.idle_since = self.clock;
            self.idle.insert(self.clock, id);
            self.used -= 1;
        }
    }

    /// Takes the page that was let go of first out of what is known.
    fn evict(&mut self) -> Option<Page> {
        let (_, id) = self.idle.pop_first()?;
        let entry = self.entries.remove(&id)?;
        self.index.remove(&entry.content);
        self.evicted += 1;
        let mut page = Arc::into_inner(entry.page)?;
        page.clear();
        Some(page)
    }

    /// One that was never used.
    fn new_page(&mut self, shape: &CacheShape) -> Option<Page> {
        if let Some(page) = self.arena.as_mut().and_then(|arena| Page::take(shape, arena)) {
            return Some(page);
        }
        Page::take(shape, self.arena.insert(page::arena(shape)))
    }

    fn recycle(&mut self, mut page: Page) {
        page.clear();
        self.free.push(page);
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
