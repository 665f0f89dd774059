//! The gain of ParaSMoE's switch from whole experts to slices in a rollout.

use semmoe_planner::PlanError;

use crate::{not_negative, positive};

/// A batch of answers, generated until the last one ends (ParaSMoE, appendix C).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rollout {
    /// N, answers.
    pub answers: f64,
    /// L_maj: tokens by which most answers have ended, a quantile of [`Lengths`](semmoe_planner::workload::Lengths).
    pub major_tokens: f64,
    /// L_max: tokens of the longest answer.
    pub most_tokens: f64,
}

/// The speed of a layout with many sequences and with few.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayoutSpeed {
    /// Tokens per second with many sequences.
    pub tokens_per_second: f64,
    /// Seconds per token with few.
    pub token_seconds: f64,
}

/// Seconds of a rollout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RolloutTimes {
    /// Whole experts throughout.
    pub ep: f64,
    /// Slices throughout.
    pub tp: f64,
    /// Whole experts up to L_maj, then slices; the switch included.
    pub adaptive: f64,
}

impl Rollout {
    /// Seconds with `ep` and `tp` layouts: `N L_maj / T + (L_max - L_maj) l`.
    ///
    /// # Errors
    /// [`PlanError::Value`] for invalid lengths or speeds.
    pub fn times(&self, ep: LayoutSpeed, tp: LayoutSpeed, switch_seconds: f64) -> Result<RolloutTimes, PlanError> {
        not_negative("L_max less L_maj in tokens", self.most_tokens - self.major_tokens)?;
        not_negative("the seconds of a switch", switch_seconds)?;
        let work = positive("the tokens up to L_maj", self.answers * self.major_tokens)?;
        for speed in [ep, tp] {
            positive("tokens per second", speed.tokens_per_second)?;
            positive("seconds per token", speed.token_seconds)?;
        }
        let tail = self.most_tokens - self.major_tokens;
        let both = |many: LayoutSpeed, few: LayoutSpeed| work / many.tokens_per_second + tail * few.token_seconds;
        Ok(RolloutTimes { ep: both(ep, ep), tp: both(tp, tp), adaptive: both(ep, tp) + switch_seconds })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EP: LayoutSpeed = LayoutSpeed { tokens_per_second: 22_000.0, token_seconds: 0.05 };
    const TP: LayoutSpeed = LayoutSpeed { tokens_per_second: 4_500.0, token_seconds: 0.02 };

    fn near(found: f64, expected: f64, error: f64) {
        assert!((found - expected).abs() <= error, "{found}, expected {expected}");
    }

    #[test]
    fn golden_rollouts() {
        let table = [
            (2.0, 1.076, 4.691),
            (4.0, 1.208, 4.349),
            (8.0, 1.410, 3.826),
            (16.0, 1.669, 3.154),
            (32.0, 1.937, 2.459),
            (64.0, 2.158, 1.887),
        ];
        for (ratio, ep, tp) in table {
            let rollout = Rollout { answers: 8192.0, major_tokens: 512.0, most_tokens: 512.0 * ratio };
            let times = rollout.times(EP, TP, 0.0).unwrap();
            near(times.ep / times.adaptive, ep, 0.0005);
            near(times.tp / times.adaptive, tp, 0.0005);
        }
        let times = Rollout { answers: 8192.0, major_tokens: 2048.0, most_tokens: 16384.0 }.times(EP, TP, 0.0).unwrap();
        near(times.ep, 1479.4, 0.05);
        near(times.tp, 4015.0, 0.05);
        near(times.adaptive, 1049.3, 0.05);
        let equal = Rollout { answers: 8192.0, major_tokens: 100.0, most_tokens: 4927.0 }.times(EP, TP, 0.0).unwrap();
        near(equal.ep / equal.tp, 1.0, 0.0005);
        let error = Rollout { answers: 1.0, major_tokens: 9.0, most_tokens: 8.0 }.times(EP, TP, 0.0).unwrap_err();
        assert!(error.to_string().contains("L_max less L_maj in tokens is -1"), "{error}");
    }

    proptest! {
        /// With a free switch, adaptive is never slower than a static layout if each layout is the faster one of its
        /// phase.
        #[test]
        fn adapting_never_loses(answers in 1.0f64..1e5, major in 1.0f64..1e4, more in 0.0f64..1e5) {
            let times = Rollout { answers, major_tokens: major, most_tokens: major + more }.times(EP, TP, 0.0).unwrap();
            prop_assert!(times.adaptive <= times.ep.min(times.tp) * (1.0 + 1e-12));
        }
    }
}
