//! T for attention dp: the expected local share of each token on each rank, and the prices that go with it.

use half::f16;
use semmoe_tables::{LayerIdx, Placement, Profile, TokenId, Trace};

use crate::score::mean_share;
use crate::transport::Transport;
use crate::unit_step::{PROFIT_ONE, mass_capacity, to_profit};

/// T f16 [V, G]: for each token the share of its activations that falls on each group, mean over layers.
///
/// With `n` occurrences in a layer and `p` the layer's own shares (its prior), the share of group g is
/// `(activations on g / k + m p[g]) / (n + m)`, m = `prior_occurrences`: a token seen once says little. A token
/// without evidence has equal values.
pub(crate) fn token_shares(profile: &Profile, placement: &Placement, prior_occurrences: f64) -> Vec<f16> {
    let groups = usize::from(placement.groups());
    let model = profile.model();
    let layers = model.layers();
    let vocabulary = model.vocab_size as usize;
    let mut sums = vec![0.0f64; vocabulary * groups];
    for layer in (0..layers).map(|layer| LayerIdx::new(layer as u16)) {
        let group_of = placement.layer(layer);
        let prior = layer_prior(profile, layer, group_of, groups);
        let mut on_group = vec![0u64; groups];
        for (token, sums) in (0u32..).zip(sums.chunks_exact_mut(groups)) {
            count_groups(profile, layer, TokenId::new(token), group_of, &mut on_group);
            let occurrences = on_group.iter().sum::<u64>() as f64 / f64::from(model.top_k);
            for ((sum, &count), prior) in sums.iter_mut().zip(&on_group).zip(&prior) {
                let seen = count as f64 / f64::from(model.top_k);
                *sum += (seen + prior_occurrences * prior) / (occurrences + prior_occurrences);
            }
        }
    }
    let neutral = f16::from_f64(1.0 / groups as f64);
    let mut shares = Vec::with_capacity(sums.len());
    for (&count, sums) in profile.token_counts().iter().zip(sums.chunks_exact(groups)) {
        let row = sums.iter().map(|sum| if count == 0 { neutral } else { f16::from_f64(sum / layers as f64) });
        shares.extend(row);
    }
    shares
}

/// Activations of a token in a layer by group.
pub(crate) fn count_groups(profile: &Profile, layer: LayerIdx, token: TokenId, group_of: &[u16], on_group: &mut [u64]) {
    on_group.fill(0);
    let row = profile.row(layer, token);
    for (&expert, &count) in row.experts.iter().zip(row.counts) {
        on_group[usize::from(group_of[usize::from(expert)])] += u64::from(count);
    }
}

/// Share of a layer's activations on each group; equal shares for a layer that never saw one.
pub(crate) fn layer_prior(profile: &Profile, layer: LayerIdx, group_of: &[u16], groups: usize) -> Vec<f64> {
    let mut total = vec![0u64; groups];
    let mut on_group = vec![0u64; groups];
    for token in 0..profile.model().vocab_size {
        count_groups(profile, layer, TokenId::new(token), group_of, &mut on_group);
        total.iter_mut().zip(&on_group).for_each(|(total, count)| *total += count);
    }
    let all: u64 = total.iter().sum();
    let share = |count: &u64| if all == 0 { 1.0 / groups as f64 } else { *count as f64 / all as f64 };
    total.iter().map(share).collect()
}

/// Tokens of the vocabulary that the profile never saw.
pub(crate) fn tokens_without_evidence(profile: &Profile) -> u64 {
    profile.token_counts().iter().filter(|&&count| count == 0).count() as u64
}

/// The prices at which the trace's requests, each scored by its prompt with T, fill the ranks evenly, without
/// margin: where the online prices start. In units of share.
pub(crate) fn dp_prices(trace: &Trace, shares: &[f16], groups: usize) -> Vec<f32> {
    let row = |token: TokenId| shares.get(token.index() * groups..(token.index() + 1) * groups);
    let (mut mass, mut profit) = (Vec::new(), Vec::new());
    for request in trace.iter() {
        let prompt = &request.token_ids()[..request.prompt_len()];
        if let Some(share) = mean_share(prompt, groups, row) {
            mass.push(prompt.len() as u64);
            profit.extend(share.iter().map(|share| to_profit(*share)));
        }
    }
    let capacity = mass_capacity(mass.iter().sum(), groups, 0.0);
    let plan = Transport { mass: &mass, profit: &profit, capacity: &capacity }.solve(None);
    plan.price.iter().map(|&price| (price as f64 / PROFIT_ONE) as f32).collect()
}
