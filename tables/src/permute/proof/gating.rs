//! Which experts a token gets, by the rules of each family.

use super::super::config::Config;
use super::super::family::Scoring;

/// One model's gating.
#[derive(Debug)]
pub(super) struct Gating {
    scoring: Scoring,
    /// Neighbouring experts per gating group; N when there is one group.
    per_group: usize,
    /// Gating groups that are searched.
    top_groups: usize,
    top_k: usize,
}

/// The choice of one layer for one token.
#[derive(Debug)]
pub(super) struct Choice {
    /// Scores by which experts are chosen: \[N\]
    pub(super) scores: Vec<f32>,
    /// Strongest first, ties to the lower number.
    pub(super) experts: Vec<usize>,
    /// Their weights; together 1.
    pub(super) weights: Vec<f32>,
}

impl Gating {
    pub(super) fn new(config: &Config, experts: u16, top_k: u16) -> Self {
        let n_group = config.n_group.max(1);
        Self {
            scoring: config.family.scoring,
            per_group: usize::from(experts / n_group),
            top_groups: usize::from(config.top_groups.clamp(1, n_group)),
            top_k: usize::from(top_k),
        }
    }

    /// Chooses from the logits of a token and the bias of the router, if it has one.
    pub(super) fn choose(&self, logits: &[f32], bias: Option<&[f32]>) -> Choice {
        let biased = |expert: usize, value: f32| value + bias.map_or(0.0, |bias| bias[expert]);
        // Proportional to the weight, with one factor for all experts of the token.
        let affinities: Vec<f32> = match self.scoring {
            Scoring::Softmax => logits.to_vec(),
            Scoring::BiasedSoftmax => logits.iter().enumerate().map(|(e, &logit)| biased(e, logit)).collect(),
            Scoring::CorrectedSigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
        };
        let scores: Vec<f32> = match self.scoring {
            Scoring::Softmax | Scoring::BiasedSoftmax => affinities.clone(),
            Scoring::CorrectedSigmoid => affinities.iter().enumerate().map(|(e, &value)| biased(e, value)).collect(),
        };
        let experts = strongest(self.searched(&scores), self.top_k, |expert| scores[expert]);
        let chosen = experts.iter().map(|&expert| affinities[expert]);
        let raw: Vec<f32> = match self.scoring {
            Scoring::CorrectedSigmoid => chosen.collect(),
            Scoring::Softmax | Scoring::BiasedSoftmax => {
                let most = experts.first().map_or(0.0, |&expert| affinities[expert]);
                chosen.map(|value| (value - most).exp()).collect()
            }
        };
        let sum: f32 = raw.iter().sum();
        let weights = raw.iter().map(|value| value / sum).collect();
        Choice { scores, experts, weights }
    }

    /// The experts of the strongest gating groups: by their best expert, or with a corrected sigmoid by their best two.
    fn searched(&self, scores: &[f32]) -> Vec<usize> {
        if self.per_group >= scores.len() {
            return (0..scores.len()).collect();
        }
        let best = if self.scoring == Scoring::CorrectedSigmoid { 2 } else { 1 };
        let members = |group: usize| group * self.per_group..(group + 1) * self.per_group;
        let strength = |group: usize| -> f32 {
            let own = strongest(members(group), best, |expert| scores[expert]);
            own.into_iter().map(|expert| scores[expert]).sum()
        };
        let groups = strongest(0..scores.len() / self.per_group, self.top_groups, strength);
        groups.into_iter().flat_map(members).collect()
    }
}

/// The strongest few, strongest first, ties to the lower number.
fn strongest(numbers: impl IntoIterator<Item = usize>, count: usize, strength: impl Fn(usize) -> f32) -> Vec<usize> {
    let mut ranked: Vec<(f32, usize)> = numbers.into_iter().map(|number| (strength(number), number)).collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    ranked.into_iter().take(count).map(|(_, number)| number).collect()
}
