//! A listener's places: if all are taken, a connection without a running request makes room for a new one.
//!
//! Connections that send nothing, or half a request head, cost their clients nothing, and would otherwise occupy every
//! place for as long as they may be silent.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::data::outflow::Outflow;

/// Time for a displaced connection to close before another one is chosen.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(super) struct Places {
    free: Arc<Semaphore>,
    /// In order of arrival.
    taken: Mutex<BTreeMap<u64, Arc<Seat>>>,
    next: AtomicU64,
    /// Cancelled to end all connections.
    ending: CancellationToken,
}

struct Seat {
    outflow: Arc<Outflow>,
    leave: CancellationToken,
}

/// One connection's place, occupied until it is dropped.
pub(super) struct Place {
    places: Arc<Places>,
    number: u64,
    seat: Arc<Seat>,
    _permit: OwnedSemaphorePermit,
}

impl Places {
    /// Creates `limit` places. `ending`: cancelled when all connections end.
    pub(super) fn new(limit: usize, ending: CancellationToken) -> Self {
        Self { free: Arc::new(Semaphore::new(limit)), taken: Mutex::default(), next: AtomicU64::new(0), ending }
    }

    /// Takes a place as soon as one is available. `displaced` is called for each connection that must make room.
    pub(super) async fn take(self: &Arc<Self>, displaced: impl Fn()) -> Place {
        let permit = loop {
            if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
                break permit;
            }
            if self.displace() {
                displaced();
            }
            // The semaphore is never closed.
            if let Ok(Ok(permit)) = tokio::time::timeout(POLL_INTERVAL, Arc::clone(&self.free).acquire_owned()).await {
                break permit;
            }
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let seat = Arc::new(Seat { outflow: Arc::default(), leave: self.ending.child_token() });
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::clone(&seat));
        Place { places: Arc::clone(self), number, seat, _permit: permit }
    }

    /// Ends the oldest connection that never had a request, or else the oldest idle one. Returns false if there is
    /// neither.
    fn displace(&self) -> bool {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = || taken.values().filter(|seat| seat.outflow.is_idle() && !seat.leave.is_cancelled());
        let found = idle().find(|seat| seat.outflow.is_unused()).or_else(|| idle().next());
        if let Some(seat) = found {
            seat.leave.cancel();
        }
        found.is_some()
    }
}

impl Place {
    /// The connection's outflow.
    pub(super) fn outflow(&self) -> &Arc<Outflow> {
        &self.seat.outflow
    }

    /// Completes when the connection must end: to make room, or because all end.
    pub(super) async fn ended(&self) {
        self.seat.leave.cancelled().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn silent_connections_give_way_first_and_busy_ones_never() {
        let places = Arc::new(Places::new(3, CancellationToken::new()));
        let take = || places.take(|| {});
        let (busy, kept, silent) = (take().await, take().await, take().await);
        let _running = busy.outflow().run();
        drop(kept.outflow().run());
        assert!(places.displace());
        assert!(silent.seat.leave.is_cancelled() && !kept.seat.leave.is_cancelled());
        assert!(places.displace());
        assert!(kept.seat.leave.is_cancelled());
        assert!(!places.displace());
        assert!(!busy.seat.leave.is_cancelled());
        drop((silent, kept, busy));
        assert!(places.taken.lock().unwrap().is_empty());
    }
}
