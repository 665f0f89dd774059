//! Evidence from responses: the engine's token count for a prompt, compared with the gateway's.
//!
//! A single difference may have other causes, but several consecutive ones on chats with the same shapes prove a
//! mismatch. Any of those shapes that has never appeared in a chat with matching counts is then distrusted until the
//! counts match again. Chats with distrusted shapes are still scored.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use semmoe_text::Shapes;

/// Number of consecutive differences that prove a mismatch.
const IN_A_ROW: u8 = 3;
/// Maximum number of shape sets whose differences are remembered.
const MAX_SETS: usize = 64;

/// Token count comparisons for one backend's prompts.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Shapes of chats whose counts agreed; an atomic, because every request reads it.
    agreed: AtomicU16,
    /// Shapes that are not trusted.
    differs: AtomicU16,
    /// Whether any differences are remembered.
    is_open: AtomicBool,
    /// Consecutive differences for chats of each shape set.
    missed: Mutex<BTreeMap<Shapes, u8>>,
}

impl Counts {
    /// Shapes whose tokens the engine counts differently.
    pub(crate) fn differs(&self) -> Shapes {
        Shapes::from_bits(self.differs.load(Ordering::Relaxed))
    }

    /// Shapes whose tokens the engine counts equally.
    pub(crate) fn agreed(&self) -> Shapes {
        Shapes::from_bits(self.agreed.load(Ordering::Relaxed))
    }

    /// Discards all comparisons, because the engine may have been replaced.
    pub(crate) fn reset(&self) {
        let mut missed = self.missed();
        missed.clear();
        self.is_open.store(false, Ordering::Relaxed);
        self.agreed.store(0, Ordering::Relaxed);
        self.differs.store(0, Ordering::Relaxed);
    }

    /// Records a chat that both sides counted. Returns the shapes that lost or regained trust.
    pub(crate) fn note(&self, shapes: Shapes, agree: bool) -> Option<Change> {
        // Fast path: most counts agree, as the previous ones did.
        if agree && !self.is_open.load(Ordering::Relaxed) && self.agreed().has(shapes) {
            return None;
        }
        let mut missed = self.missed();
        let (agreed, differs) = (self.agreed(), self.differs());
        if agree {
            missed.remove(&shapes);
            let is_open = !missed.is_empty() || !differs.without(shapes).is_empty();
            self.is_open.store(is_open, Ordering::Relaxed);
            self.agreed.store((agreed | shapes).bits(), Ordering::Relaxed);
            self.differs.store(differs.without(shapes).bits(), Ordering::Relaxed);
            return Some(differs.both(shapes)).filter(|again| !again.is_empty()).map(Change::Trusted);
        }
        self.is_open.store(true, Ordering::Relaxed);
        if missed.len() >= MAX_SETS && !missed.contains_key(&shapes) {
            missed.pop_first();
        }
        let count = missed.entry(shapes).or_default();
        *count = count.saturating_add(1);
        if *count < IN_A_ROW {
            return None;
        }
        missed.remove(&shapes);
        let suspects = [shapes.without(agreed), shapes.without(Shapes::PLAIN), shapes];
        let blamed = suspects.into_iter().find(|suspects| !suspects.is_empty()).unwrap_or(shapes);
        self.agreed.store(agreed.without(blamed).bits(), Ordering::Relaxed);
        self.differs.store((differs | blamed).bits(), Ordering::Relaxed);
        Some(blamed.without(differs)).filter(|fresh| !fresh.is_empty()).map(Change::Distrusted)
    }

    fn missed(&self) -> MutexGuard<'_, BTreeMap<Shapes, u8>> {
        self.missed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Shapes whose trust changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Distrusted(Shapes),
    Trusted(Shapes),
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Shapes = Shapes::PLAIN;

    fn note(counts: &Counts, shapes: Shapes, agree: bool, times: usize) -> Option<Change> {
        (0..times).filter_map(|_| counts.note(shapes, agree)).last()
    }

    #[test]
    fn what_no_equal_chat_has_is_not_trusted_and_comes_back() {
        let (counts, tools) = (Counts::default(), PLAIN | Shapes::TOOLS);
        assert_eq!(note(&counts, PLAIN, true, 3), None);
        assert_eq!(note(&counts, tools, false, 2), None);
        assert_eq!(counts.note(tools, false), Some(Change::Distrusted(Shapes::TOOLS)));
        assert_eq!((counts.differs(), counts.agreed()), (Shapes::TOOLS, PLAIN));
        assert_eq!(note(&counts, tools, false, 9), None, "said once");
        assert_eq!(counts.note(tools, true), Some(Change::Trusted(Shapes::TOOLS)));
        assert_eq!((counts.differs(), counts.agreed()), (Shapes::NONE, tools));
    }

    #[test]
    fn one_difference_among_equal_counts_proves_nothing() {
        let counts = Counts::default();
        for _ in 0..9 {
            assert_eq!((note(&counts, PLAIN, false, 2), counts.note(PLAIN, true)), (None, None));
        }
        assert_eq!(note(&counts, PLAIN, false, 3), Some(Change::Distrusted(PLAIN)));
        counts.reset();
        assert_eq!((counts.differs(), counts.agreed()), (Shapes::NONE, Shapes::NONE));
    }

    #[test]
    fn shapes_that_all_agreed_before_are_distrusted_with_the_plain_one_last() {
        let (counts, tools) = (Counts::default(), PLAIN | Shapes::TOOLS);
        assert_eq!(note(&counts, tools, true, 1), None);
        assert_eq!(note(&counts, tools, false, 3), Some(Change::Distrusted(Shapes::TOOLS)));
        for bits in 0..1000 {
            counts.note(Shapes::from_bits(bits), false);
        }
        assert!(counts.missed().len() <= MAX_SETS);
    }
}
