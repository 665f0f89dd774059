//! Decides when to probe a backend's pins on one route again.

use std::time::Duration;

use super::{PinWatch, Pins, ProbePlan};

/// Number of observed requests without a contradiction after which a backend is trusted and probed less often.
const TRUSTED_AFTER: u64 = 256;
/// Pinned requests between two rounds while a backend is not yet trusted or its pins count as ignored.
const WATCHFUL_REQUESTS: u64 = 40;
/// Pinned requests between two rounds of a trusted backend.
const TRUSTED_REQUESTS: u64 = 2_000;
/// Minimum time between two rounds of a trusted backend, or of one whose pins are ignored.
const RELAXED_PAUSE: Duration = Duration::from_secs(10);
/// Pause after an inconclusive round, doubled after each further one: the engine may count its probes late, and they
/// must not be attributed to the next round.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// Maximum pause after inconclusive rounds.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Schedules rounds of probes. A round is due immediately at start, after a contradiction, and when evidence on another
/// route calls for one; after 40 requests while the backend is new or ignores pins; and after 2,000 requests later on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Number of conclusive rounds. It is also the number of the next round, so that none is skipped.
    rounds: u64,
    /// Consecutive inconclusive rounds.
    inconclusive: u32,
    /// Whether a round is requested regardless of this route's own evidence.
    wanted: bool,
}

impl Schedule {
    /// Returns the number of conclusive rounds, which is also the number of the next one.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Requests a round because of evidence from elsewhere that may also apply to this route.
    pub fn want_round(&mut self) {
        self.wanted = true;
    }

    /// Records the end of a round; `conclusive` is whether it proved anything.
    pub fn ended(&mut self, conclusive: bool) {
        self.rounds += u64::from(conclusive);
        self.wanted = false;
        self.inconclusive = if conclusive { 0 } else { self.inconclusive.saturating_add(1) };
    }

    /// Returns whether conclusive rounds have covered every rank.
    pub fn has_seen_all(&self, ranks: u16) -> bool {
        self.rounds >= ProbePlan::rounds_for_all(ranks)
    }

    /// Returns the number of pinned requests to wait for before the next round.
    pub fn requests(&self, watch: &PinWatch, ranks: u16) -> u64 {
        if self.inconclusive > 0 {
            return WATCHFUL_REQUESTS;
        }
        let unseen = !self.has_seen_all(ranks);
        match watch.pins {
            _ if self.wanted || watch.is_in_doubt() => 0,
            Pins::Ignored => WATCHFUL_REQUESTS,
            _ if unseen || watch.pins == Pins::Unverified => 0,
            _ if watch.total() < TRUSTED_AFTER => WATCHFUL_REQUESTS,
            _ => TRUSTED_REQUESTS,
        }
    }

    /// Returns the time to wait before the next round, in addition to the requests.
    pub fn pause(&self, watch: &PinWatch) -> Duration {
        if self.inconclusive > 0 {
            return (FIRST_PAUSE * (1 << (self.inconclusive - 1).min(4))).min(MAX_PAUSE);
        }
        let settled = watch.pins == Pins::Ignored || watch.total() >= TRUSTED_AFTER;
        if settled && !self.wanted && !watch.is_in_doubt() { RELAXED_PAUSE } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Evidence, Observation};
    use super::*;

    #[test]
    fn rounds_are_frequent_while_in_doubt_and_rare_in_trust() {
        let (mut schedule, mut watch) = (Schedule::default(), PinWatch::default());
        let seen = |agreed, contradicted| Observation { evidence: Evidence::Probe, agreed, contradicted };
        let due = |schedule: &Schedule, watch: &PinWatch| (schedule.requests(watch, 4), schedule.pause(watch));
        assert_eq!(due(&schedule, &watch), (0, Duration::ZERO));
        for _ in 0..2 {
            watch.observe(seen(8, 0));
            schedule.ended(true);
        }
        assert_eq!(due(&schedule, &watch), (40, Duration::ZERO));
        watch.observe(seen(7, 1));
        assert_eq!(due(&schedule, &watch), (0, Duration::ZERO));
        watch.observe(seen(6, 2));
        assert_eq!(due(&schedule, &watch), (40, Duration::from_secs(10)), "tried again on a share of requests");
        watch.observe(seen(8, 0));
        assert_eq!(due(&schedule, &watch), (0, Duration::ZERO), "a way back");
        watch.observe(seen(300, 0));
        assert_eq!(due(&schedule, &watch), (2_000, Duration::from_secs(10)));
        schedule.want_round();
        assert_eq!(due(&schedule, &watch), (0, Duration::ZERO));
        for seconds in [5, 10, 20, 40, 60, 60] {
            schedule.ended(false);
            assert_eq!(due(&schedule, &watch), (40, Duration::from_secs(seconds)));
        }
    }
}
