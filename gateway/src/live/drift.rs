//! The drift alarm: the prediction is, for long enough, better than what engines really do.
//!
//! The moving mean m of (predicted - observed) weighs the newest of about n samples: m += (d - m) x 2 / (n + 1), begun
//! with the first d. n samples in a row with m above the upper threshold raise the alarm, n in a row with m below the
//! lower one clear it.

use crate::config::DriftRules;

/// The state of one backend's alarm.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Drift {
    /// The moving mean; `None` before the first sample.
    pub(crate) mean: Option<f64>,
    pub(crate) raised: bool,
    /// Samples in a row that speak for the other state.
    against: u32,
}

impl Drift {
    /// Adds one sample, two rates from 0 to 1; returns the state if it changed.
    pub(crate) fn observe(&mut self, predicted: f64, observed: f64, rules: &DriftRules) -> Option<bool> {
        let difference = predicted - observed;
        let weight = 2.0 / (f64::from(rules.samples) + 1.0);
        let mean = self.mean.map_or(difference, |mean| mean + (difference - mean) * weight);
        self.mean = Some(mean);
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

    /// Feeds the same difference; returns what changed, and after how many samples.
    fn feed(drift: &mut Drift, difference: f64, times: u32) -> Vec<(u32, bool)> {
        (1..=times).filter_map(|n| drift.observe(0.4, 0.4 - difference, &RULES).map(|raised| (n, raised))).collect()
    }

    #[test]
    fn it_is_raised_and_cleared_once() {
        let mut drift = Drift::default();
        assert_eq!(feed(&mut drift, 0.1, 200), [(10, true)]);
        // Between the thresholds nothing changes, from either side.
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

    proptest! {
        /// The state changes only after as many samples as the rules say, and only when the mean says so.
        #[test]
        fn changes_are_apart(differences in proptest::collection::vec(-0.2f64..0.2, 0..200)) {
            let mut drift = Drift::default();
            let mut since = 0;
            for difference in differences {
                since += 1;
                if let Some(raised) = drift.observe(0.5, 0.5 - difference, &RULES) {
                    prop_assert!(since >= RULES.samples);
                    let mean = drift.mean.unwrap();
                    let fits = if raised { mean > RULES.raise } else { mean < RULES.clear };
                    prop_assert!(fits, "{} {}", raised, mean);
                    since = 0;
                }
            }
        }
    }
}
