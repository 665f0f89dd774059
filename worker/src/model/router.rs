//! Expert selection: computes scores from the router logits, selects the top k (optionally only from the best groups)
//! and computes their weights.

use super::config::{GroupLimit, GroupScore, Router, Scoring};

/// Prevents division by zero if all weights are 0, as in DeepSeek-V3.
const LEAST_TOTAL: f32 = 1e-20;

/// Scratch buffers reused between calls.
#[derive(Default)]
pub(super) struct RouterScratch {
    /// `[N]`: the scores used to select experts.
    scores: Vec<f32>,
    /// `[groups]`
    worth: Vec<f32>,
    /// Groups to select experts from.
    kept: Vec<u16>,
}

/// Selects the experts for each token.
pub(super) struct Choice<'a> {
    pub(super) router: &'a Router,
    /// N
    pub(super) num_experts: usize,
    /// k
    pub(super) top_k: usize,
    /// `[N]`: a bias on the scores that affects selection but not weights.
    pub(super) correction: Option<&'a [f32]>,
}

impl Choice<'_> {
    /// Selects experts for n tokens and computes their weights.
    ///
    /// - `logits` `[n, N]`
    /// - `experts`, `weights` `[n, k]`: the output, in descending order of score, ties by ascending id
    pub(super) fn route(&self, logits: &[f32], experts: &mut [u16], weights: &mut [f32], scratch: &mut RouterScratch) {
        let tokens = logits.chunks_exact(self.num_experts);
        let chosen = experts.chunks_exact_mut(self.top_k).zip(weights.chunks_exact_mut(self.top_k));
        for (logits, (experts, weights)) in tokens.zip(chosen) {
            self.choose(logits, experts, scratch);
            self.weigh(logits, experts, weights);
        }
    }

    fn choose(&self, logits: &[f32], experts: &mut [u16], scratch: &mut RouterScratch) {
        // Softmax preserves the order of the logits, so there is no need to compute it for selection.
        if self.router.scoring == Scoring::Softmax && self.router.groups.is_none() {
            return strongest(logits, experts);
        }
        let scores = &mut scratch.scores;
        scores.clear();
        match self.router.scoring {
            Scoring::Softmax => scores.extend_from_slice(logits),
            Scoring::CorrectedSigmoid => scores.extend(logits.iter().map(|logit| sigmoid(*logit))),
        }
        for (score, correction) in scores.iter_mut().zip(self.correction.unwrap_or_default()) {
            *score += correction;
        }
        if let Some(limit) = &self.router.groups {
            keep_groups(limit, scratch);
        }
        strongest(&scratch.scores, experts);
    }

    fn weigh(&self, logits: &[f32], experts: &[u16], weights: &mut [f32]) {
        let Router { scoring, normalise, scale, .. } = *self.router;
        let chosen = weights.iter_mut().zip(experts).map(|(weight, expert)| (weight, logits[usize::from(*expert)]));
        let total = match scoring {
            Scoring::Softmax => {
                let max = logits[usize::from(experts[0])];
                chosen.for_each(|(weight, logit)| *weight = (logit - max).exp());
                match normalise {
                    true => weights.iter().sum(),
                    false => logits.iter().map(|logit| (logit - max).exp()).sum(),
                }
            }
            Scoring::CorrectedSigmoid => {
                chosen.for_each(|(weight, logit)| *weight = sigmoid(logit));
                if normalise { weights.iter().sum::<f32>() + LEAST_TOTAL } else { 1.0 }
            }
        };
        for weight in weights {
            *weight = *weight / total * scale;
        }
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Excludes all experts outside the best groups.
fn keep_groups(limit: &GroupLimit, scratch: &mut RouterScratch) {
    let RouterScratch { scores, worth, kept } = scratch;
    let size = scores.len() / limit.groups;
    worth.clear();
    worth.extend(scores.chunks_exact(size).map(|group| worth_of(group, limit.by)));
    kept.clear();
    kept.resize(limit.kept, 0);
    strongest(worth, kept);
    for (group, scores) in scores.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&(group as u16)) {
            scores.fill(f32::NEG_INFINITY);
        }
    }
}

fn worth_of(group: &[f32], by: GroupScore) -> f32 {
    let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &score in group {
        if score > best {
            (best, second) = (score, best);
        } else if score > second {
            second = score;
        }
    }
    match by {
        GroupScore::Best => best,
        GroupScore::TwoBest => best + second,
    }
}

/// Selects the ids of the `chosen.len()` largest scores, using insertion because k is small. The ids are distinct for
/// any scores, even NaN.
fn strongest(scores: &[f32], chosen: &mut [u16]) {
    let mut count = 0;
    for (expert, &score) in scores.iter().enumerate() {
        let beats = |other: u16| score > scores[usize::from(other)];
        if count == chosen.len() {
            if !beats(chosen[count - 1]) {
                continue;
            }
            count -= 1;
        }
        let mut at = count;
        while at > 0 && beats(chosen[at - 1]) {
            chosen[at] = chosen[at - 1];
            at -= 1;
        }
        chosen[at] = expert as u16;
        count += 1;
    }
}

#[cfg(test)]
#[path = "router_tests.rs"]
mod tests;
