//! Determines whether pins take effect.
//!
//! An engine may accept a pin but ignore it: an older version may read another field, a proxy may drop the header, and
//! vLLM silently ignores a typo. Only exact evidence counts:
//!
//! | evidence | source |
//! |---|---|
//! | [`Evidence::Answer`] | a response that reports its rank: a header ([`echoed_rank`]) or SGLang's `meta_info.dp_rank` |
//! | [`Evidence::Probe`] | such a response to a one-token probe ([`probe`](fn@probe)) |
//! | [`Evidence::Counter`] | vLLM's counters per engine, which must rise by the number of probes sent, and by nothing else ([`Counters`]) |
//!
//! An engine may read pins on one route and not on another, so evidence applies to one route.
//!
//! Gauges of running requests are not evidence: they are updated only after a step (in SGLang, after every 15th decode
//! step), so short requests start and end between two updates. [`PinWatch`] turns observations into a verdict, and
//! [`Schedule`] decides when to probe again.

mod counters;
mod plan;
mod probe;
mod schedule;

use ::http::{HeaderMap, HeaderValue};

use crate::pin;

pub use counters::{Comparison, CounterCheck, Counters};
pub use plan::ProbePlan;
pub use probe::{Inconclusive, PROBED, PinTarget, Round, probe};
pub use schedule::Schedule;

/// Number of contradictions within [`WINDOW`] for the verdict "ignored".
const IGNORED_AT: u64 = 3;
/// Number of observations after which a contradiction is forgotten.
const WINDOW: u64 = 256;
/// Number of agreements after which pins count as honoured.
const HONOURED_AFTER: u64 = 4;
/// Consecutive agreements that end the verdict "ignored". With two ranks, random routing agrees half of the time.
const RECOVERED_AFTER: u64 = 32;

/// The state of a backend's pins on one route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pins {
    /// Not enough evidence.
    #[default]
    Unverified,
    /// Requests run where pinned.
    Honoured,
    /// Requests run elsewhere.
    Ignored,
}

impl Pins {
    /// Returns the name used in status documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unverified => "unverified",
            Self::Honoured => "honoured",
            Self::Ignored => "pin ignored",
        }
    }
}

/// The source of the information on which rank ran a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// The response to a client reported its rank.
    Answer,
    /// The response to a probe reported its rank.
    Probe,
    /// The engine's per-rank counters were compared with the probes sent.
    Counter,
}

impl Evidence {
    /// Returns the name used in logs and status documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::Answer => "answers",
            Self::Probe => "probes",
            Self::Counter => "counters",
        }
    }
}

/// Requests observed together: one response, or one round of probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The kind of evidence.
    pub evidence: Evidence,
    /// Number of requests that ran on the pinned rank.
    pub agreed: u64,
    /// Number of requests that ran on another rank.
    pub contradicted: u64,
}

impl Observation {
    /// Creates the observation for a response to a client that reported its rank.
    pub fn answer(agrees: bool) -> Self {
        Self { evidence: Evidence::Answer, agreed: u64::from(agrees), contradicted: u64::from(!agrees) }
    }
}

/// Evidence about one route of a backend, and the verdict.
///
/// The verdict "ignored" requires three contradictions by one kind of evidence among the last 256 observed requests,
/// from at least two observations, so that no single event (such as a replaced engine) is decisive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinWatch {
    /// The verdict.
    pub pins: Pins,
    /// Observed requests that ran on the pinned rank.
    pub agreed: u64,
    /// Observed requests that ran on another rank.
    pub contradicted: u64,
    /// The kind of evidence behind the verdict, or the kind observed last.
    pub evidence: Option<Evidence>,
    /// Agreements since the last contradiction.
    agreed_in_a_row: u64,
    /// Recent contradictions, oldest first.
    contradictions: [Contradictions; 3],
}

/// The last observations of one kind that contradicted a pin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Contradictions {
    /// For each observation, the total of observed requests at that time and its number of contradictions. Oldest
    /// first; unused entries are zero.
    recent: [(u64, u64); 3],
}

impl Contradictions {
    fn add(&mut self, seen: u64, contradicted: u64) {
        self.recent.rotate_left(1);
        self.recent[2] = (seen, contradicted);
    }

    fn make_a_verdict(&self, seen: u64) -> bool {
        let within = |(at, _): &&(u64, u64)| *at > 0 && seen - at < WINDOW;
        let recent = || self.recent.iter().filter(within);
        recent().count() >= 2 && recent().map(|(_, count)| count).sum::<u64>() >= IGNORED_AT
    }
}

impl PinWatch {
    /// Adds one observation; returns the verdict if it changed.
    pub fn observe(&mut self, seen: Observation) -> Option<Pins> {
        let before = self.pins;
        self.agreed += seen.agreed;
        self.contradicted += seen.contradicted;
        if before != Pins::Ignored || self.evidence.is_none() {
            self.evidence = Some(seen.evidence);
        }
        if seen.contradicted > 0 {
            self.agreed_in_a_row = 0;
            let total = self.total();
            let of_kind = &mut self.contradictions[seen.evidence as usize];
            of_kind.add(total, seen.contradicted);
            if of_kind.make_a_verdict(total) {
                self.pins = Pins::Ignored;
                self.evidence = Some(seen.evidence);
            }
        } else {
            self.agreed_in_a_row += seen.agreed;
            let needed = if before == Pins::Ignored { RECOVERED_AFTER } else { HONOURED_AFTER };
            if self.agreed_in_a_row >= needed {
                self.pins = Pins::Honoured;
            }
            if before == Pins::Ignored && self.pins == Pins::Honoured {
                self.contradictions = Default::default();
            }
        }
        (self.pins != before).then_some(self.pins)
    }

    /// Returns the number of observed requests.
    pub fn total(&self) -> u64 {
        self.agreed + self.contradicted
    }

    /// Returns whether further rounds of probes may change the verdict, because of a recent contradiction or because
    /// pins that count as ignored took effect.
    pub fn is_in_doubt(&self) -> bool {
        match self.pins {
            Pins::Ignored => self.agreed_in_a_row > 0,
            _ => self.contradicted > 0 && self.agreed_in_a_row < WINDOW,
        }
    }
}

/// Returns the rank reported in a response header, as semmoe's worker sends it.
pub fn echoed_rank(headers: &HeaderMap) -> Option<u32> {
    headers.get(pin::HEADER).and_then(|value: &HeaderValue| value.to_str().ok()?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn observe(watch: &mut PinWatch, agreed: u64, contradicted: u64) -> Option<Pins> {
        watch.observe(Observation { evidence: Evidence::Probe, agreed, contradicted })
    }

    #[test]
    fn a_verdict_needs_repeated_contradictions_of_one_kind() {
        let mut watch = PinWatch::default();
        assert_eq!(observe(&mut watch, 0, 8), None, "one event is no verdict");
        assert_eq!(watch.observe(Observation::answer(false)), None);
        assert_eq!(watch.observe(Observation::answer(false)), None);
        assert!(watch.is_in_doubt());
        assert_eq!(observe(&mut watch, 7, 1), Some(Pins::Ignored));
        assert_eq!((watch.evidence, watch.agreed, watch.contradicted), (Some(Evidence::Probe), 7, 11));
        assert_eq!(observe(&mut watch, 31, 0), None);
        assert_eq!(observe(&mut watch, 1, 0), Some(Pins::Honoured));
        assert_eq!(observe(&mut watch, 7, 1), None, "what was before a recovery is forgotten");
    }

    #[test]
    fn old_contradictions_are_forgotten() {
        let mut watch = PinWatch::default();
        for _ in 0..100 {
            assert_ne!(observe(&mut watch, 0, 1), Some(Pins::Ignored));
            assert_ne!(observe(&mut watch, WINDOW, 0), Some(Pins::Ignored));
        }
        assert_eq!(watch.pins, Pins::Honoured);
    }

    #[test]
    fn four_agreements_verify() {
        let mut watch = PinWatch::default();
        let changes: Vec<_> = (0..20).filter_map(|_| observe(&mut watch, 1, 0)).collect();
        assert_eq!((changes, watch.agreed, watch.is_in_doubt()), (vec![Pins::Honoured], 20, false));
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

    proptest! {
        /// An engine that places at random is detected within 100 requests, one that obeys never, for any number of
        /// ranks.
        #[test]
        fn random_engines_are_found(ranks in 2u32..64, seed in any::<u64>()) {
            let (mut ignoring, mut honouring) = (PinWatch::default(), PinWatch::default());
            let mut random = fastrand::Rng::with_seed(seed);
            let mut found = false;
            for _ in 0..100 {
                let agrees = random.u32(0..ranks) == random.u32(0..ranks);
                found |= ignoring.observe(Observation::answer(agrees)) == Some(Pins::Ignored);
                prop_assert_ne!(honouring.observe(Observation::answer(true)), Some(Pins::Ignored));
            }
            prop_assert!(found);
        }
    }
}
