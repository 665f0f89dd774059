//! Which pages a rank has: a bounded number of ids, what sequences were promised, those that hold a known prefix, and
//! which of those goes first. It knows nothing of bytes; [`super::store`] keeps them under the same ids.
//!
//! **No deadlock.** A sequence is admitted only when all pages that it may ever need are either free or held by no
//! sequence (`promised`); what was admitted therefore never waits for a page, and ends. What was not admitted waits for
//! those.
//!
//! **Exact prefixes.** A page is known by the page before it and by its own tokens, compared whole: no hash is trusted.
//! Of the pages that no sequence holds, the one that was released first is evicted first. A sequence releases its last
//! page first, and a sequence that holds a page holds all before it; so a page is never evicted before those that
//! follow it, and an id in the place of the page before never means another page than it did.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::page::PAGE_TOKENS;
use super::pool::KvUsage;

/// Names a page as long as it is used; then it may name another.
pub(super) type PageId = u32;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// Pages at most.
    pub(super) capacity: usize,
    /// Whether full pages are kept and found again.
    pub(super) reuse: bool,
    /// Distinct pages that sequences hold.
    pub(super) used: usize,
    /// Pages that admitted sequences may still take.
    pub(super) promised: usize,
    /// Ids that were used and are not.
    pub(super) free: Vec<PageId>,
    /// `[ids so far]`: those of full pages that are known.
    pub(super) sealed: Vec<Option<Sealed>>,
    /// Known pages by their content.
    pub(super) index: HashMap<Content, PageId>,
    /// Known pages that no sequence holds, by when they were released.
    pub(super) idle: BTreeMap<u64, PageId>,
    pub(super) clock: u64,
    /// Pages that gave way to others, since the start.
    pub(super) evicted: u64,
}

/// The content of a full page: its tokens, and the page before it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Content {
    pub(super) before: Option<PageId>,
    pub(super) tokens: Arc<[u32]>,
}

/// A known page.
#[derive(Debug)]
pub(super) struct Sealed {
    pub(super) content: Content,
    /// Sequences that hold it.
    pub(super) holders: usize,
    /// Its key in `idle`, while no sequence holds it.
    pub(super) idle_since: u64,
}

/// One sequence's pages.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub(super) pages: Vec<PageId>,
    /// All that were taken so far.
    pub(super) tokens: Vec<u32>,
    /// None: it shares nothing and was promised nothing. Otherwise pages that it may still take.
    pub(super) promised: Option<usize>,
}

/// The result of sealing a full page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seal {
    /// It stays the sequence's own: nothing is shared.
    Own,
    /// Others can share it from now on.
    Known,
    /// The same content is known already: the sequence continues with that page, and its own is free.
    Duplicate { known: PageId },
}

impl Pages {
    /// At most `capacity` pages; `reuse`: whether prefixes are shared.
    pub(super) fn new(capacity: usize, reuse: bool) -> Self {
        Self { capacity, reuse, ..Self::default() }
    }

    /// The pages at this moment.
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

    /// A sequence that may come to hold `tokens` tokens, of which `prompt` are known; none while there are too few
    /// pages for that. It begins with the longest known prefix of the prompt that leaves at least one token to compute.
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

    /// Gives the sequence one page more, to write to; none when all are held, or promised to others.
    pub(super) fn take(&mut self, chain: &mut Chain) -> Option<PageId> {
        let promised = chain.promised.is_some_and(|left| left > 0);
        // Unpromised pages may not use up what others were promised.
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

    /// Makes a page of the sequence known, all of whose tokens have come, so that others can share it. Without reuse,
    /// or behind a page that is not known, it stays the sequence's own.
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

    /// A sealed page of a planned pool can be found from now on, unless another with its content has become known
    /// meanwhile: then it goes with the sequences that hold it.
    pub(super) fn make_known(&mut self, id: PageId) {
        if let Some(page) = &self.sealed[id as usize] {
            self.index.entry(page.content.clone()).or_insert(id);
        }
    }

    /// The sequence releases its last page.
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

    /// The sequence will take no more pages.
    pub(super) fn renounce(&mut self, chain: &mut Chain) {
        self.promised -= chain.promised.replace(0).unwrap_or(0);
    }

    /// Forgets all pages that no sequence holds, and gives how many they were.
    pub(super) fn flush(&mut self) -> usize {
        let idle = self.idle.len();
        while let Some(id) = self.evict() {
            self.free.push(id);
        }
        self.evicted -= idle as u64;
        idle
    }

    /// The known pages with which a prompt begins, without its last token.
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

    /// Removes the page that was released first from the known pages.
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
