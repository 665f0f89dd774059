//! The budget of retries: backends that fail get at most a share more requests than clients send.
//!
//! A bucket of tokens, one a retry. Requests fill it by `ratio`, time by `per_second`, and what is not used fades within
//! about [`WINDOW`]. It is filled when a retry asks, from a count of requests that is kept anyway, so that requests which
//! succeed pay nothing.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::config::BudgetRules;

/// Time in which unused tokens fade to a third.
const WINDOW: Duration = Duration::from_secs(10);

/// Tokens for the retries of one model.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    bucket: Mutex<Option<Bucket>>,
}

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    /// Requests so far, when it was last filled.
    requests: u64,
    filled: Instant,
}

impl Budget {
    /// Takes one token, if there is one. `requests` counts the model's requests so far; a count that starts again is
    /// taken for that many new ones.
    pub(crate) fn take(&self, now: Instant, requests: u64, rules: BudgetRules) -> bool {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = bucket.get_or_insert_with(|| Bucket::first(now, requests, rules));
        bucket.fill(now, requests, rules);
        let enough = bucket.tokens >= 1.0;
        if enough {
            bucket.tokens -= 1.0;
        }
        enough
    }

    /// The retry was not made after all.
    pub(crate) fn give_back(&self) {
        if let Some(bucket) = self.bucket.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            bucket.tokens += 1.0;
        }
    }
}

impl Bucket {
    /// As if the requests so far came within the last window, which they did as a rule where a backend fails early.
    fn first(now: Instant, requests: u64, rules: BudgetRules) -> Self {
        let tokens = rules.per_second * WINDOW.as_secs_f64() + rules.ratio * requests as f64;
        Self { tokens, requests, filled: now }
    }

    /// Solves `tokens' = ratio * rate + per_second - tokens / WINDOW` over the time since the last look, in which requests
    /// came at an even rate.
    fn fill(&mut self, now: Instant, requests: u64, rules: BudgetRules) {
        let came = requests.checked_sub(self.requests).unwrap_or(requests) as f64;
        let seconds = now.saturating_duration_since(self.filled).as_secs_f64();
        self.requests = requests;
        self.filled = self.filled.max(now);
        if seconds <= 0.0 {
            self.tokens += rules.ratio * came;
            return;
        }
        let window = WINDOW.as_secs_f64();
        let full = window * (rules.ratio * came / seconds + rules.per_second);
        self.tokens = full + (self.tokens - full) * (-seconds / window).exp();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RULES: BudgetRules = BudgetRules { ratio: 0.2, per_second: 1.0 };

    fn granted(budget: &Budget, now: Instant, requests: u64, wanted: usize) -> usize {
        (0..wanted).filter(|_| budget.take(now, requests, RULES)).count()
    }

    #[test]
    fn a_quiet_model_has_the_floor_and_a_busy_one_its_share() {
        let start = Instant::now();
        let budget = Budget::default();
        assert_eq!(granted(&budget, start, 0, 100), 10, "a floor of 1/s over 10 s");
        let later = start + Duration::from_secs(100);
        let share = granted(&budget, later, 100_000, 100_000);
        // 1000 requests/s: 200 retries/s over 10 s, and the floor.
        assert!((2005..=2010).contains(&share), "{share}");
        assert!(!budget.take(later, 100_000, RULES));
        budget.give_back();
        assert!(budget.take(later, 100_000, RULES));
    }

    #[test]
    fn nothing_is_granted_without_rules() {
        let none = BudgetRules { ratio: 0.0, per_second: 0.0 };
        let (budget, start) = (Budget::default(), Instant::now());
        for second in 0..100 {
            assert!(!budget.take(start + Duration::from_secs(second), second * 1000, none));
        }
    }

    proptest! {
        /// Whatever comes when: never more retries than the share of the requests and the floor pay for.
        #[test]
        fn retries_are_paid_for(steps in proptest::collection::vec((0u64..5000, 0u64..200, 0usize..50), 1..60)) {
            let (budget, start) = (Budget::default(), Instant::now());
            let (mut now, mut requests, mut retries) = (start, 0u64, 0usize);
            for (millis, came, wanted) in steps {
                now += Duration::from_millis(millis);
                requests += came;
                retries += granted(&budget, now, requests, wanted);
                let seconds = (now - start).as_secs_f64() + WINDOW.as_secs_f64();
                prop_assert!(retries as f64 <= 0.2 * requests as f64 + seconds + 1e-6);
            }
        }
    }
}
