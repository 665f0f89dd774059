//! Evidence about one backend's pins, for the path of requests and for the task that verifies them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use semmoe_engines::verify::{Evidence, Observation, PinWatch, Pins, Schedule};
use tokio::sync::Notify;

/// Knowledge about one backend's pins.
#[derive(Debug, Default)]
pub(crate) struct PinRecord {
    state: Mutex<PinState>,
    /// The verdict, for the path of requests.
    ignored: AtomicBool,
    /// Held by a round of probes: two at once would be counted as each other's.
    pub(super) round: tokio::sync::Mutex<()>,
    /// Pinned requests whose answers do not name their rank.
    pinned: AtomicU64,
    /// `pinned` at which the next round is due.
    due_at: AtomicU64,
    due: Notify,
    /// Wakes the watcher when a contradiction was suspended.
    pub(super) suspended: Notify,
}

/// Evidence, verdict and schedule of one backend.
#[derive(Clone, Debug, Default)]
pub(crate) struct PinState {
    pub(crate) watch: PinWatch,
    pub(super) schedule: Schedule,
    /// The outcome of the last contradiction, or else of the last round; or why that round proved nothing.
    pub(crate) detail: Option<String>,
    /// Counts once the engine was asked for its ranks again.
    pub(super) suspended: Option<Suspended>,
}

/// Answers that named other ranks than their pins.
#[derive(Clone, Debug)]
pub(super) struct Suspended {
    pub(super) contradicted: u64,
    /// Describes the last one.
    pub(super) detail: String,
}

impl PinRecord {
    pub(crate) fn state(&self) -> PinState {
        self.locked(|state| state.clone())
    }

    /// Whether requests run elsewhere than they are pinned.
    pub(crate) fn are_ignored(&self) -> bool {
        self.ignored.load(Ordering::Relaxed)
    }

    /// Counts a pinned request whose answer will not name its rank.
    pub(crate) fn count_request(&self) {
        if self.pinned.fetch_add(1, Ordering::Relaxed) + 1 >= self.due_at.load(Ordering::Relaxed) {
            self.due.notify_one();
        }
    }

    /// Adds one observation; returns the verdict if it changed. `detail` describes the observation.
    pub(crate) fn observe(&self, seen: Observation, detail: impl FnOnce() -> String) -> Option<Pins> {
        let changed = self.locked(|state| {
            let settled = state.watch.pins != Pins::Ignored && !state.watch.is_in_doubt();
            // Every client's answer comes here: one that agrees is worth no text.
            let tells_more = seen.evidence != Evidence::Answer || state.detail.is_none();
            if seen.contradicted > 0 || settled && tells_more {
                state.detail = Some(detail());
            }
            state.watch.observe(seen)
        });
        if let Some(pins) = changed {
            self.ignored.store(pins == Pins::Ignored, Ordering::Relaxed);
        }
        changed
    }

    /// Keeps a contradiction until the engine was asked for its ranks again.
    pub(crate) fn suspend(&self, detail: String) {
        self.locked(|state| {
            let contradicted = state.suspended.as_ref().map_or(0, |it| it.contradicted) + 1;
            state.suspended = Some(Suspended { contradicted, detail });
        });
        self.suspended.notify_one();
    }

    /// Another engine may be there now, about whose pins nothing is known.
    pub(super) fn reset(&self) {
        self.locked(|state| *state = PinState::default());
        self.ignored.store(false, Ordering::Relaxed);
        self.due.notify_one();
    }

    /// Waits until so many requests more were pinned, or another engine came.
    pub(super) async fn after_requests(&self, requests: u64) {
        let due_at = self.pinned.load(Ordering::Relaxed) + requests;
        if requests > 0 {
            self.due_at.store(due_at, Ordering::Relaxed);
            self.due.notified().await;
        }
        self.due_at.store(u64::MAX, Ordering::Relaxed);
    }

    pub(super) fn locked<T>(&self, work: impl FnOnce(&mut PinState) -> T) -> T {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
