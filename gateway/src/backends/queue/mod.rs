//! Requests of one model that wait for a place: a line with a bound, first come first served.
//!
//! A request that finds no place joins the queue. When room appears (a request ended, a backend came), it is offered
//! along the line from the front. A request that cannot use the offer, as when it is pinned to another rank, passes it
//! on and keeps its place. While an offer is under way newcomers join behind it, so that none overtakes. The
//! request of a client that leaves is removed at once, and passes on what it was offered. Requests that find a place at
//! once pay for a lock only where ranks have a limit.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::config::QueueRules;

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nowhere {
    /// All ranks are full.
    Full,
    /// No backend takes requests.
    Gone,
}

/// Why a request waits no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The line is as long as it may be.
    TooMany,
    /// Its time in the line is over.
    TooLong,
    /// No backend came in time.
    Gone,
}

impl Refused {
    /// In metrics.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::TooMany => "queue_full",
            Self::TooLong => "queue_timeout",
            Self::Gone => "no_backend",
        }
    }
}

/// The offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offer {
    /// Room for one request.
    One,
    /// Room for all that can use it.
    Many,
    /// A first look: a request that joined behind an offer has not looked yet.
    Look,
}

#[derive(Default)]
struct Line {
    next: u64,
    waiting: BTreeMap<u64, Waiting>,
    /// Offers that are on their way along the line.
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
    /// Makes an offer to the first request behind `after` that has none.
    fn offer(&mut self, after: Option<u64>, offer: Offer) {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut behind = self.waiting.range_mut((from, Bound::Unbounded)).map(|(_, waiting)| waiting);
        if let Some(waiting) = behind.find(|waiting| waiting.offer.is_none()) {
            waiting.call(offer);
            self.offers += 1;
        }
    }

    /// Goes on after an offer to `place` that found its taker, or did not (`used`).
    fn pass_on(&mut self, place: u64, offer: Offer, used: bool) {
        match offer {
            Offer::One if used => {}
            Offer::One | Offer::Many => return self.offer(Some(place), offer),
            Offer::Look => {}
        }
        if let Some(waiting) = self.waiting.values_mut().find(|waiting| !waiting.looked) {
            waiting.call(Offer::Look);
            self.offers += 1;
        }
    }

    /// An offer to a place in the queue, which ends with it.
    fn take_offer(&mut self, place: u64) -> Option<Offer> {
        let offer = self.waiting.get_mut(&place)?.offer.take()?;
        self.offers -= 1;
        Some(offer)
    }
}

/// The line of one model.
pub(crate) struct Queue {
    line: Mutex<Line>,
    /// Requests that look for a place or wait for one.
    looking: AtomicUsize,
    depth: Gauge,
    seconds: Histogram,
}

impl Queue {
    pub(crate) fn new(depth: Gauge, seconds: Histogram) -> Self {
        Self { line: Mutex::default(), looking: AtomicUsize::new(0), depth, seconds }
    }

    /// Finds a place, at once or after a wait. `place` is called under the queue's lock: it must be quick, and must not
    /// end a request that holds [`Room`].
    pub(crate) async fn enter<P>(
        &self,
        rules: &QueueRules,
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
            Spot::join(self, &mut line, nowhere, looks)
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
            let offer = line.take_offer(spot.number);
            let found = place();
            if let Some(offer) = offer {
                line.pass_on(spot.number, offer, found.is_ok());
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

    /// A backend came or went: all waiting requests look again.
    pub(crate) fn wake_all(&self) {
        self.lock().offer(None, Offer::Many);
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts requests that look for room, so that a request that ends knows that its room is wanted.
struct Looking<'a>(&'a AtomicUsize);

impl<'a> Looking<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        // Either we see the room that appears in this moment, or the request that ends sees us.
        fence(Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A place in the line, left when this is dropped.
struct Spot<'a> {
    queue: &'a Queue,
    number: u64,
    called: Arc<Notify>,
    nowhere: Nowhere,
    since: Instant,
    /// Since when no backend takes requests, where that is so.
    gone_since: Instant,
    _looking: Looking<'a>,
}

impl<'a> Spot<'a> {
    fn join(queue: &'a Queue, line: &mut Line, nowhere: Nowhere, looked: bool) -> Self {
        let (number, called, now) = (line.next, Arc::new(Notify::new()), Instant::now());
        line.next += 1;
        line.waiting.insert(number, Waiting { called: Arc::clone(&called), offer: None, looked });
        queue.depth.inc();
        Self { queue, number, called, nowhere, since: now, gone_since: now, _looking: Looking::new(&queue.looking) }
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
        let offer = line.take_offer(self.number);
        line.waiting.remove(&self.number);
        if let Some(offer) = offer {
            line.pass_on(self.number, offer, false);
        }
        drop(line);
        self.queue.depth.dec();
        self.queue.seconds.observe(self.since.elapsed().as_secs_f64());
    }
}

/// Room that a request takes; dropping it, after the request was counted out, offers it to the line.
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
