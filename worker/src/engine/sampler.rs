//! Samples tokens from logits.

use fastrand::Rng;
use serde::{Deserialize, Serialize};

use super::request::Sampling;
use crate::model::{Candidate, Draw, likeliest};

/// Samples one sequence's tokens. The tokens depend only on logits and seed, even after a move to another rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Sampler {
    sampling: Sampling,
    /// State of the random generator.
    state: u64,
    /// Scratch, empty between tokens.
    #[serde(skip)]
    candidates: Vec<Candidate>,
}

impl Sampler {
    pub(super) fn new(sampling: Sampling) -> Self {
        Self { sampling, state: Rng::with_seed(sampling.seed).get_seed(), candidates: Vec::new() }
    }

    /// Samples a token from `logits` `[V]`; returns `None` if they have no finite maximum or `allowed` accepts no id.
    pub(super) fn sample(&mut self, logits: &[f32], allowed: impl Fn(u32) -> bool) -> Option<u32> {
        let ids = || (0_u32..).zip(logits).filter(|(id, _)| allowed(*id));
        // The most likely token is nearly always allowed, so try it first.
        let first = likeliest(logits).filter(|id| allowed(*id));
        let (best, &max) = match first {
            Some(id) => (id, &logits[id as usize]),
            // Among equal logits the lowest id wins.
            None => ids().filter(|(_, logit)| !logit.is_nan()).reduce(|a, b| if b.1 > a.1 { b } else { a })?,
        };
        if !max.is_finite() {
            return None;
        }
        let Some(draw) = self.draw() else { return Some(best) };
        self.candidates.extend(draw.weigh(max, ids().map(|(id, logit)| (id, *logit))));
        let drawn = draw.choose(&mut self.candidates);
        self.candidates.clear();
        self.advance();
        Some(drawn.unwrap_or(best))
    }

    /// Returns how to draw the next token; `None` for greedy sampling.
    pub(super) fn draw(&self) -> Option<Draw> {
        let Sampling { temperature, top_p, top_k, .. } = self.sampling;
        let number = Rng::with_seed(self.state).f64();
        (temperature > 0.0).then_some(Draw { temperature, top_p, top_k, number })
    }

    /// Advances the random state past one draw; does nothing for greedy sampling.
    pub(super) fn advance(&mut self) {
        if self.sampling.temperature > 0.0 {
            let mut rng = Rng::with_seed(self.state);
            rng.f64();
            self.state = rng.get_seed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_p: f32, top_k: u32, seed: u64) -> Sampler {
        Sampler::new(Sampling { temperature, top_p, top_k, seed })
    }

    #[test]
    fn greedy_takes_the_lowest_of_equal_ids() {
        let mut greedy = sampler(0.0, 1.0, 0, 1);
        assert_eq!(greedy.sample(&[0.0, 3.0, 3.0], |_| true), Some(1));
        assert_eq!(greedy.sample(&[0.0, 3.0, 3.0], |id| id != 1), Some(2));
        assert_eq!(greedy.sample(&[f32::NAN, -1.0], |_| true), Some(1));
        assert_eq!(greedy.sample(&[f32::NAN], |_| true), None);
        assert_eq!(greedy.sample(&[f32::NEG_INFINITY], |_| true), None);
        assert_eq!(greedy.sample(&[f32::INFINITY, 0.0], |_| true), None);
        assert_eq!(greedy.sample(&[1.0], |_| false), None);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0_f32, 2.0_f32.ln(), 5.0_f32.ln()];
        let mut sampler = sampler(1.0, 1.0, 0, 7);
        let mut counts = [0_u32; 3];
        for _ in 0..8000 {
            counts[sampler.sample(&logits, |_| true).unwrap() as usize] += 1;
        }
        for (count, expected) in counts.iter().zip([1000.0, 2000.0, 5000.0]) {
            assert!((f64::from(*count) - expected).abs() < 200.0, "{counts:?}");
        }
    }

    #[test]
    fn nucleus_and_top_k_keep_the_likeliest() {
        let logits = [1.0_f32, 4.0, 3.0, 2.0];
        let seen = |mut sampler: Sampler| -> Vec<u32> {
            let mut ids: Vec<u32> = (0..500).map(|_| sampler.sample(&logits, |_| true).unwrap()).collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        // Softmax: 0.032, 0.644, 0.237, 0.087.
        assert_eq!(seen(sampler(1.0, 0.6, 0, 1)), [1]);
        assert_eq!(seen(sampler(1.0, 0.7, 0, 1)), [1, 2]);
        assert_eq!(seen(sampler(1.0, 0.9, 0, 1)), [1, 2, 3]);
        assert_eq!(seen(sampler(1.0, 1.0, 2, 1)), [1, 2]);
        assert_eq!(seen(sampler(1.0, 1.0, 0, 1)), [0, 1, 2, 3]);
        assert_eq!(seen(sampler(1.0, 1e-6, 0, 1)), [1]);
    }

    #[test]
    fn a_seed_repeats() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.37).sin()).collect();
        let run = |seed| -> Vec<Option<u32>> {
            let mut sampler = sampler(0.8, 0.95, 50, seed);
            (0..50).map(|_| sampler.sample(&logits, |_| true)).collect()
        };
        assert_eq!(run(3), run(3));
        assert_ne!(run(3), run(4));
        // After a move to another rank, the sampler continues with the same tokens.
        let mut first = sampler(0.8, 0.95, 50, 3);
        let mut tokens: Vec<_> = (0..20).map(|_| first.sample(&logits, |_| true).unwrap()).collect();
        let mut second: Sampler = serde_json::from_value(serde_json::to_value(&first).unwrap()).unwrap();
        tokens.extend((0..30).map(|_| second.sample(&logits, |_| true).unwrap()));
        assert_eq!(tokens.into_iter().map(Some).collect::<Vec<_>>(), run(3));
    }
}
