//! Step times by layout and batch size: a prior, corrected by measured steps.
//!
//! A step with B decoding sequences and x prompt tokens takes `f(layout, B) + x / p(layout)`. Both parts are stored as
//! the log of their ratio to the prior, f in half-octave buckets of B. A measured step corrects each part in proportion
//! to its share of the time, so steps without prompt tokens determine f, and steps full of prompt tokens determine p.
//! An unmeasured batch size borrows from neighbouring buckets and, with a small weight, from the other layout: an
//! effect that slows down both layouts (longer contexts, a lower clock rate) must correct both, as comparing a
//! corrected layout with an uncorrected one would be misleading. With a larger weight, a prior that is wrong for only
//! one layout would never be corrected.

use super::{ByLayout, Layout, Step, StepCurve};

/// A layout's prior, before any measurement. `None` means unknown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayoutPrior {
    /// Decode step time by batch size.
    pub steps: Option<StepCurve>,
    /// Prefill rate of the whole unit, in prompt tokens per second; positive.
    pub prefill_tokens_per_second: Option<f64>,
}

/// Both layouts' priors: the planner's curves, or a calibration at startup.
pub type Prior = ByLayout<LayoutPrior>;

/// Number of half octaves in a `u32`.
const BUCKETS: usize = 65;
/// Maximum weight of a bucket's samples, so that the bucket keeps adapting.
const MAX_SAMPLES: f64 = 50.0;
/// Weight of the other layout's samples. At most, all samples in a bucket together weigh as much as the prior.
const SHARED: f64 = 0.02;
/// Maximum change of an estimate by a single step, in natural log units.
const MAX_ERROR: f64 = 1.0;

/// An estimate of a logarithm from samples.
#[derive(Clone, Copy, Debug, Default)]
struct Estimate {
    log: f64,
    samples: f64,
}

impl Estimate {
    /// Moves the estimate towards `log` with the weight of `weight` samples. The first sample starts from `believed`.
    fn add(&mut self, believed: f64, log: f64, weight: f64) {
        let before = if self.samples > 0.0 { self.log } else { believed };
        let share = weight / (self.samples.min(MAX_SAMPLES) + 1.0);
        self.log = before + share.min(1.0) * (log - before);
        self.samples += weight;
    }
}

/// Learned step times of both layouts.
#[derive(Clone, Debug)]
pub(super) struct Learned {
    prior: Prior,
    steps: ByLayout<[Estimate; BUCKETS]>,
    prefill: ByLayout<Estimate>,
}

fn bucket(sequences: u32) -> usize {
    ((2.0 * f64::from(sequences.max(1)).log2()).round() as usize).min(BUCKETS - 1)
}

impl Learned {
    pub(super) fn new(prior: Prior) -> Self {
        let none = [Estimate::default(); BUCKETS];
        Learned { prior, steps: ByLayout { tp: none, ep: none }, prefill: ByLayout::default() }
    }

    /// Returns the seconds of a decode step, if known from the prior or measured.
    pub(super) fn decode_seconds(&self, layout: Layout, sequences: u32) -> Option<f64> {
        match &self.prior[layout].steps {
            Some(curve) => Some(curve.seconds(sequences)? * self.correction(layout, bucket(sequences)).exp()),
            None => self.measured(layout, bucket(sequences)),
        }
    }

    /// Returns the prefill rate in tokens per second, if known from the prior or measured.
    pub(super) fn prefill_rate(&self, layout: Layout) -> Option<f64> {
        let own = self.prefill[layout];
        match self.prior[layout].prefill_tokens_per_second {
            Some(rate) => {
                let other = self.prefill[layout.other()];
                let shared = self.prior[layout.other()].prefill_tokens_per_second.map_or(0.0, |_| SHARED);
                let (own_weight, other_weight) =
                    (own.samples.min(MAX_SAMPLES), shared * other.samples.min(MAX_SAMPLES));
                let log = (own_weight * own.log + other_weight * other.log) / (1.0 + own_weight + other_weight);
                Some(rate * log.exp())
            }
            None => (own.samples > 0.0).then(|| own.log.exp()),
        }
    }

    /// Learns from a step. Ignores non-positive times, and steps whose two parts are both unknown.
    pub(super) fn learn(&mut self, step: &Step) {
        if !(step.seconds.is_finite() && step.seconds > 0.0) {
            return;
        }
        let Step { layout, sequences, prompt_tokens, seconds } = *step;
        let tokens = f64::from(prompt_tokens);
        let decode = if sequences == 0 { Some(0.0) } else { self.decode_seconds(layout, sequences) };
        let prefill = if prompt_tokens == 0 { Some(0.0) } else { self.prefill_rate(layout).map(|rate| tokens / rate) };
        match (decode, prefill) {
            (Some(decode), Some(prefill)) if decode + prefill > 0.0 => {
                let error = (seconds / (decode + prefill)).ln().clamp(-MAX_ERROR, MAX_ERROR);
                let share = decode / (decode + prefill);
                if sequences > 0 {
                    let believed = (decode / self.base(layout, sequences)).ln();
                    self.steps[layout][bucket(sequences)].add(believed, believed + error, share);
                }
                if prompt_tokens > 0 {
                    let base = self.prior[layout].prefill_tokens_per_second.unwrap_or(1.0);
                    let believed = (tokens / prefill / base).ln();
                    self.prefill[layout].add(believed, believed - error, 1.0 - share);
                }
            }
            (None, Some(prefill)) if seconds > prefill && self.prior[layout].steps.is_none() => {
                let log = (seconds - prefill).ln();
                self.steps[layout][bucket(sequences)].add(log, log, 1.0);
            }
            (Some(decode), None) if seconds > decode => {
                let log = (tokens / (seconds - decode)).ln();
                self.prefill[layout].add(log, log, 1.0);
            }
            _ => {}
        }
    }

    /// Returns the reference for the logs of step times: the prior, or one second.
    fn base(&self, layout: Layout, sequences: u32) -> f64 {
        self.prior[layout].steps.as_ref().and_then(|curve| curve.seconds(sequences)).unwrap_or(1.0)
    }

    /// Estimates the log of the ratio of the true time to the prior's: the mean over measured buckets, weighted by
    /// distance, and one sample of 0.
    fn correction(&self, layout: Layout, at: usize) -> f64 {
        let mut sum = 0.0;
        let mut weights = 1.0;
        let shared = if self.prior[layout.other()].steps.is_some() { SHARED } else { 0.0 };
        for (side, trust) in [(layout, 1.0), (layout.other(), shared)] {
            for (number, estimate) in self.steps[side].iter().enumerate().filter(|(_, bucket)| bucket.samples > 0.0) {
                let near = 0.5f64.powi(number.abs_diff(at) as i32);
                let weight = trust * near * estimate.samples.min(MAX_SAMPLES);
                sum += weight * estimate.log;
                weights += weight;
            }
        }
        sum / weights
    }

    /// Returns the step time in seconds without a prior: the measured bucket, or an interpolation between measured
    /// neighbours. Below the smallest measured bucket its time applies, because smaller batches take no longer. Unknown
    /// above the largest.
    fn measured(&self, layout: Layout, at: usize) -> Option<f64> {
        let buckets = &self.steps[layout];
        let known = |&number: &usize| buckets[number].samples > 0.0;
        let above = (at..BUCKETS).find(known)?;
        let Some(below) = (0..at).rev().find(known) else { return Some(buckets[above].log.exp()) };
        let share = (at - below) as f64 / (above - below) as f64;
        Some((buckets[below].log + (buckets[above].log - buckets[below].log) * share).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Point;
    use super::*;

    fn prior(seconds: f64, rate: f64) -> LayoutPrior {
        let points = [(1, seconds), (1024, seconds * 4.0)];
        let points = points.map(|(sequences, seconds)| Point { sequences, seconds }).to_vec();
        LayoutPrior { steps: Some(StepCurve::new(points).unwrap()), prefill_tokens_per_second: Some(rate) }
    }

    fn step(sequences: u32, prompt_tokens: u32, seconds: f64) -> Step {
        Step { layout: Layout::Tp, sequences, prompt_tokens, seconds }
    }

    #[test]
    fn both_parts_of_mixed_steps_are_found() {
        let mut learned = Learned::new(Prior { tp: prior(0.01, 20_000.0), ep: prior(0.02, 20_000.0) });
        for number in 0..2000u32 {
            let (batch, tokens) = (64 + number % 5, (number * 977) % 4096);
            let truth = 1.3 * 0.01 * (1.0 + 3.0 * f64::from(batch).log2() / 10.0) + f64::from(tokens) / 28_000.0;
            learned.learn(&step(batch, tokens, truth));
        }
        let found = learned.decode_seconds(Layout::Tp, 64).unwrap() / (0.01 * 2.8);
        assert!((found - 1.3).abs() < 0.07, "{found}");
        let rate = learned.prefill_rate(Layout::Tp).unwrap();
        assert!((rate / 28_000.0 - 1.0).abs() < 0.05, "{rate}");
        let other = learned.decode_seconds(Layout::Ep, 64).unwrap() / (0.02 * 2.8);
        assert!((1.1..1.3).contains(&other), "the other layout follows until it is measured: {other}");
        let far = learned.decode_seconds(Layout::Tp, 1).unwrap() / 0.01;
        assert!(far < 1.25, "a batch far away follows less: {far}");
    }

    #[test]
    fn without_a_prior_only_what_was_measured_is_known() {
        let mut learned = Learned::new(Prior::default());
        assert_eq!(learned.decode_seconds(Layout::Tp, 8), None);
        learned.learn(&step(8, 100, 0.02));
        assert_eq!(learned.decode_seconds(Layout::Tp, 8), None, "two unknowns in one measurement");
        learned.learn(&step(8, 0, 0.02));
        learned.learn(&step(32, 0, 0.08));
        let near = |found: Option<f64>, expected: f64| assert!((found.unwrap() - expected).abs() < 1e-9, "{found:?}");
        near(learned.decode_seconds(Layout::Tp, 8), 0.02);
        near(learned.decode_seconds(Layout::Tp, 16), 0.04);
        near(learned.decode_seconds(Layout::Tp, 1), 0.02);
        assert_eq!(learned.decode_seconds(Layout::Tp, 64), None);
        assert_eq!(learned.decode_seconds(Layout::Ep, 8), None);
        learned.learn(&step(8, 1000, 0.07));
        near(learned.prefill_rate(Layout::Tp), 20_000.0);
    }

    #[test]
    fn times_that_are_no_times_change_nothing() {
        let mut learned = Learned::new(Prior { tp: prior(0.01, 1e4), ep: prior(0.02, 1e4) });
        let before = format!("{learned:?}");
        [f64::NAN, f64::INFINITY, 0.0, -1.0].into_iter().for_each(|seconds| learned.learn(&step(8, 10, seconds)));
        learned.learn(&step(u32::MAX, 0, 1.0));
        assert_eq!(format!("{learned:?}"), before);
    }
}
