//! Whether pins take effect.
//!
//! An engine may accept a pin and ignore it: an older version that knows another field, a proxy that drops the header, a
//! typo that vLLM passes over in silence. So a pin is believed only on evidence: the engine's echo header, the rank in an
//! answer's meta data ([`echoed_rank`], [`rank_in_meta`](crate::pieces::rank_in_meta)), or loads per rank that agree with what is in flight
//! ([`loads_agree`]). [`PinWatch`] makes a verdict of it.

use ::http::{HeaderMap, HeaderValue};

use crate::pin;

/// Score of one contradiction; an agreement takes 1 away.
const CONTRADICTION: u32 = 4;
/// Score at which pins count as ignored: three contradictions in a row.
const IGNORED_AT: u32 = 12;
/// Agreements in a row after which pins count as honoured.
const HONOURED_AFTER: u32 = 8;
/// Agreements in a row that bring back a backend that ignored pins. Two ranks agree by chance half of the time.
const RECOVERED_AFTER: u32 = 32;

/// What is known about a backend's pins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pins {
    /// Not enough evidence.
    #[default]
    Unverified,
    /// Requests run where they are pinned.
    Honoured,
    /// Requests run elsewhere.
    Ignored,
}

impl Pins {
    /// For status documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unverified => "unverified",
            Self::Honoured => "honoured",
            Self::Ignored => "pin ignored",
        }
    }
}

/// Evidence about one backend, and the verdict. An engine that ignores pins and has two ranks gains 1.5 points per
/// observation, so it is found after 8 of them on average; one that honours them may contradict itself in one of six
/// (loads that are a moment old) without being called names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinWatch {
    /// The verdict.
    pub pins: Pins,
    /// Observations that agreed.
    pub agreed: u64,
    /// Observations that did not.
    pub contradicted: u64,
    score: u32,
    row: u32,
}

impl PinWatch {
    /// Adds one observation; returns the verdict if it changed.
    pub fn observe(&mut self, agrees: bool) -> Option<Pins> {
        let before = self.pins;
        if agrees {
            self.agreed += 1;
            self.row = self.row.saturating_add(1);
            self.score = self.score.saturating_sub(1);
            let needed = if before == Pins::Ignored { RECOVERED_AFTER } else { HONOURED_AFTER };
            if self.row >= needed {
                self.pins = Pins::Honoured;
                self.score = 0;
            }
        } else {
            self.contradicted += 1;
            self.row = 0;
            self.score = (self.score + CONTRADICTION).min(IGNORED_AT);
            if self.score == IGNORED_AT {
                self.pins = Pins::Ignored;
            }
        }
        (self.pins != before).then_some(self.pins)
    }
}

/// The rank that an answer's header names; semmoe's worker sends one.
pub fn echoed_rank(headers: &HeaderMap) -> Option<u32> {
    headers.get(pin::HEADER).and_then(|value: &HeaderValue| value.to_str().ok()?.trim().parse().ok())
}

/// Compares requests that were in flight on each rank all the while the engine counted (`ours`) with its count
/// (`theirs`; other clients may add to it). `Some(true)`: each rank has at least ours. `Some(false)`: the engine knows of
/// as many requests, but elsewhere. `None`: nothing in flight, or the engine's count is behind, which says nothing.
///
/// Loads that are spread evenly on both sides agree by chance, so agreement counts only where the ranks differ.
pub fn loads_agree(ours: &[u64], theirs: &[u64]) -> Option<bool> {
    let sum = |counts: &[u64]| counts.iter().fold(0u64, |sum, count| sum.saturating_add(*count));
    if ours.len() != theirs.len() || sum(ours) == 0 || sum(theirs) < sum(ours) {
        return None;
    }
    if ours.iter().zip(theirs).any(|(ours, theirs)| theirs < ours) {
        return Some(false);
    }
    let uneven = ours.iter().any(|count| *count != ours[0]);
    uneven.then_some(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn three_contradictions_in_a_row_are_enough_and_one_is_not() {
        let mut watch = PinWatch::default();
        assert_eq!([false, false, false].map(|agrees| watch.observe(agrees)), [None, None, Some(Pins::Ignored)]);
        for _ in 0..31 {
            assert_eq!(watch.observe(true), None);
        }
        assert_eq!(watch.observe(true), Some(Pins::Honoured));
        for _ in 0..100 {
            assert_eq!(watch.observe(false), None);
            for _ in 0..5 {
                assert_eq!(watch.observe(true), None);
            }
        }
        assert_eq!((watch.pins, watch.contradicted, watch.agreed), (Pins::Honoured, 103, 532));
    }

    #[test]
    fn eight_agreements_verify() {
        let mut watch = PinWatch::default();
        let changes: Vec<_> = (0..20).filter_map(|_| watch.observe(true)).collect();
        assert_eq!(changes, [Pins::Honoured]);
        assert_eq!((watch.agreed, Pins::Honoured.name()), (20, "honoured"));
    }

    #[test]
    fn ranks_in_headers() {
        let mut headers = HeaderMap::new();
        assert_eq!(echoed_rank(&headers), None);
        headers.insert(pin::HEADER, HeaderValue::from_static("5"));
        assert_eq!(echoed_rank(&headers), Some(5));
        headers.insert(pin::HEADER, HeaderValue::from_static("five"));
        assert_eq!(echoed_rank(&headers), None);
    }

    #[test]
    fn loads_that_agree_and_that_do_not() {
        for (ours, theirs, verdict) in [
            (vec![1, 0], vec![1, 0], Some(true)),
            (vec![1, 0], vec![3, 9], Some(true)),
            (vec![1, 0], vec![0, 1], Some(false)),
            (vec![2, 0, 0, 0], vec![1, 1, 0, 0], Some(false)),
            (vec![1, 0], vec![0, 0], None),
            (vec![0, 0], vec![4, 0], None),
            (vec![2, 2], vec![2, 2], None),
            (vec![1], vec![1, 0], None),
            (vec![u64::MAX, 1], vec![u64::MAX, u64::MAX], Some(true)),
        ] {
            assert_eq!(loads_agree(&ours, &theirs), verdict, "{ours:?} {theirs:?}");
        }
    }

    proptest! {
        /// Whatever the ranks: an engine that places at random is found within 100 requests, one that obeys never.
        #[test]
        fn random_engines_are_found(ranks in 2u32..64, seed in any::<u64>()) {
            let (mut ignoring, mut honouring) = (PinWatch::default(), PinWatch::default());
            let mut state = seed | 1;
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 33) as u32 % ranks
            };
            let mut found = false;
            for _ in 0..100 {
                found |= ignoring.observe(next() == next()) == Some(Pins::Ignored);
                prop_assert_ne!(honouring.observe(true), Some(Pins::Ignored));
            }
            prop_assert!(found);
        }
    }
}
