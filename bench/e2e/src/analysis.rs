//! Conclusions from measurements: spreads, Amdahl's law, predicted bytes, and whether the bars hold. Pure.

use serde::Serialize;

/// The bar for bytes: the largest relative difference between the measured and the predicted reduction.
pub(crate) const BYTES_TOLERANCE: f64 = 0.1;
/// The bar for throughput: the fraction of Amdahl's predicted gain that must be reached.
pub(crate) const GAIN_SHARE: f64 = 0.8;

/// Median, minimum and maximum of repeated measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) greatest: f64,
}

impl Spread {
    /// `None` without values. Ignores NaN and infinities.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (&least, &greatest) = values.first().zip(values.last())?;
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Some(Self { median, least, greatest })
    }
}

/// The prediction of `semmoe evaluate` for a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Prediction {
    /// Local activation rate.
    pub(crate) lar: f64,
    /// Remote ranks that a token is sent to, averaged over tokens and layers.
    pub(crate) remote_ranks: f64,
    /// Attention tp: rows over the fullest link of each collective, summed, per token and layer.
    pub(crate) fullest_link: Option<f64>,
}

/// Whether dispatched bytes fell as predicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct BytesVerdict {
    /// 1 - after / before, from counted bytes.
    pub(crate) measured: f64,
    /// 1 - after / before, from predicted remote ranks per token.
    pub(crate) predicted: f64,
    /// measured / predicted - 1
    pub(crate) off: f64,
    pub(crate) holds: bool,
}

/// Compares counted bytes with predicted remote ranks, before and after.
pub(crate) fn bytes_verdict(bytes: [f64; 2], remote_ranks: [f64; 2]) -> BytesVerdict {
    let fall = |[before, after]: [f64; 2]| 1.0 - after / before;
    let (measured, predicted) = (fall(bytes), fall(remote_ranks));
    let off = measured / predicted - 1.0;
    // NaN fails.
    BytesVerdict { measured, predicted, off, holds: off.abs() <= BYTES_TOLERANCE }
}

/// Amdahl's law: how much faster a step gets when `share` of its time shrinks to `ratio` of what it was.
pub(crate) fn amdahl(share: f64, ratio: f64) -> f64 {
    1.0 / (1.0 - share + share * ratio)
}

/// One round at one link rate: both configurations at saturation, and the first one over unlimited links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GainRound {
    /// Tokens per second before and after.
    pub(crate) throughput: (f64, f64),
    /// Bytes between ranks per token, before and after.
    pub(crate) bytes: (f64, f64),
    /// Share of communication in the first configuration's steps: the extra time of its collectives over unlimited
    /// links.
    pub(crate) share: f64,
    /// Share of communication by throughput: the extra time of whole steps, including the CPU time that limiting links
    /// costs.
    pub(crate) share_by_throughput: f64,
}

/// Whether throughput rose as Amdahl's law predicts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct GainVerdict {
    /// Bytes after over before.
    pub(crate) bytes: Spread,
    /// Throughput after over before, of each round.
    pub(crate) measured: Spread,
    pub(crate) by_collectives: Kept,
    pub(crate) by_throughput: Kept,
    /// Both predictions from the bytes of the fullest link, which `semmoe evaluate` reports, rather than the mean link.
    pub(crate) of_fullest_link: Option<[Kept; 2]>,
}

/// How much of Amdahl's predicted gain was reached, for one measure of the communication share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Kept {
    pub(crate) share: Spread,
    /// Amdahl's prediction of throughput after over before, by round.
    pub(crate) predicted: Spread,
    /// (measured - 1) / (predicted - 1), of the medians.
    pub(crate) kept: f64,
    pub(crate) holds: bool,
}

/// `None` without rounds. `fullest_link`: its bytes after over before.
pub(crate) fn gain_verdict(rounds: &[GainRound], fullest_link: Option<f64>) -> Option<GainVerdict> {
    let ratio = |(before, after): (f64, f64)| after / before;
    let measured = Spread::of(rounds.iter().map(|round| ratio(round.throughput)))?;
    let kept = |share: fn(&GainRound) -> f64, bytes: &dyn Fn(&GainRound) -> f64| {
        let predicted = Spread::of(rounds.iter().map(|round| amdahl(share(round), bytes(round))))?;
        let kept = (measured.median - 1.0) / (predicted.median - 1.0);
        let share = Spread::of(rounds.iter().map(share))?;
        Some(Kept { share, predicted, kept, holds: kept >= GAIN_SHARE && predicted.median > 1.0 })
    };
    let mean = |round: &GainRound| ratio(round.bytes);
    let both = |bytes: &dyn Fn(&GainRound) -> f64| {
        Some([kept(|round| round.share, bytes)?, kept(|round| round.share_by_throughput, bytes)?])
    };
    let [by_collectives, by_throughput] = both(&mean)?;
    Some(GainVerdict {
        bytes: Spread::of(rounds.iter().map(mean))?,
        measured,
        by_collectives,
        by_throughput,
        of_fullest_link: fullest_link.and_then(|bytes| both(&|_| bytes)),
    })
}

/// The share of a step spent on limited links: the extra time of its collectives over the step. Arguments are seconds
/// of a rank per token.
pub(crate) fn communication_share(collectives: f64, unlimited: f64, step: f64) -> f64 {
    if step > 0.0 { ((collectives - unlimited) / step).clamp(0.0, 1.0) } else { 0.0 }
}

/// First guess of the link rate, in bits per second, at which sending `bytes` per token takes the wanted share of a
/// step that takes `step` seconds without them. It assumes that all ranks send evenly at all times.
pub(crate) fn first_limit(bytes: f64, step: f64, wanted: f64) -> u64 {
    (8.0 * bytes * (1.0 - wanted) / (wanted * step)) as u64
}

/// Next guess, from the share just measured: exposed time is inversely proportional to the rate. Changes by at most a
/// factor of 4.
pub(crate) fn next_limit(bits: u64, found: f64, wanted: f64) -> u64 {
    let exposed = |share: f64| share / (1.0 - share);
    let factor = exposed(found.clamp(0.01, 0.95)) / exposed(wanted);
    (bits as f64 * factor.clamp(0.25, 4.0)) as u64
}

/// y = intercept + slope x by least squares; `None` where all x are equal.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Line {
    pub(crate) intercept: f64,
    pub(crate) slope: f64,
}

impl Line {
    pub(crate) fn fit(points: &[(f64, f64)]) -> Option<Self> {
        let n = points.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
        let slope = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread;
        (slope.is_finite() && spread > 1e-12).then_some(Self { intercept: y - slope * x, slope })
    }

    pub(crate) fn at(&self, x: f64) -> f64 {
        self.intercept + self.slope * x
    }
}

/// The gateway's cost factor gamma: the extra time of a fully remote token over the time to compute it. `all_to_all` is
/// a layer's time per token over the local share, `computing` the rest of a step per token.
pub(crate) fn gamma(all_to_all: &Line, layers: usize, computing: f64) -> f64 {
    (all_to_all.at(0.0) - all_to_all.at(1.0)) * layers as f64 / computing
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn spreads_are_of_numbers_only() {
        assert_eq!(Spread::of([3.0, 1.0, f64::NAN, 2.0]), Some(Spread { median: 2.0, least: 1.0, greatest: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0]).map(|spread| spread.median), Some(2.5));
        assert_eq!(Spread::of([f64::NAN]), None);
    }

    #[test]
    fn bytes_hold_within_a_tenth_of_the_predicted_fall() {
        // Predicted: 20% less. 18% to 22% hold.
        for (after, holds) in [(81.9, true), (78.1, true), (82.1, false), (77.9, false), (100.0, false)] {
            assert_eq!(bytes_verdict([100.0, after], [2.0, 1.6]).holds, holds, "{after}");
        }
        assert!(!bytes_verdict([0.0, 0.0], [2.0, 1.6]).holds);
        assert!(!bytes_verdict([100.0, 100.0], [2.0, 2.0]).holds);
    }

    #[test]
    fn the_bar_is_on_the_gain_and_not_on_the_ratio() {
        // Half of the step, bytes halved: 1 / 0.75.
        assert!(near(amdahl(0.5, 0.5), 4.0 / 3.0) && near(amdahl(0.0, 0.1), 1.0) && near(amdahl(1.0, 0.5), 2.0));
        let round = |after: f64| GainRound {
            throughput: (100.0, after),
            bytes: (10.0, 5.0),
            share: 0.5,
            share_by_throughput: 2.0 / 3.0,
        };
        let verdict = gain_verdict(&[round(130.0), round(126.7), round(110.0)], Some(0.75)).unwrap();
        assert!(near(verdict.by_collectives.kept, 0.267 * 3.0) && verdict.by_collectives.holds, "{verdict:?}");
        // The fullest link keeps three quarters of its bytes: 1 / (1 - 1/8) and 1 / (1 - 1/6).
        let [by_collectives, by_throughput] = verdict.of_fullest_link.unwrap();
        assert!(near(by_collectives.kept, 0.267 * 7.0) && near(by_throughput.kept, 0.267 * 5.0), "{verdict:?}");
        // A larger share promises more: 1 / (1 - 1/3).
        assert!(near(verdict.by_throughput.kept, 0.267 * 2.0) && !verdict.by_throughput.holds, "{verdict:?}");
        assert!(!gain_verdict(&[round(126.0)], None).unwrap().by_collectives.holds);
        assert_eq!(gain_verdict(&[], None), None);
        // Without a predicted gain there is nothing to verify.
        let nothing = GainRound { share: 0.0, ..round(100.0) };
        assert!(!gain_verdict(&[nothing], None).unwrap().by_collectives.holds);
    }

    #[test]
    fn limits_find_the_wanted_share() {
        // A link that costs k / bits seconds per token beside a step of `step` seconds.
        let (k, step) = (9e5, 1e-3);
        let share = |bits: u64| (k / bits as f64) / (step + k / bits as f64);
        for wanted in [0.2, 0.4, 0.6] {
            let mut bits = first_limit(40_000.0, step, wanted);
            for _ in 0..6 {
                bits = next_limit(bits, share(bits), wanted);
            }
            assert!((share(bits) - wanted).abs() < 1e-3, "{wanted}: {}", share(bits));
        }
        assert_eq!(first_limit(1000.0, 1e-3, 0.5), 8_000_000);
        assert_eq!((communication_share(3.0, 1.0, 8.0), communication_share(1.0, 3.0, 8.0)), (0.25, 0.0));
        assert_eq!(communication_share(1.0, 0.0, 0.0), 0.0);
    }

    #[test]
    fn gamma_is_the_cost_of_remoteness_over_computing() {
        let points: Vec<(f64, f64)> = [0.2, 0.4, 0.7].iter().map(|&lar| (lar, 5.0 + 10.0 * (1.0 - lar))).collect();
        let line = Line::fit(&points).unwrap();
        assert!(near(line.slope, -10.0) && near(line.intercept, 15.0));
        assert!(near(gamma(&line, 7, 140.0), 0.5));
        assert_eq!(Line::fit(&[(0.3, 1.0), (0.3, 2.0)]), None);
        assert_eq!(Line::fit(&[]), None);
    }

    proptest! {
        #[test]
        fn amdahl_never_promises_more_than_the_communication(share in 0.0f64..0.99, ratio in 0.0f64..1.0) {
            let gain = amdahl(share, ratio);
            prop_assert!((1.0 - 1e-12..=1.0 / (1.0 - share) + 1e-9).contains(&gain));
        }

        #[test]
        fn a_median_lies_between_its_ends(values in proptest::collection::vec(-1e9f64..1e9, 1..20)) {
            let spread = Spread::of(values.clone()).unwrap();
            prop_assert!(spread.least <= spread.median && spread.median <= spread.greatest);
            let below = values.iter().filter(|value| **value <= spread.median).count();
            prop_assert!(2 * below >= values.len());
        }
    }
}
