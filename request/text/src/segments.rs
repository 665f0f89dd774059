//! Splits texts at added tokens, and caches the ids of the segments.
//!
//! Encoders first split a text at its added tokens and encode each part separately. If the split points can be found in
//! the raw text, before normalization, the ids of a part depend only on its bytes, so earlier turns of a chat need not
//! be normalized or encoded again. The self-check at load time verifies that a tokenizer behaves this way.

use std::sync::{Mutex, PoisonError};

use aho_corasick::{AhoCorasick, MatchKind};
use foldhash::fast::FixedState;
use std::hash::BuildHasher;

use crate::TextError;

/// Maximum number of cache sets, each with its own lock.
const MAX_SETS: usize = 64;
/// Minimum capacity per set: some 30 turns of 700 words. With less, random variation would overfill some sets.
const SET_BYTES: usize = 256 << 10;
/// Maximum entries per set, since lookup is linear.
const MAX_ENTRIES: usize = 512;
/// Overhead per entry in addition to its text and ids.
const ENTRY_BYTES: usize = 96;

/// Statistics of the cache that [`PromptEncoder::cache_segments`](crate::PromptEncoder::cache_segments) enables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentCache {
    /// Number of segments whose ids were reused.
    pub hits: u64,
    /// Number of segments that were encoded.
    pub misses: u64,
    /// Bytes of text that did not have to be encoded again.
    pub hit_bytes: u64,
    /// Bytes in use: text, ids and overhead per entry.
    pub bytes: u64,
    /// Maximum bytes in use.
    pub max_bytes: u64,
}

/// Finds added tokens, and caches the ids of the segments between them.
pub(crate) struct Segments {
    added: AhoCorasick,
    /// Id of each pattern of `added`.
    ids: Vec<u32>,
    cache: Cache,
}

impl Segments {
    /// Creates a splitter; `None` if an added token is matched other than by its bytes in the raw text, or if there are
    /// no added tokens.
    pub(crate) fn new(oracle: &tokenizers::Tokenizer) -> Option<Self> {
        let tokens = oracle.get_added_tokens_decoder();
        let plain = |token: &tokenizers::AddedToken| {
            !(token.lstrip || token.rstrip || token.single_word || token.normalized || token.content.is_empty())
        };
        if tokens.is_empty() || !tokens.values().all(plain) {
            return None;
        }
        let (ids, contents): (Vec<u32>, Vec<&str>) = tokens.iter().map(|(id, token)| (*id, &*token.content)).unzip();
        let added = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents).ok()?;
        Some(Self { added, ids, cache: Cache::new(0) })
    }

    /// Starts a new cache of at most `bytes` bytes.
    pub(crate) fn keep(&mut self, bytes: usize) {
        self.cache = Cache::new(bytes);
    }

    pub(crate) fn stats(&self) -> SegmentCache {
        self.cache.stats()
    }

    /// Returns the ids of `text`; `encode` encodes a part without added tokens. A text that is a single part is not
    /// cached, since nothing repeats without turns.
    pub(crate) fn encode(
        &self,
        text: &str,
        mut encode: impl FnMut(&str) -> Result<Vec<u32>, TextError>,
    ) -> Result<Vec<u32>, TextError> {
        let mut found = self.added.find_iter(text).peekable();
        if found.peek().is_none() {
            return encode(text);
        }
        // Tokens average about four bytes.
        let mut ids = Vec::with_capacity(text.len() / 4 + 16);
        let mut from = 0;
        for token in found {
            self.cache.encode(&text[from..token.start()], &mut ids, &mut encode)?;
            ids.push(self.ids[token.pattern().as_usize()]);
            from = token.end();
        }
        self.cache.encode(&text[from..], &mut ids, &mut encode)?;
        Ok(ids)
    }
}

/// Token ids by text, in separate sets with LRU eviction, so that a client with crafted texts can fill at most one set.
struct Cache {
    sets: Box<[Mutex<Set>]>,
    /// Maximum bytes per set.
    most_bytes: usize,
}

#[derive(Default)]
struct Set {
    /// Hash of each entry's text.
    hashes: Vec<u64>,
    entries: Vec<Entry>,
    bytes: usize,
    /// Incremented on every use.
    clock: u64,
    hits: u64,
    misses: u64,
    hit_bytes: u64,
}

struct Entry {
    text: Box<str>,
    ids: Box<[u32]>,
    used: u64,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.text.len() + size_of_val(&*self.ids) + ENTRY_BYTES
    }
}

impl Cache {
    fn new(bytes: usize) -> Self {
        let sets = (bytes / SET_BYTES).clamp(1, MAX_SETS);
        Self { sets: (0..sets).map(|_| Mutex::default()).collect(), most_bytes: bytes / sets }
    }

    /// Appends the ids of `text`.
    fn encode(
        &self,
        text: &str,
        ids: &mut Vec<u32>,
        encode: &mut impl FnMut(&str) -> Result<Vec<u32>, TextError>,
    ) -> Result<(), TextError> {
        if text.is_empty() {
            return Ok(());
        }
        if text.len() + ENTRY_BYTES > self.most_bytes {
            ids.extend(encode(text)?);
            return Ok(());
        }
        let hash = FixedState::with_seed(0).hash_one(text);
        // The upper bits select the set; the whole hash identifies an entry within it.
        let set = &self.sets[(hash >> 56) as usize % self.sets.len()];
        let lock = || set.lock().unwrap_or_else(PoisonError::into_inner);
        if lock().find(hash, text, ids) {
            return Ok(());
        }
        let fresh = encode(text)?;
        ids.extend_from_slice(&fresh);
        lock().insert(hash, Entry { text: text.into(), ids: fresh.into(), used: 0 }, self.most_bytes);
        Ok(())
    }

    fn stats(&self) -> SegmentCache {
        let mut stats =
            SegmentCache { max_bytes: (self.most_bytes * self.sets.len()) as u64, ..SegmentCache::default() };
        for set in &self.sets {
            let set = set.lock().unwrap_or_else(PoisonError::into_inner);
            stats.hits += set.hits;
            stats.misses += set.misses;
            stats.hit_bytes += set.hit_bytes;
            stats.bytes += set.bytes as u64;
        }
        stats
    }
}

impl Set {
    fn position(&self, hash: u64, text: &str) -> Option<usize> {
        let at = self.hashes.iter().position(|other| *other == hash)?;
        (*self.entries[at].text == *text).then_some(at)
    }

    /// Appends the cached ids of `text`, if present.
    fn find(&mut self, hash: u64, text: &str, ids: &mut Vec<u32>) -> bool {
        let Some(at) = self.position(hash, text) else {
            self.misses += 1;
            return false;
        };
        self.clock += 1;
        self.hits += 1;
        self.hit_bytes += text.len() as u64;
        let entry = &mut self.entries[at];
        entry.used = self.clock;
        ids.extend_from_slice(&entry.ids);
        true
    }

    fn insert(&mut self, hash: u64, mut entry: Entry, most_bytes: usize) {
        if let Some(at) = self.hashes.iter().position(|other| *other == hash) {
            // Another thread added the text first, or another text has the same hash.
            self.remove(at);
        }
        self.clock += 1;
        entry.used = self.clock;
        let bytes = entry.bytes();
        if bytes > most_bytes {
            return;
        }
        while self.bytes + bytes > most_bytes || self.entries.len() >= MAX_ENTRIES {
            let Some((oldest, _)) = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.used) else { break };
            self.remove(oldest);
        }
        self.bytes += bytes;
        self.hashes.push(hash);
        self.entries.push(entry);
    }

    fn remove(&mut self, at: usize) {
        self.hashes.swap_remove(at);
        self.bytes -= self.entries.swap_remove(at).bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids_of(cache: &Cache, text: &str, calls: &mut usize) -> Vec<u32> {
        let mut ids = vec![7];
        let mut encode = |text: &str| {
            *calls += 1;
            Ok(text.bytes().map(u32::from).collect())
        };
        cache.encode(text, &mut ids, &mut encode).unwrap();
        assert_eq!(ids[0], 7);
        ids[1..].to_vec()
    }

    #[test]
    fn what_was_encoded_once_is_found_again() {
        let (cache, mut calls) = (Cache::new(1 << 20), 0);
        for text in ["user\n", "a", "user\n", "", "b"] {
            assert_eq!(ids_of(&cache, text, &mut calls), text.bytes().map(u32::from).collect::<Vec<_>>());
        }
        assert_eq!(calls, 3);
        let SegmentCache { hits, misses, hit_bytes, .. } = cache.stats();
        assert_eq!((hits, misses, hit_bytes), (1, 3, 5));
    }

    #[test]
    fn it_holds_no_more_than_it_may_and_drops_what_is_oldest() {
        let (cache, mut calls) = (Cache::new(40_000), 0);
        let text = |number: usize| format!("{number:040}");
        for number in 0..10_000 {
            ids_of(&cache, &text(number), &mut calls);
            // Used all the time, so it stays.
            ids_of(&cache, "again", &mut calls);
        }
        assert_eq!(calls, 10_001);
        let stats = cache.stats();
        assert!(stats.bytes <= stats.max_bytes && stats.bytes > stats.max_bytes / 2, "{stats:?}");
        let entries = cache.sets.iter().map(|set| set.lock().unwrap().entries.iter().map(Entry::bytes).sum::<usize>());
        assert_eq!(entries.sum::<usize>() as u64, stats.bytes);
    }

    #[test]
    fn entries_of_a_set_are_bounded_and_long_texts_are_not_kept() {
        let (cache, mut calls) = (Cache::new(MAX_SETS << 20), 0);
        for number in 0..MAX_SETS * MAX_ENTRIES * 2 {
            ids_of(&cache, &number.to_string(), &mut calls);
        }
        assert!(cache.sets.iter().all(|set| set.lock().unwrap().entries.len() <= MAX_ENTRIES));
        let before = cache.stats().bytes;
        ids_of(&cache, &"x".repeat(1 << 20), &mut calls);
        // The text would fit, but its ids would not.
        ids_of(&cache, &"x".repeat(1 << 19), &mut calls);
        assert_eq!(cache.stats().bytes, before);
    }

    #[test]
    fn texts_with_one_hash_are_distinguished() {
        let mut set = Set::default();
        let entry = |text: &str| Entry { text: text.into(), ids: Box::new([1]), used: 0 };
        set.insert(5, entry("a"), 1000);
        assert!(!set.find(5, "b", &mut Vec::new()));
        set.insert(5, entry("b"), 1000);
        assert!(set.find(5, "b", &mut Vec::new()) && !set.find(5, "a", &mut Vec::new()));
        assert_eq!((set.entries.len(), set.bytes), (1, entry("b").bytes()));
    }
}
