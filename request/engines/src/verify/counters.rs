//! Evidence from per-rank counters, read before and after probes.

use std::time::Duration;

/// Interval between two reads of an engine's counters.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Counters that contradict a pin must be confirmed after this time, which is longer than any step: another client's
/// request may be counted before the probes are.
const CONFIRM_AFTER: Duration = Duration::from_secs(1);
/// Counters that have not risen within this time prove nothing.
pub(super) const COUNTED_WITHIN: Duration = Duration::from_secs(20);

/// Tracks whether each rank has counted the probes sent to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Counts before the first probe, by rank.
    before: Vec<u64>,
    /// Number of probes sent to each rank.
    sent: Vec<u64>,
    /// Time spent waiting for the counts.
    waited: Duration,
    /// Whether the last counts contradicted a pin.
    doubted: bool,
}

/// The next action after reading the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterCheck {
    /// Read again after this time.
    Again(Duration),
    /// The final result.
    Done(Comparison),
}

/// The outcome of comparing counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// Not all probes have been counted yet.
    Waiting,
    /// All probes were counted, and no other requests.
    Exact {
        /// Number of probes that ran on the pinned rank.
        agreed: u64,
        /// Minimum number of probes that ran on another rank.
        contradicted: u64,
    },
    /// More requests were counted than sent: other clients send similar requests, so totals prove nothing.
    OtherClients,
    /// A count fell, or ranks appeared or disappeared: the engine restarted.
    Restarted,
}

impl Counters {
    /// Creates counters from `before` and `sent`, both by rank; `None` if their lengths differ.
    pub fn new(before: Vec<u64>, sent: &[u32]) -> Option<Self> {
        let sent: Vec<u64> = sent.iter().map(|count| u64::from(*count)).collect();
        (before.len() == sent.len()).then_some(Self { before, sent, waited: Duration::ZERO, doubted: false })
    }

    /// Checks the counts `now`, by rank, after all probes were answered. A final [`Comparison::Waiting`] means that the
    /// probes were not counted in time.
    pub fn check(&mut self, now: &[u64]) -> CounterCheck {
        let found = self.compare(now);
        let pause = match found {
            Comparison::Exact { contradicted: 1.., .. } if !self.doubted => CONFIRM_AFTER,
            Comparison::Waiting if self.waited < COUNTED_WITHIN => POLL_INTERVAL,
            done => return CounterCheck::Done(done),
        };
        self.doubted = matches!(found, Comparison::Exact { .. });
        self.waited += pause;
        CounterCheck::Again(pause)
    }

    /// Compares the counts `now`, by rank, with the earlier ones.
    fn compare(&self, now: &[u64]) -> Comparison {
        let risen: Option<Vec<u64>> =
            self.before.iter().zip(now).map(|(before, now)| now.checked_sub(*before)).collect();
        let Some(risen) = risen.filter(|_| now.len() == self.before.len()) else { return Comparison::Restarted };
        let sum = |counts: &[u64]| counts.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
        let sent = sum(&self.sent);
        match sum(&risen).cmp(&sent) {
            std::cmp::Ordering::Less => Comparison::Waiting,
            std::cmp::Ordering::Greater => Comparison::OtherClients,
            std::cmp::Ordering::Equal => {
                let agreed = self.sent.iter().zip(&risen).map(|(sent, risen)| sent.min(risen)).sum();
                Comparison::Exact { agreed, contradicted: sent - agreed }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn counts_prove_where_probes_ran() {
        let counters = Counters::new(vec![5, 7], &[1, 2]).unwrap();
        for (now, expected) in [
            (vec![6, 9], Comparison::Exact { agreed: 3, contradicted: 0 }),
            (vec![7, 8], Comparison::Exact { agreed: 2, contradicted: 1 }),
            (vec![8, 7], Comparison::Exact { agreed: 1, contradicted: 2 }),
            (vec![6, 8], Comparison::Waiting),
            (vec![6, 10], Comparison::OtherClients),
            (vec![0, 1], Comparison::Restarted),
            (vec![6, 9, 0], Comparison::Restarted),
            (vec![u64::MAX, u64::MAX], Comparison::OtherClients),
        ] {
            assert_eq!(counters.compare(&now), expected, "{now:?}");
        }
        assert_eq!(Counters::new(vec![1], &[1, 2]), None);
    }

    #[test]
    fn contradictions_are_confirmed() {
        let counters = || Counters::new(vec![0, 0], &[1, 2]).unwrap();
        let wrong = Comparison::Exact { agreed: 2, contradicted: 1 };
        let mut steady = counters();
        assert_eq!(steady.check(&[0, 1]), CounterCheck::Again(POLL_INTERVAL));
        assert_eq!(steady.check(&[0, 3]), CounterCheck::Again(CONFIRM_AFTER));
        assert_eq!(steady.check(&[0, 3]), CounterCheck::Done(wrong));
        let mut disturbed = counters();
        assert_eq!(disturbed.check(&[3, 0]), CounterCheck::Again(CONFIRM_AFTER));
        assert_eq!(disturbed.check(&[4, 2]), CounterCheck::Done(Comparison::OtherClients));
        let mut silent = counters();
        while silent.check(&[0, 0]) == CounterCheck::Again(POLL_INTERVAL) {}
        assert_eq!((silent.check(&[0, 0]), silent.waited), (CounterCheck::Done(Comparison::Waiting), COUNTED_WITHIN));
    }

    proptest! {
        /// An honest engine is never contradicted, whatever part of the probes its counters show, and whatever other
        /// clients add.
        #[test]
        fn honest_counts_never_contradict(
            ranks in proptest::collection::vec((0_u64..100, 0_u32..4, 0_u64..=3, 0_u64..3), 1..9), others in any::<bool>()
        ) {
            let before = ranks.iter().map(|rank| rank.0).collect();
            let sent: Vec<u32> = ranks.iter().map(|rank| rank.1).collect();
            let now: Vec<u64> = ranks.iter()
                .map(|(before, sent, behind, other)| {
                    let all = before + u64::from(*sent);
                    if others { all + other } else { all.saturating_sub(*behind).max(*before) }
                })
                .collect();
            let found = Counters::new(before, &sent).unwrap().compare(&now);
            prop_assert!(!matches!(found, Comparison::Exact { contradicted: 1.., .. }), "{:?}", found);
        }
    }
}
