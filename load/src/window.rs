//! Decides which requests are sent and measured, and which period rates cover.
//!
//! All times are passed in: this module reads no clock.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Limit;

/// The requests of a run and the measured period.
#[derive(Debug)]
pub(crate) struct Window {
    warmup: u64,
    limit: Limit,
    next: AtomicU64,
    /// Start of the measured period.
    pub(crate) begin: OnceLock<Instant>,
    /// End of the last measured request, in nanoseconds from the start of the period.
    last_end_ns: AtomicU64,
    /// Whether the schedule ended before the limit.
    ended_early: AtomicBool,
}

/// Permission to send one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// Index of the request, counted from 0 and including the warm-up.
    pub(crate) number: u64,
    pub(crate) measured: bool,
}

impl Window {
    /// Creates a window that does not measure the first `warmup` requests.
    pub(crate) fn new(warmup: u64, limit: Limit) -> Self {
        let (next, last_end_ns) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { warmup, limit, next, begin: OnceLock::new(), last_end_ns, ended_early: AtomicBool::new(false) }
    }

    /// Records that the schedule ended before the limit was reached.
    pub(crate) fn schedule_ended(&self) {
        self.ended_early.store(true, Ordering::Relaxed);
    }

    /// Returns the ticket of the next request, due at `due`; `None` once the limit is reached. The first measured
    /// request starts the measured period.
    pub(crate) fn ticket(&self, due: Instant) -> Option<Ticket> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let Some(measured) = number.checked_sub(self.warmup) else {
            return Some(Ticket { number, measured: false });
        };
        let begin = *self.begin.get_or_init(|| due);
        let over = match self.limit {
            Limit::Requests(most) => measured >= most,
            Limit::Duration(time) => due.saturating_duration_since(begin) >= time,
            Limit::Arrivals => false,
        };
        (!over).then_some(Ticket { number, measured: true })
    }

    /// Records the end of a request, and returns whether the request counts toward rates.
    ///
    /// With a duration limit, every request that ends within the duration counts, including warm-up requests: about as
    /// many requests are in flight at its start as at its end.
    pub(crate) fn ended(&self, ticket: Ticket, end: Instant) -> bool {
        let Some(begin) = self.begin.get() else { return false };
        if ticket.measured {
            let since = end.saturating_duration_since(*begin);
            self.last_end_ns.fetch_max(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
        match self.limit {
            Limit::Duration(time) => end >= *begin && end.saturating_duration_since(*begin) <= time,
            Limit::Requests(_) | Limit::Arrivals => ticket.measured,
        }
    }

    /// Returns the period that rates cover: the requested duration, or the time until the last measured request ended
    /// if there is no duration or the schedule ended early. If the caller stopped the run, a requested duration is cut
    /// at the stop, or at the end of the last measured request if that is later.
    pub(crate) fn length(&self, stopped: Option<Instant>) -> Duration {
        let Some(begin) = self.begin.get() else { return Duration::ZERO };
        let last_end = Duration::from_nanos(self.last_end_ns.load(Ordering::Relaxed));
        match (self.limit, stopped) {
            (Limit::Duration(time), None) if self.ended_early.load(Ordering::Relaxed) => time.min(last_end),
            (Limit::Duration(time), None) => time,
            (Limit::Duration(time), Some(stopped)) => time.min(stopped.saturating_duration_since(*begin).max(last_end)),
            (Limit::Requests(_) | Limit::Arrivals, _) => last_end,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn requests_are_numbered_and_end_at_the_limit() {
        let (window, now) = (Window::new(2, Limit::Requests(3)), Instant::now());
        let tickets: Vec<_> = (0..8).map_while(|_| window.ticket(now)).collect();
        assert_eq!(
            tickets.iter().map(|ticket| (ticket.number, ticket.measured)).collect::<Vec<_>>(),
            [(0, false), (1, false), (2, true), (3, true), (4, true)]
        );
        // A warm-up request that ends late does not count, and the last measured one ends the period.
        assert!(!window.ended(tickets[0], now + MS(900)));
        assert!(window.ended(tickets[4], now + MS(700)) && window.ended(tickets[2], now + MS(500)));
        assert_eq!((window.length(None), window.length(Some(now + MS(1)))), (MS(700), MS(700)));
    }

    #[test]
    fn a_duration_counts_what_ends_in_it() {
        let (window, start) = (Window::new(1, Limit::Duration(MS(100))), Instant::now());
        let warm = window.ticket(start).unwrap();
        assert!(!window.ended(warm, start + MS(5)), "nothing is measured yet");
        let first = window.ticket(start + MS(10)).unwrap();
        let last = window.ticket(start + MS(109)).unwrap();
        assert!(first.measured && last.measured);
        assert_eq!(window.ticket(start + MS(110)), None);
        for (ticket, at, counts) in [(warm, 9, false), (warm, 10, true), (first, 110, true), (last, 111, false)] {
            assert_eq!(window.ended(ticket, start + MS(at)), counts, "{ticket:?} at {at}");
        }
        assert_eq!(window.length(None), MS(100));
    }

    #[test]
    fn a_stopped_duration_is_over_what_it_lasted() {
        let (window, start) = (Window::new(0, Limit::Duration(MS(100))), Instant::now());
        let ticket = window.ticket(start).unwrap();
        assert_eq!(window.length(Some(start + MS(40))), MS(40));
        window.ended(ticket, start + MS(60));
        assert_eq!((window.length(Some(start + MS(40))), window.length(Some(start + MS(200)))), (MS(60), MS(100)));
    }

    #[test]
    fn nothing_measured_lasts_no_time() {
        assert_eq!(Window::new(5, Limit::Arrivals).length(None), Duration::ZERO);
    }
}
