//! The drift alarm: raised when predictions stay too optimistic for long enough.
//!
//! The moving difference m of the predicted and the observed rate covers the activations of about n samples, weighted
//! towards the newest: D += (d - D) x 2 / (n + 1) for the activations that should have been local but were not, and
//! likewise A for all activations. Both are initialised with the first sample, and m = D / A. As in the rates, a long
//! request thus counts as much as many short ones. n consecutive samples with m above the upper threshold raise the
//! alarm; n with m below the lower one clear it.

use crate::config::DriftRules;

/// The state of one backend's alarm.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Drift {
    /// The moving sums D and A; A is 0 before the first sample.
    missing: f64,
    activations: f64,
    pub(crate) raised: bool,
    /// Number of consecutive samples in favour of the other state.
    against: u32,
}

impl Drift {
    /// Returns the moving difference m; `None` before the first sample.
    pub(crate) fn mean(&self) -> Option<f64> {
        (self.activations > 0.0).then(|| self.missing / self.activations)
    }

    /// Adds a sample of `activations`, with `missing` fewer local ones than predicted; returns the state if it changed.
    pub(crate) fn observe(&mut self, missing: f64, activations: u64, rules: &DriftRules) -> Option<bool> {
        let weight = match self.mean() {
            Some(_) => 2.0 / (f64::from(rules.samples) + 1.0),
            None => 1.0,
        };
        self.missing += (missing - self.missing) * weight;
        self.activations += (activations as f64 - self.activations) * weight;
        let mean = self.mean()?;
        let is_against = if self.raised { mean < rules.clear } else { mean > rules.raise };
        self.against = if is_against { self.against + 1 } else { 0 };
        if self.against < rules.samples {
            return None;
        }
        self.against = 0;
        self.raised = !self.raised;
        Some(self.raised)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RULES: DriftRules = DriftRules { raise: 0.05, clear: 0.02, samples: 10 };

    /// Feeds a constant difference; returns what changed, and after how many samples.
    fn feed(drift: &mut Drift, difference: f64, times: u32) -> Vec<(u32, bool)> {
        (1..=times).filter_map(|n| drift.observe(100.0 * difference, 100, &RULES).map(|raised| (n, raised))).collect()
    }

    #[test]
    fn it_is_raised_and_cleared_once() {
        let mut drift = Drift::default();
        assert_eq!(feed(&mut drift, 0.1, 200), [(10, true)]);
        // Between the thresholds nothing changes, from either state.
        assert_eq!(feed(&mut drift, 0.03, 200), []);
        let cleared = feed(&mut drift, 0.0, 200);
        assert!(matches!(cleared[..], [(10..=20, false)]), "{cleared:?}");
        assert_eq!(feed(&mut drift, 0.03, 200), []);
        assert_eq!(feed(&mut drift, -0.5, 200), [], "an observation above the prediction is no drift");
    }

    #[test]
    fn single_samples_do_not_raise_it() {
        let mut drift = Drift::default();
        for _ in 0..50 {
            assert_eq!(feed(&mut drift, 0.3, 1), []);
            assert_eq!(feed(&mut drift, 0.0, 12), []);
        }
    }

    /// The few activations of many short requests do not outweigh the many of a long one.
    #[test]
    fn activations_count_and_not_requests() {
        let mut drift = Drift::default();
        for _ in 0..400 {
            drift.observe(0.3 * 10.0, 10, &RULES);
            assert_eq!(drift.observe(0.0, 1_000, &RULES), None);
        }
        assert!(drift.mean().unwrap() < 0.005, "{drift:?}");
    }

    proptest! {
        /// The state changes only after as many samples as the rules require, and only when the mean says so.
        #[test]
        fn changes_are_apart(differences in proptest::collection::vec(-0.2f64..0.2, 0..200)) {
            let mut drift = Drift::default();
            let mut since = 0;
            for difference in differences {
                since += 1;
                if let Some(raised) = drift.observe(difference * 1e3, 1_000, &RULES) {
                    prop_assert!(since >= RULES.samples);
                    let mean = drift.mean().unwrap();
                    let fits = if raised { mean > RULES.raise } else { mean < RULES.clear };
                    prop_assert!(fits, "{} {}", raised, mean);
                    since = 0;
                }
            }
        }
    }
}
