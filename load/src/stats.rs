//! Statistics of a run: only counts and histograms, never a list of requests.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::latency::Latencies;
use crate::spread::Spread;
use crate::{Failure, Slo};

/// Output tokens of one response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tokens {
    /// Reported by the engine.
    Reported(u64),
    /// Number of events with content, if the engine reported no count.
    Events(u64),
}

/// A complete answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Answered {
    /// Time to the first content; `None` without content or streaming.
    pub(crate) ttft: Option<Duration>,
    /// Time to the last byte.
    pub(crate) e2e: Duration,
    /// Mean gap between content events; `None` with fewer than two.
    pub(crate) mean_gap: Option<Duration>,
    /// The longest gap.
    pub(crate) longest_gap: Option<Duration>,
    pub(crate) tokens: Tokens,
    /// Whether there was any content.
    pub(crate) content: bool,
}

/// One request that ended.
#[derive(Clone, Debug)]
pub(crate) struct Sample<'a> {
    /// Whether the request is measured, rather than part of the warm-up.
    pub(crate) measured: bool,
    /// Whether the request counts toward the rates, because it ended within the measured period.
    pub(crate) in_window: bool,
    /// How long after its due time the request was sent (open loop).
    pub(crate) late: Option<Duration>,
    pub(crate) result: Result<Answered, Failure>,
    /// Whether the head of a response arrived, so that its labels are known.
    pub(crate) has_head: bool,
    pub(crate) backend: Option<&'a str>,
    pub(crate) rank: Option<&'a str>,
}

/// All statistics.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stats {
    slo: Slo,
    pub(crate) ok: u64,
    pub(crate) failed: u64,
    pub(crate) failures: BTreeMap<Failure, u64>,
    pub(crate) no_content: u64,
    pub(crate) good: u64,
    pub(crate) rated: Rated,
    /// Number of responses with a reported token count, and the sum of these counts.
    pub(crate) reported: (u64, u64),
    /// Number of responses without a token count, and the sum of their events.
    pub(crate) counted: (u64, u64),
    pub(crate) ttft: Latencies,
    /// Gaps between content events, regardless of the request's outcome.
    pub(crate) gaps: Latencies,
    pub(crate) longest_gap: Latencies,
    pub(crate) e2e: Latencies,
    pub(crate) late: Latencies,
    pub(crate) ranks: Spread,
    pub(crate) backends: Spread,
}

/// Totals of requests that ended within the period that rates cover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rated {
    pub(crate) ok: u64,
    pub(crate) good: u64,
    pub(crate) tokens: u64,
}

impl Stats {
    pub(crate) fn new(slo: Slo) -> Self {
        Self { slo, ..Self::default() }
    }

    pub(crate) fn request(&mut self, sample: &Sample<'_>) {
        let good = sample.result.as_ref().is_ok_and(|answered| self.is_good(answered));
        if let (Ok(answered), true) = (&sample.result, sample.in_window) {
            self.rated.ok += 1;
            self.rated.good += u64::from(good);
            let (Tokens::Reported(tokens) | Tokens::Events(tokens)) = answered.tokens;
            self.rated.tokens = self.rated.tokens.saturating_add(tokens);
        }
        if !sample.measured {
            return;
        }
        if let Some(late) = sample.late {
            self.late.record(late);
        }
        if sample.has_head {
            self.labels(sample.backend, sample.rank);
        }
        match &sample.result {
            Ok(answered) => {
                self.good += u64::from(good);
                self.answered(answered);
            }
            Err(failure) => {
                self.failed += 1;
                *self.failures.entry(*failure).or_default() += 1;
            }
        }
    }

    fn answered(&mut self, answered: &Answered) {
        self.ok += 1;
        self.no_content += u64::from(!answered.content);
        self.e2e.record(answered.e2e);
        if let Some(ttft) = answered.ttft {
            self.ttft.record(ttft);
        }
        if let Some(gap) = answered.longest_gap {
            self.longest_gap.record(gap);
        }
        let (counted, tokens) = match answered.tokens {
            Tokens::Reported(tokens) => (&mut self.reported, tokens),
            Tokens::Events(events) => (&mut self.counted, events),
        };
        counted.0 += 1;
        counted.1 = counted.1.saturating_add(tokens);
    }

    /// Counts the labels. Equal rank numbers on two backends are distinct ranks.
    fn labels(&mut self, backend: Option<&str>, rank: Option<&str>) {
        self.backends.count(backend);
        match (backend, rank) {
            (Some(backend), Some(rank)) => self.ranks.count(Some(&format!("{backend}/{rank}"))),
            (_, rank) => self.ranks.count(rank),
        }
    }

    fn is_good(&self, answered: &Answered) -> bool {
        let holds = |most: Option<f64>, found: Option<Duration>| {
            most.is_none_or(|most| found.is_some_and(|found| found.as_secs_f64() * 1e3 <= most))
        };
        // A stream with a single event has no gap, so it meets any limit on gaps.
        let gap = answered.mean_gap.or(answered.ttft.map(|_| Duration::ZERO));
        holds(self.slo.ttft_ms, answered.ttft)
            && holds(self.slo.itl_ms, gap)
            && holds(self.slo.e2e_ms, Some(answered.e2e))
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.ok += other.ok;
        self.failed += other.failed;
        for (failure, count) in &other.failures {
            *self.failures.entry(*failure).or_default() += count;
        }
        self.no_content += other.no_content;
        self.good += other.good;
        self.rated.ok += other.rated.ok;
        self.rated.good += other.rated.good;
        self.rated.tokens = self.rated.tokens.saturating_add(other.rated.tokens);
        for (mine, theirs) in [(&mut self.reported, &other.reported), (&mut self.counted, &other.counted)] {
            *mine = (mine.0 + theirs.0, mine.1.saturating_add(theirs.1));
        }
        self.ttft.merge(&other.ttft);
        self.gaps.merge(&other.gaps);
        self.longest_gap.merge(&other.longest_gap);
        self.e2e.merge(&other.e2e);
        self.late.merge(&other.late);
        self.ranks.merge(&other.ranks);
        self.backends.merge(&other.backends);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn answered(ttft: u64, gap: u64, e2e: u64) -> Answered {
        let tokens = Tokens::Reported(5);
        let (ttft, mean_gap, longest_gap) = (Some(MS(ttft)), Some(MS(gap)), Some(MS(2 * gap)));
        Answered { ttft, e2e: MS(e2e), mean_gap, longest_gap, tokens, content: true }
    }

    fn sample(result: Result<Answered, Failure>) -> Sample<'static> {
        let (backend, rank) = (Some("pod-a"), Some("3"));
        Sample { measured: true, in_window: true, late: None, result, has_head: true, backend, rank }
    }

    #[test]
    fn only_requests_that_hold_all_levels_are_good() {
        let slo = Slo { ttft_ms: Some(10.0), itl_ms: Some(2.0), e2e_ms: Some(100.0) };
        for (result, good) in [
            (Ok(answered(10, 2, 100)), 1),
            (Ok(answered(11, 2, 100)), 0),
            (Ok(answered(10, 3, 100)), 0),
            (Ok(answered(10, 2, 101)), 0),
            (Ok(Answered { mean_gap: None, ..answered(1, 1, 1) }), 1),
            (Ok(Answered { ttft: None, mean_gap: None, ..answered(1, 1, 1) }), 0),
            (Err(Failure::Status(503)), 0),
        ] {
            let mut stats = Stats::new(slo);
            stats.request(&sample(result));
            assert_eq!((stats.good, stats.rated.good), (good, good), "{result:?}");
        }
    }

    #[test]
    fn warm_up_counts_for_rates_alone_and_late_ends_for_latencies_alone() {
        let mut stats = Stats::new(Slo::default());
        stats.request(&Sample { measured: false, ..sample(Ok(answered(1, 1, 1))) });
        stats.request(&Sample { measured: false, ..sample(Err(Failure::Closed)) });
        assert_eq!((stats.ok, stats.failed, stats.rated.ok, stats.rated.tokens), (0, 0, 1, 5));
        stats.request(&Sample { in_window: false, ..sample(Ok(answered(1, 1, 1))) });
        assert_eq!((stats.ok, stats.rated.ok, stats.reported), (1, 1, (1, 5)));
        assert_eq!(stats.e2e.summary().map(|summary| summary.count), Some(1));
    }

    #[test]
    fn merged_parts_equal_the_whole() {
        let samples = [
            sample(Ok(answered(3, 1, 9))),
            Sample {
                backend: None,
                late: Some(MS(1)),
                ..sample(Ok(Answered { tokens: Tokens::Events(2), ..answered(1, 1, 2) }))
            },
            sample(Err(Failure::Status(429))),
            sample(Err(Failure::Status(429))),
            Sample { has_head: false, ..sample(Err(Failure::Closed)) },
        ];
        let mut whole = Stats::new(Slo::default());
        let mut merged = Stats::new(Slo::default());
        for sample in &samples {
            whole.request(sample);
            let mut part = Stats::new(Slo::default());
            part.request(sample);
            merged.merge(&part);
        }
        assert_eq!(merged.failures, BTreeMap::from([(Failure::Status(429), 2), (Failure::Closed, 1)]));
        assert_eq!((merged.ok, merged.failed, merged.reported, merged.counted), (2, 3, (1, 5), (1, 2)));
        assert_eq!(merged.ranks.summary(), whole.ranks.summary());
        assert_eq!(merged.ranks.summary().requests, [("3".to_owned(), 1), ("pod-a/3".to_owned(), 3)]);
        assert_eq!(merged.e2e.summary(), whole.e2e.summary());
        assert_eq!(merged.late.summary().map(|late| late.count), Some(1));
    }
}
