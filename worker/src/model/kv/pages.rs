//! A rank's page table: a bounded number of page ids, the pages promised to sequences, the pages with a known prefix,
//! and the eviction order. It manages ids only; [`super::store`] stores the memory under the same ids.
//!
//! **No deadlock.** A sequence is admitted only if every page that it may ever need is either free or held by no
//! sequence. These pages are then reserved for it (`promised`), so an admitted sequence never waits for a page and runs
//! to completion. Other sequences wait until pages become available.
//!
//! **Exact prefixes.** A page is identified by its predecessor and its own tokens, which are compared in full instead
//! of trusting a hash. Among the pages that no sequence holds, the one released first is evicted first. A sequence
//! releases its last page first, and holding a page implies holding all of its predecessors. A page is therefore never
//! evicted before its successors, and a predecessor's id never refers to a different page.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::page::PAGE_TOKENS;
use super::pool::KvUsage;

/// Identifies a page while the page is in use. The id may be reused afterwards.
pub(super) type PageId = u32;

/// A rank's page table.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// Maximum number of pages.
    pub(super) capacity: usize,
    /// Whether full pages are kept for reuse.
    pub(super) reuse: bool,
    /// Distinct pages that sequences hold.
    pub(super) used: usize,
    /// Pages that admitted sequences may still claim.
    pub(super) promised: usize,
    /// Ids no longer used.
    pub(super) free: Vec<PageId>,
    /// `[ids so far]`: full pages with known content.
    pub(super) sealed: Vec<Option<Sealed>>,
    /// Known pages by content.
    pub(super) index: HashMap<Content, PageId>,
    /// Known pages that no sequence holds, in order of release.
    pub(super) idle: BTreeMap<u64, PageId>,
    pub(super) clock: u64,
    /// Pages evicted since startup.
    pub(super) evicted: u64,
}

/// The content of a full page: its tokens and its predecessor.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Content {
    pub(super) before: Option<PageId>,
    pub(super) tokens: Arc<[u32]>,
}

/// A known page.
#[derive(Debug)]
pub(super) struct Sealed {
    pub(super) content: Content,
    /// Number of sequences that hold this page.
    pub(super) holders: usize,
    /// The page's key in `idle` while no sequence holds it.
    pub(super) idle_since: u64,
}

/// One sequence's pages.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub(super) pages: Vec<PageId>,
    /// The sequence's token ids so far.
    pub(super) tokens: Vec<u32>,
    /// Number of pages that the sequence may still claim; `None` for a sequence without prefix sharing or promised
    /// pages.
    pub(super) promised: Option<usize>,
}

/// The result of sealing a full page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seal {
    /// The page remains private to the sequence.
    Own,
    /// Other sequences can share the page from now on.
    Known,
    /// Another page has the same content. The sequence continues with that page, and its own page is freed.
    Duplicate { known: PageId },
}

impl Pages {
    /// Creates a table of at most `capacity` pages; `reuse` enables prefix sharing.
    pub(super) fn new(capacity: usize, reuse: bool) -> Self {
        Self { capacity, reuse, ..Self::default() }
    }

    /// The current usage.
    pub(super) fn usage(&self) -> KvUsage {
        let count = |pages: usize| pages as u64;
        KvUsage {
            used: count(self.used),
            cached: count(self.idle.len()),
            capacity: count(self.capacity),
            promised: count(self.promised),
            evicted: self.evicted,
        }
    }

    /// Admits a sequence that begins with `prompt` and may grow to `tokens` tokens, or returns `None` if there are too
    /// few pages for now. The sequence starts with the longest known prefix of the prompt that leaves at least one
    /// token to compute.
    pub(super) fn admit(&mut self, prompt: &[u32], tokens: usize) -> Option<Chain> {
        let prefix = self.find(prompt);
        let idle = prefix.iter().filter(|&&id| self.known(id).holders == 0).count();
        let new = tokens.div_ceil(PAGE_TOKENS).saturating_sub(prefix.len());
        let wanted = self.used.checked_add(self.promised)?.checked_add(idle)?.checked_add(new)?;
        if wanted > self.capacity {
            return None;
        }
        self.promised += new;
        prefix.iter().for_each(|&id| self.hold(id));
        let tokens = prompt[..prefix.len() * PAGE_TOKENS].to_vec();
        Some(Chain { pages: prefix, tokens, promised: Some(new) })
    }

    /// Allocates another page for the sequence to write to, or returns `None` if all pages are held or promised to
    /// others.
    pub(super) fn take(&mut self, chain: &mut Chain) -> Option<PageId> {
        let promised = chain.promised.is_some_and(|left| left > 0);
        // An allocation without a promise must not consume pages that are promised to other sequences.
        if !promised && self.used + self.promised >= self.capacity {
            return None;
        }
        if promised {
            chain.promised = chain.promised.map(|left| left - 1);
            self.promised -= 1;
        }
        let id = match self.free.pop() {
            Some(id) => id,
            None if self.used + self.idle.len() < self.capacity => {
                self.sealed.push(None);
                PageId::try_from(self.sealed.len() - 1).ok()?
            }
            None => self.evict()?,
        };
        self.used += 1;
        chain.pages.push(id);
        Some(id)
    }

    /// Makes a sequence's full page known, so that other sequences can share it. The page stays private if reuse is
    /// disabled or its predecessor is unknown.
    pub(super) fn seal(&mut self, chain: &mut Chain, index: usize) -> Seal {
        let before = index.checked_sub(1).map(|before| chain.pages[before]);
        let follows = before.is_none_or(|before| self.sealed[before as usize].is_some());
        if !self.reuse || chain.promised.is_none() || !follows {
            return Seal::Own;
        }
        let id = chain.pages[index];
        let tokens = Arc::from(&chain.tokens[index * PAGE_TOKENS..(index + 1) * PAGE_TOKENS]);
        let content = Content { before, tokens };
        if let Some(&known) = self.index.get(&content) {
            self.used -= 1;
            self.free.push(id);
            self.hold(known);
            chain.pages[index] = known;
            return Seal::Duplicate { known };
        }
        self.index.insert(content.clone(), id);
        self.sealed[id as usize] = Some(Sealed { content, holders: 1, idle_since: 0 });
        Seal::Known
    }

    /// Makes a sealed page of a planned pool known, unless another page with the same content has become known in the
    /// meantime. In that case the page is dropped once no sequence holds it.
    pub(super) fn make_known(&mut self, id: PageId) {
        if let Some(page) = &self.sealed[id as usize] {
            self.index.entry(page.content.clone()).or_insert(id);
        }
    }

    /// Releases the sequence's last page.
    pub(super) fn release_last(&mut self, chain: &mut Chain) {
        let Some(id) = chain.pages.pop() else { return };
        let Some(page) = &mut self.sealed[id as usize] else {
            self.used -= 1;
            return self.free.push(id);
        };
        page.holders -= 1;
        if page.holders == 0 {
            self.clock += 1;
            page.idle_since = self.clock;
            self.idle.insert(self.clock, id);
            self.used -= 1;
        }
    }

    /// Releases the pages that are still promised to the sequence.
    pub(super) fn renounce(&mut self, chain: &mut Chain) {
        self.promised -= chain.promised.replace(0).unwrap_or(0);
    }

    /// Drops all pages that no sequence holds, and returns how many there were.
    pub(super) fn flush(&mut self) -> usize {
        let idle = self.idle.len();
        while let Some(id) = self.evict() {
            self.free.push(id);
        }
        self.evicted -= idle as u64;
        idle
    }

    /// Finds the known pages that match the start of a prompt, excluding the prompt's last token.
    fn find(&self, prompt: &[u32]) -> Vec<PageId> {
        let mut found = Vec::new();
        let known = prompt.len().saturating_sub(1) / PAGE_TOKENS;
        for tokens in prompt.chunks_exact(PAGE_TOKENS).take(known) {
            let content = Content { before: found.last().copied(), tokens: tokens.into() };
            let Some(&id) = self.index.get(&content) else { break };
            found.push(id);
        }
        found
    }

    fn known(&self, id: PageId) -> &Sealed {
        self.sealed[id as usize].as_ref().expect("an indexed page is sealed until it is evicted")
    }

    fn hold(&mut self, id: PageId) {
        let page = self.sealed[id as usize].as_mut().expect("an indexed page is sealed until it is evicted");
        if page.holders == 0 {
            self.idle.remove(&page.idle_since);
            self.used += 1;
        }
        page.holders += 1;
    }

    /// Evicts the page that was released first.
    fn evict(&mut self) -> Option<PageId> {
        let (_, id) = self.idle.pop_first()?;
        let page = self.sealed[id as usize].take()?;
        if self.index.get(&page.content) == Some(&id) {
            self.index.remove(&page.content);
        }
        self.evicted += 1;
        Some(id)
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
