//! What the workers of a run share: the requests still to send, the time that is measured, counts.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::connection::ConnectionCounts;
use super::run::Place;
use super::target::Target;
use crate::jobs::Jobs;
use crate::{Limit, Slo};

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) target: Arc<Target>,
    pub(crate) jobs: Arc<Jobs>,
    /// The prompt of the first request.
    pub(crate) first_prompt: u64,
    /// Which block of a comparison it is, and of how many.
    pub(crate) block: (usize, usize),
    pub(crate) stream: bool,
    pub(crate) timeout: Duration,
    pub(crate) slo: Slo,
    pub(crate) grace: Duration,
    pub(crate) warmup: u64,
    pub(crate) limit: Limit,
    /// Nothing is sent any more.
    pub(crate) stop: CancellationToken,
    next: AtomicU64,
    /// When the measured time began.
    window: OnceLock<Instant>,
    /// Of requests that are measured.
    pub(crate) sent: AtomicU64,
    pub(crate) in_flight: AtomicUsize,
    pub(crate) most_in_flight: AtomicUsize,
    /// Requests of an open loop that had to wait as too many were in flight.
    pub(crate) held_back: AtomicU64,
    /// When the last measured request ended, in nanoseconds from the window's begin.
    last_end_ns: AtomicU64,
    pub(crate) connections: Arc<ConnectionCounts>,
}

/// A request that may be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    /// From 0, warm-up included.
    pub(crate) number: u64,
    pub(crate) measured: bool,
}

impl Shared {
    pub(crate) fn new(target: Arc<Target>, jobs: Arc<Jobs>, options: &crate::LoadOptions, place: Place) -> Self {
        Self {
            target,
            jobs,
            first_prompt: place.first_prompt,
            block: place.block,
            stream: options.stream,
            timeout: options.timeout,
            slo: options.slo,
            grace: options.grace,
            warmup: options.warmup,
            limit: options.limit,
            stop: CancellationToken::new(),
            next: AtomicU64::new(0),
            window: OnceLock::new(),
            sent: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
            held_back: AtomicU64::new(0),
            last_end_ns: AtomicU64::new(0),
            connections: Arc::default(),
        }
    }

    /// The next request, due at `due`; `None` when the run is over. The first measured one begins the measured time.
    pub(crate) fn ticket(&self, due: Instant) -> Option<Ticket> {
        if self.stop.is_cancelled() {
            return None;
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let Some(measured) = number.checked_sub(self.warmup) else {
            return Some(Ticket { number, measured: false });
        };
        let begin = *self.window.get_or_init(|| due);
        let over = match self.limit {
            Limit::Requests(most) => measured >= most,
            Limit::Duration(time) => due.saturating_duration_since(begin) >= time,
            Limit::Arrivals => false,
        };
        (!over).then_some(Ticket { number, measured: true })
    }

    /// Whether a request that ended at `end` counts for rates, and notes the end of the measured time.
    pub(crate) fn in_window(&self, ticket: Ticket, end: Instant) -> bool {
        let Some(begin) = self.window.get() else { return false };
        let since = end.saturating_duration_since(*begin);
        if ticket.measured {
            self.last_end_ns.fetch_max(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
        match self.limit {
            Limit::Duration(time) => since <= time,
            Limit::Requests(_) | Limit::Arrivals => ticket.measured,
        }
    }

    /// How long rates are over: the time asked for, or until the last measured request ended; `stopped` after the caller did.
    pub(crate) fn window_length(&self, stopped: Option<Instant>) -> Duration {
        let Some(begin) = self.window.get() else { return Duration::ZERO };
        let last_end = Duration::from_nanos(self.last_end_ns.load(Ordering::Relaxed));
        match (self.limit, stopped) {
            (Limit::Duration(time), None) => time,
            (Limit::Duration(time), Some(stopped)) => time.min(stopped.saturating_duration_since(*begin).max(last_end)),
            _ => last_end,
        }
    }

    /// Time since the measured time began, for the view.
    pub(crate) fn elapsed(&self) -> Option<Duration> {
        self.window.get().map(Instant::elapsed)
    }
}

/// Counts a request in flight while it lives.
#[derive(Debug)]
pub(crate) struct InFlight<'a>(&'a Shared);

impl<'a> InFlight<'a> {
    pub(crate) fn begin(shared: &'a Shared) -> Self {
        let now = shared.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        shared.most_in_flight.fetch_max(now, Ordering::Relaxed);
        Self(shared)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
