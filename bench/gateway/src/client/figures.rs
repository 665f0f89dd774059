//! The measurements.

use std::time::Instant;

use serde::Serialize;

/// Figures of one measurement; latencies in microseconds.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// All requests sent and answered, warm-up included.
    pub(crate) requests: u64,
    /// Duration of the whole run in seconds.
    pub(crate) seconds: f64,
    /// Answered after the warm-up and before the end.
    pub(crate) measured_requests: u64,
    pub(crate) requests_per_second: f64,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    pub(crate) max_us: f64,
}

pub(super) struct Recorder {
    first: Instant,
    begin: Instant,
    end: Instant,
    nanos: Vec<u32>,
}

impl Recorder {
    /// Counts answers that arrive between `begin` and `end`.
    pub(super) fn new(begin: Instant, end: Instant) -> Self {
        Self { first: Instant::now(), begin, end, nanos: Vec::with_capacity(1 << 20) }
    }

    pub(super) fn end(&self) -> Instant {
        self.end
    }

    pub(super) fn add(&mut self, since: Instant, now: Instant) {
        if now >= self.begin && now <= self.end {
            self.nanos.push(u32::try_from(now.duration_since(since).as_nanos()).unwrap_or(u32::MAX));
        }
    }

    pub(super) fn figures(mut self, requests: u64, now: Instant) -> Figures {
        self.nanos.sort_unstable();
        let at = |share: f64| {
            let index = (self.nanos.len() as f64 * share) as usize;
            let nanos = self.nanos.get(index.min(self.nanos.len().saturating_sub(1)));
            nanos.map_or(0.0, |nanos| f64::from(*nanos) / 1e3)
        };
        let measured = now.min(self.end).saturating_duration_since(self.begin).as_secs_f64();
        Figures {
            requests,
            seconds: now.duration_since(self.first).as_secs_f64(),
            measured_requests: self.nanos.len() as u64,
            requests_per_second: self.nanos.len() as f64 / measured.max(1e-9),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: at(1.0),
        }
    }
}
