//! State shared by the workers of a run: the remaining requests, the measured time, counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use tokio_util::sync::CancellationToken;

use super::connection::ConnectionCounts;
use super::run::Place;
use super::target::Target;
use crate::LoadOptions;
use crate::jobs::Jobs;
use crate::window::{Ticket, Window};

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) target: Arc<Target>,
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) options: Arc<LoadOptions>,
    pub(crate) place: Place,
    pub(crate) window: Window,
    /// Cancelled when no more requests may be sent.
    pub(crate) stop: CancellationToken,
    /// Number of measured requests.
    pub(crate) sent: AtomicU64,
    pub(crate) in_flight: AtomicUsize,
    pub(crate) most_in_flight: AtomicUsize,
    /// Requests of an open loop that were delayed because too many were in flight.
    pub(crate) held_back: AtomicU64,
    pub(crate) connections: Arc<ConnectionCounts>,
}

impl Shared {
    pub(crate) fn new(target: Arc<Target>, jobs: Arc<Jobs>, options: Arc<LoadOptions>, place: Place) -> Self {
        Self {
            target,
            jobs,
            window: Window::new(options.warmup, options.limit),
            options,
            place,
            stop: CancellationToken::new(),
            sent: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
            held_back: AtomicU64::new(0),
            connections: Arc::default(),
        }
    }

    /// Returns the ticket of the request due at `due`; `None` once the run is over.
    pub(crate) fn ticket(&self, due: Instant) -> Option<Ticket> {
        if self.stop.is_cancelled() { None } else { self.window.ticket(due) }
    }
}

/// Counts a request as in flight while it exists.
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
