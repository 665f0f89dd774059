//! The retry budget: however backends fail, retries stay below a fraction of the client load.
//!
//! Whenever a retry is granted, the retries of the last [`WINDOW`] number at most `ratio` times its requests, plus
//! `per_second` times its length. Each request counts once, when it is read; retries do not count as requests. The
//! window is a ring of seconds, so older traffic earns no retries. (`tower::retry::budget` has a similar window, but
//! can neither refund an unused retry nor change its rules on a reload.)

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::config::RawRetry;

/// Window of the retry budget, in seconds.
const SECONDS: usize = 10;
const WINDOW: Duration = Duration::from_secs(SECONDS as u64);

/// Requests and retries of one model in the last [`WINDOW`].
#[derive(Debug)]
pub(crate) struct Budget {
    start: Instant,
    /// The second since `start` whose requests `arrived` counts.
    second: AtomicU64,
    /// Requests in that second.
    arrived: AtomicU64,
    window: Mutex<Window>,
}

/// The window's requests and retries per second: second `s` is at `s % SECONDS`.
#[derive(Debug, Default)]
struct Window {
    /// The latest second recorded.
    second: u64,
    requests: [u64; SECONDS],
    retries: [u64; SECONDS],
}

/// A granted retry; dropping it unused refunds it.
#[derive(Debug)]
pub(crate) struct Paid<'a> {
    budget: &'a Budget,
    second: u64,
}

impl Paid<'_> {
    /// Marks the retry as made.
    pub(crate) fn spend(self) {
        std::mem::forget(self);
    }
}

impl Drop for Paid<'_> {
    fn drop(&mut self) {
        let mut window = self.budget.window.lock().unwrap_or_else(PoisonError::into_inner);
        // Older retries have left the window, along with the budget that paid for them.
        if self.second + SECONDS as u64 > window.second {
            let retries = &mut window.retries[index(self.second)];
            *retries = retries.saturating_sub(1);
        }
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(Instant::now())
    }
}

impl Budget {
    fn new(start: Instant) -> Self {
        Self { start, second: AtomicU64::new(0), arrived: AtomicU64::new(0), window: Mutex::default() }
    }

    /// Counts a new request (retries are not counted here). Locks only once per second.
    pub(crate) fn request(&self, now: Instant) {
        if self.second_of(now) > self.second.load(Ordering::Relaxed) {
            self.advance(now, |_| {});
        }
        self.arrived.fetch_add(1, Ordering::Relaxed);
    }

    /// Grants one retry if the window's budget allows it.
    pub(crate) fn take(&self, now: Instant, rules: &RawRetry) -> Option<Paid<'_>> {
        self.advance(now, |window| {
            let requests: u64 = window.requests.iter().sum();
            let retries: u64 = window.retries.iter().sum();
            let allowed = rules.budget_ratio * requests as f64 + rules.budget_per_second * WINDOW.as_secs_f64();
            ((retries + 1) as f64 <= allowed).then(|| {
                window.retries[index(window.second)] += 1;
                Paid { budget: self, second: window.second }
            })
        })
    }

    /// Moves the window to `now`, including all requests counted so far.
    fn advance<R>(&self, now: Instant, then: impl FnOnce(&mut Window) -> R) -> R {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let at = index(window.second);
        window.requests[at] += self.arrived.swap(0, Ordering::Relaxed);
        window.advance(self.second_of(now));
        self.second.store(window.second, Ordering::Relaxed);
        then(&mut window)
    }

    fn second_of(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_secs()
    }
}

impl Window {
    /// Clears the seconds entering the window. Seconds that have ended never change again.
    fn advance(&mut self, second: u64) {
        let new = second.saturating_sub(self.second).min(SECONDS as u64);
        self.second = self.second.max(second);
        for second in self.second + 1 - new..=self.second {
            self.requests[index(second)] = 0;
            self.retries[index(second)] = 0;
        }
    }
}

fn index(second: u64) -> usize {
    (second % SECONDS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rules(budget_ratio: f64, budget_per_second: f64) -> RawRetry {
        RawRetry { budget_ratio, budget_per_second, ..RawRetry::default() }
    }

    fn granted(budget: &Budget, now: Instant, wanted: usize) -> usize {
        let rules = rules(0.2, 1.0);
        (0..wanted).filter(|_| budget.take(now, &rules).map(Paid::spend).is_some()).count()
    }

    fn arrive(budget: &Budget, now: Instant, requests: usize) {
        (0..requests).for_each(|_| budget.request(now));
    }

    #[test]
    fn the_window_pays_and_nothing_before_it() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let budget = Budget::new(start);
        assert_eq!(granted(&budget, start, 100), 10, "1/s over 10 s");
        arrive(&budget, at(3), 1000);
        assert_eq!(granted(&budget, at(4), 1000), 200, "a fifth of them; the floor is spent");
        assert_eq!(granted(&budget, at(9), 1000), 0);
        assert_eq!(granted(&budget, at(10), 1000), 10, "the first second has left the window");
        assert_eq!(granted(&budget, at(14), 1000), 0, "requests left it with the retries that they paid for");
        arrive(&budget, at(20), 20_000);
        assert_eq!(granted(&budget, at(3_600), 100), 10, "requests of an hour ago pay for nothing");
    }

    #[test]
    fn a_retry_that_is_not_made_costs_nothing() {
        let start = Instant::now();
        let (budget, rules) = (Budget::new(start), rules(0.2, 1.0));
        let first = budget.take(start, &rules).unwrap();
        assert_eq!(granted(&budget, start, 100), 9);
        drop(first);
        let late = budget.take(start, &rules).unwrap();
        assert!(budget.take(start, &rules).is_none());
        let later = start + Duration::from_secs(25);
        assert_eq!(granted(&budget, later, 100), 10);
        drop(late);
        assert!(budget.take(later, &rules).is_none(), "its second has left the window");
    }

    #[test]
    fn nothing_is_granted_without_rules() {
        let none = rules(0.0, 0.0);
        let start = Instant::now();
        let budget = Budget::new(start);
        for second in 0..100 {
            arrive(&budget, start + Duration::from_secs(second), 1000);
            assert!(budget.take(start + Duration::from_secs(second), &none).is_none());
        }
    }

    proptest! {
        /// For any schedule, a retry is granted only if the requests and seconds of its window pay for it.
        #[test]
        fn retries_are_paid_for(steps in proptest::collection::vec((0u64..5000, 0usize..200, 0usize..50), 1..60)) {
            let start = Instant::now();
            let (budget, mut millis) = (Budget::new(start), 0);
            let mut seen: Vec<(u64, usize, usize)> = Vec::new();
            for (pause, came, wanted) in steps {
                millis += pause;
                let now = start + Duration::from_millis(millis);
                arrive(&budget, now, came);
                let (second, retries) = (millis / 1000, granted(&budget, now, wanted));
                seen.push((second, came, retries));
                seen.retain(|(seen, ..)| seen + SECONDS as u64 > second);
                let requests: usize = seen.iter().map(|(_, came, _)| came).sum();
                let made: usize = seen.iter().map(|(.., retries)| retries).sum();
                prop_assert!(retries == 0 || made as f64 <= 0.2 * requests as f64 + 10.0 + 1e-6);
                // No retry within the budget is refused.
                prop_assert!(retries == wanted || (made + 1) as f64 > 0.2 * requests as f64 + 10.0 - 1e-6);
            }
        }
    }
}
