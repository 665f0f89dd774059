//! Requests of one model waiting for a place: a bounded queue, first come, first served, with a head start for higher
//! priorities.
//!
//! A request without a place joins the queue. When room appears (a request ends, a backend joins), it is offered along
//! the queue from the front. A request that cannot use the offer, for example because it is pinned to another rank,
//! passes it on and keeps its position. During an offer, newcomers join without trying for a place, so none overtakes.
//! A request whose client disconnects is removed at once, and passes on any pending offer. Requests that find a place
//! immediately take a lock only if ranks have a limit.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::config::QueueRules;

/// Why no place is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nowhere {
    /// All ranks are full.
    Full,
    /// No backend accepts requests.
    Gone,
}

/// Why a request stopped waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The queue is full.
    TooMany,
    /// The request reached its maximum wait.
    TooLong,
    /// No backend appeared in time.
    Gone,
}

impl Refused {
    /// Returns the metric label.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::TooMany => "queue_full",
            Self::TooLong => "queue_timeout",
            Self::Gone => "no_backend",
        }
    }
}

/// The kind of offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offer {
    /// Room for one request.
    One,
    /// Room for every request that can use it.
    Many,
    /// A first try, for a request that joined during an offer.
    Look,
}

/// A position in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// Arrival time minus the head start, in microseconds since the queue was created.
    arrived_us: i64,
    number: u64,
}

impl Place {
    fn new(arrived: Duration, head_start_seconds: f64, number: u64) -> Self {
        Self { arrived_us: (1e6 * (arrived.as_secs_f64() - head_start_seconds)) as i64, number }
    }
}

#[derive(Default)]
struct Line {
    next: u64,
    waiting: BTreeMap<Place, Waiting>,
    /// Number of offers in progress along the queue.
    offers: usize,
}

struct Waiting {
    called: Arc<Notify>,
    offer: Option<Offer>,
    looked: bool,
}

impl Waiting {
    fn call(&mut self, offer: Offer) {
        self.offer = Some(offer);
        self.looked = true;
        self.called.notify_one();
    }
}

impl Line {
    /// Makes an offer to the first request behind `after` without a pending offer; returns false if there is none.
    fn offer(&mut self, after: Option<Place>, offer: Offer) -> bool {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut behind = self.waiting.range_mut((from, Bound::Unbounded)).map(|(_, waiting)| waiting);
        let Some(waiting) = behind.find(|waiting| waiting.offer.is_none()) else { return false };
        waiting.call(offer);
        self.offers += 1;
        true
    }

    /// Continues an offer to `place` after it was used or declined (`used`).
    fn pass_on(&mut self, place: Place, offer: Offer, used: bool) {
        let continues = offer == Offer::Many || offer == Offer::One && !used;
        if continues && self.offer(Some(place), offer) {
            return;
        }
        // Search from the front: requests with a head start may have joined ahead of the place that had the offer.
        if let Some(waiting) = self.waiting.values_mut().find(|waiting| !waiting.looked) {
            waiting.call(Offer::Look);
            self.offers += 1;
        }
    }

    /// Removes and returns the offer pending at a place.
    fn take_offer(&mut self, place: Place) -> Option<Offer> {
        let offer = self.waiting.get_mut(&place)?.offer.take()?;
        self.offers -= 1;
        Some(offer)
    }
}

/// The queue of one model.
pub(crate) struct Queue {
    began: Instant,
    line: Mutex<Line>,
    /// Number of requests seeking or waiting for a place.
    looking: AtomicUsize,
    depth: Gauge,
    seconds: Histogram,
}

impl Queue {
    pub(crate) fn new(depth: Gauge, seconds: Histogram) -> Self {
        Self { began: Instant::now(), line: Mutex::default(), looking: AtomicUsize::new(0), depth, seconds }
    }

    /// Finds a place, immediately or after a wait. `place` is called under the queue's lock: it must be quick, and must
    /// not end a request that holds [`Room`].
    pub(crate) async fn enter<P>(
        &self,
        rules: &QueueRules,
        priority: u8,
        mut place: impl FnMut() -> Result<P, Nowhere>,
    ) -> Result<P, Refused> {
        let mut spot = {
            let _looking = Looking::new(&self.looking);
            let mut line = self.lock();
            let looks = line.offers == 0;
            let nowhere = match if looks { place() } else { Err(Nowhere::Full) } {
                Ok(place) => return Ok(place),
                Err(nowhere) => nowhere,
            };
            if nowhere == Nowhere::Gone && rules.wait_for_backend.is_zero() {
                return Err(Refused::Gone);
            }
            if line.waiting.len() >= rules.max_queued {
                return Err(if nowhere == Nowhere::Gone { Refused::Gone } else { Refused::TooMany });
            }
            Spot::join(self, &mut line, f64::from(priority) * rules.priority_seconds, nowhere, looks)
        };
        loop {
            let refused = match spot.nowhere {
                Nowhere::Full => (spot.since + rules.max_wait, Refused::TooLong),
                Nowhere::Gone => (spot.gone_since + rules.wait_for_backend, Refused::Gone),
            };
            if timeout_at(refused.0, spot.called.notified()).await.is_err() {
                return Err(refused.1);
            }
            let mut line = self.lock();
            let offer = line.take_offer(spot.place);
            let found = place();
            if let Some(offer) = offer {
                line.pass_on(spot.place, offer, found.is_ok());
            }
            match found {
                Ok(place) => {
                    drop(line);
                    return Ok(place);
                }
                Err(Nowhere::Gone) if rules.wait_for_backend.is_zero() => {
                    drop(line);
                    return Err(Refused::Gone);
                }
                Err(nowhere) => spot.still(nowhere),
            }
        }
    }

    /// Has all waiting requests try again, because a backend joined or left.
    pub(crate) fn wake_all(&self) {
        self.lock().offer(None, Offer::Many);
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a request as seeking room, so that ending requests offer their room only if any request seeks some.
struct Looking<'a>(&'a AtomicUsize);

impl<'a> Looking<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        // Either this request sees newly freed room, or the request that frees it sees this one.
        fence(Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A position in the queue, released on drop.
struct Spot<'a> {
    queue: &'a Queue,
    place: Place,
    called: Arc<Notify>,
    nowhere: Nowhere,
    since: Instant,
    /// Since when no backend has accepted requests, if none does.
    gone_since: Instant,
    _looking: Looking<'a>,
}

impl<'a> Spot<'a> {
    fn join(queue: &'a Queue, line: &mut Line, head_start_seconds: f64, nowhere: Nowhere, looked: bool) -> Self {
        let (called, now) = (Arc::new(Notify::new()), Instant::now());
        let place = Place::new(now.duration_since(queue.began), head_start_seconds, line.next);
        line.next += 1;
        line.waiting.insert(place, Waiting { called: Arc::clone(&called), offer: None, looked });
        queue.depth.inc();
        Self { queue, place, called, nowhere, since: now, gone_since: now, _looking: Looking::new(&queue.looking) }
    }

    fn still(&mut self, nowhere: Nowhere) {
        if nowhere == Nowhere::Gone && self.nowhere != Nowhere::Gone {
            self.gone_since = Instant::now();
        }
        self.nowhere = nowhere;
    }
}

impl Drop for Spot<'_> {
    fn drop(&mut self) {
        let mut line = self.queue.lock();
        let offer = line.take_offer(self.place);
        line.waiting.remove(&self.place);
        if let Some(offer) = offer {
            line.pass_on(self.place, offer, false);
        }
        drop(line);
        self.queue.depth.dec();
        self.queue.seconds.observe(self.since.elapsed().as_secs_f64());
    }
}

/// The room that a request occupies. Dropping it, once the request is no longer counted, offers it to the queue.
pub(crate) struct Room(Arc<Queue>);

impl Room {
    pub(crate) fn new(queue: &Arc<Queue>) -> Self {
        Self(Arc::clone(queue))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        fence(Ordering::SeqCst);
        if self.0.looking.load(Ordering::SeqCst) > 0 {
            self.0.lock().offer(None, Offer::One);
        }
    }
}

#[cfg(test)]
mod tests;
