//! State that the workers of a run share: the requests still to send, the time that is measured, counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::connection::ConnectionCounts;
use super::run::Place;
use super::target::Target;
use crate::Slo;
use crate::jobs::Jobs;
use crate::window::{Ticket, Window};

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
    pub(crate) window: Window,
    /// Nothing is sent any more.
    pub(crate) stop: CancellationToken,
    /// Of requests that are measured.
    pub(crate) sent: AtomicU64,
    pub(crate) in_flight: AtomicUsize,
    pub(crate) most_in_flight: AtomicUsize,
    /// Requests of an open loop that had to wait as too many were in flight.
    pub(crate) held_back: AtomicU64,
    pub(crate) connections: Arc<ConnectionCounts>,
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
            window: Window::new(options.warmup, options.limit),
            stop: CancellationToken::new(),
            sent: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
            held_back: AtomicU64::new(0),
            connections: Arc::default(),
        }
    }

    /// The next request, due at `due`; `None` when the run is over.
    pub(crate) fn ticket(&self, due: Instant) -> Option<Ticket> {
        if self.stop.is_cancelled() { None } else { self.window.ticket(due) }
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
