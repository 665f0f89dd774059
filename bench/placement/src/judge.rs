//! A placement and its T, judged on a profile.

use semmoe_solver::TokenPlan;
use semmoe_tables::{LayerIdx, Placement, Profile, TokenId};

/// The figures of a placement and its T on a profile, averaged over layers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    /// Local activation rate.
    pub(crate) lar: f64,
    /// Most activated group's activations over the mean.
    pub(crate) expert_load: f64,
    /// Fullest group's tokens over the mean.
    pub(crate) token_load: f64,
}

/// The group of each token.
pub(crate) enum Labels<'a> {
    /// All tokens on random groups, in expectation.
    Random,
    /// By T; tokens that T does not know are on a random group, in expectation.
    Plan(&'a TokenPlan),
}

/// Judges on the counts of `profile`.
pub(crate) fn judge(profile: &Profile, placement: &Placement, labels: &Labels<'_>) -> Figures {
    let layers = placement.layers();
    let each = (0..layers).map(|layer| judge_layer(profile, placement, labels, LayerIdx::new(layer as u16)));
    each.fold(Figures::default(), |sum, next| Figures {
        lar: sum.lar + next.lar / layers as f64,
        expert_load: sum.expert_load + next.expert_load / layers as f64,
        token_load: sum.token_load + next.token_load / layers as f64,
    })
}

fn judge_layer(profile: &Profile, placement: &Placement, labels: &Labels<'_>, layer: LayerIdx) -> Figures {
    let groups = usize::from(placement.groups());
    let group_of = placement.layer(layer);
    let (mut local, mut activations) = (0.0, 0.0);
    let (mut expert_load, mut token_load) = (vec![0.0; groups], vec![0.0; groups]);
    let mut share = vec![0.0; groups];
    for (token, &count) in (0u32..).zip(profile.token_counts()).filter(|(_, count)| **count > 0) {
        let token = TokenId::new(token);
        share.fill(1.0 / groups as f64);
        if let Labels::Plan(plan) = labels {
            let known = plan.shares(layer, token);
            if !known.is_empty() {
                share.fill(0.0);
                known.iter().for_each(|(group, part)| share[group.index()] = *part);
            }
        }
        token_load.iter_mut().zip(&share).for_each(|(load, share)| *load += share * count as f64);
        let row = profile.row(layer, token);
        for (&expert, &count) in row.experts.iter().zip(row.counts) {
            let group = usize::from(group_of[usize::from(expert)]);
            expert_load[group] += f64::from(count);
            local += f64::from(count) * share[group];
            activations += f64::from(count);
        }
    }
    Figures {
        lar: local / f64::max(activations, 1.0),
        expert_load: max_over_mean(&expert_load),
        token_load: max_over_mean(&token_load),
    }
}

/// Maximum over mean; 1 if all loads are 0.
pub(crate) fn max_over_mean(loads: &[f64]) -> f64 {
    let (most, total) = (loads.iter().copied().fold(0.0, f64::max), loads.iter().sum::<f64>());
    if total > 0.0 { most * loads.len() as f64 / total } else { 1.0 }
}

/// The best LAR that any T can reach for this placement: every token on its best group, with its counts known.
pub(crate) fn hindsight(profile: &Profile, placement: &Placement) -> f64 {
    let groups = usize::from(placement.groups());
    let rate = |layer: LayerIdx| {
        let (mut local, mut activations) = (0, 0);
        let mut on_group = vec![0u64; groups];
        for token in 0..profile.model().vocab_size {
            on_group.fill(0);
            let row = profile.row(layer, TokenId::new(token));
            for (&expert, &count) in row.experts.iter().zip(row.counts) {
                on_group[usize::from(placement.layer(layer)[usize::from(expert)])] += u64::from(count);
            }
            local += on_group.iter().max().copied().unwrap_or(0);
            activations += on_group.iter().sum::<u64>();
        }
        local as f64 / activations.max(1) as f64
    };
    let layers = placement.layers();
    (0..layers).map(|layer| rate(LayerIdx::new(layer as u16))).sum::<f64>() / layers as f64
}
