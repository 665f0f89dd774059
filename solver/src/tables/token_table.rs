//! T for attention dp: the expected local share of each token on each rank, and the prices.

use half::f16;
use semmoe_tables::{LayerIdx, Placement, Profile, Score, TokenId, Trace};

use crate::input::Margins;
use crate::prior::evidence::{LayerEvidence, MeanEvidence, Shrinkage};
use crate::step::{Held, Requests, group_loads};

/// Builds T, f16 [V, G], from the evidence of each layer: each token's share of activations on each group, averaged
/// over layers. A token with neither counts nor a similar token gets equal values.
///
/// A row is the mean over layers of `(c + m q) / (n + m)`, with the counts c of n occurrences in a layer, m
/// pseudo-occurrences and the prior q. The regression behind q is linear, so a single regression on the means over
/// layers replaces one per layer.
pub(crate) fn shares_by(
    profile: &Profile,
    groups: usize,
    shrinkage: &Shrinkage<'_>,
    evidence_of: impl Fn(LayerIdx) -> LayerEvidence,
) -> Vec<f16> {
    let layers = profile.model().layers();
    let vocabulary = profile.model().vocab_size as usize;
    let m = shrinkage.options.prior_occurrences;
    let (mut own, mut pull) = (vec![0.0f64; vocabulary * groups], vec![0.0f64; vocabulary]);
    let mut mean = MeanEvidence::new(vocabulary, groups);
    for layer in LayerIdx::all(layers) {
        let evidence = evidence_of(layer);
        for (token, own) in own.chunks_exact_mut(groups).enumerate() {
            let all = evidence.seen[token] + m;
            own.iter_mut().zip(evidence.row(token)).for_each(|(own, count)| *own += count / all);
            pull[token] += m / all;
        }
        mean.add(&evidence);
    }
    let mean = mean.finish(layers);
    let shrunk = shrinkage.fit(&mean);
    let neutral = f16::from_f64(1.0 / groups as f64);
    let mut prior = vec![0.0; groups];
    let mut table = Vec::with_capacity(own.len());
    for (token, own) in own.chunks_exact(groups).enumerate() {
        let known = shrunk.prior(token, &mut prior);
        let share = |(own, prior): (&f64, &f64)| f16::from_f64((own + pull[token] * prior) / layers as f64);
        table.extend(own.iter().zip(&prior).map(|both| if known { share(both) } else { neutral }));
    }
    table
}

/// Builds T for activations that can be local on several ranks.
pub(crate) fn replica_shares(profile: &Profile, held: &Held, shrinkage: &Shrinkage<'_>) -> Vec<f16> {
    let mut shares = shares_by(profile, held.groups, shrinkage, |layer| replica_evidence(profile, layer, held));
    // Sums of rounded shares may exceed one slightly if every group holds every expert.
    shares.iter_mut().for_each(|share| *share = share.min(f16::ONE));
    shares
}

/// Returns the occurrences of every token in a layer by group: an occurrence is divided over the groups of its k
/// experts.
pub(crate) fn activation_evidence(profile: &Profile, layer: LayerIdx, placement: &Placement) -> LayerEvidence {
    let groups = usize::from(placement.groups());
    let group_of = placement.layer(layer);
    let top_k = f64::from(profile.model().top_k);
    let mut counts = vec![0u64; groups];
    let mut on_group = Vec::with_capacity(profile.model().vocab_size as usize * groups);
    for token in 0..profile.model().vocab_size {
        count_groups(profile, layer, TokenId::new(token), group_of, &mut counts);
        on_group.extend(counts.iter().map(|&count| count as f64 / top_k));
    }
    LayerEvidence::new(on_group, groups, layer_prior(profile, layer, group_of, groups))
}

/// Returns the occurrences of every token in a layer by group: an activation counts on every group that holds its
/// expert, so a row adds up to more than the token's occurrences.
fn replica_evidence(profile: &Profile, layer: LayerIdx, held: &Held) -> LayerEvidence {
    let (groups, holders) = (held.groups, held.layer(layer.index()));
    let top_k = f64::from(profile.model().top_k);
    let vocabulary = profile.model().vocab_size;
    let mut on_group = vec![0.0; vocabulary as usize * groups];
    let mut seen = Vec::with_capacity(vocabulary as usize);
    let mut total = vec![0.0; groups];
    for (token, counts) in (0..vocabulary).zip(on_group.chunks_exact_mut(groups)) {
        let row = profile.row(layer, TokenId::new(token));
        for (expert, count) in row.iter() {
            for &group in &holders[usize::from(expert)] {
                counts[usize::from(group)] += f64::from(count) / top_k;
            }
        }
        total.iter_mut().zip(&*counts).for_each(|(total, count)| *total += count);
        seen.push(row.activations() as f64 / top_k);
    }
    let all: f64 = seen.iter().sum();
    let layer_share = total.iter().map(|total| if all > 0.0 { total / all } else { 1.0 / groups as f64 });
    LayerEvidence { groups, on_group, seen, layer_share: layer_share.collect() }
}

/// Counts the activations of a token in a layer by group.
pub(crate) fn count_groups(profile: &Profile, layer: LayerIdx, token: TokenId, group_of: &[u16], on_group: &mut [u64]) {
    on_group.fill(0);
    for (expert, count) in profile.row(layer, token).iter() {
        on_group[usize::from(group_of[usize::from(expert)])] += u64::from(count);
    }
}

/// Returns the share of a layer's activations on each group, or equal shares for a layer without activations.
fn layer_prior(profile: &Profile, layer: LayerIdx, group_of: &[u16], groups: usize) -> Vec<f64> {
    let total = group_loads(group_of, &profile.expert_loads(layer), groups);
    let all: u64 = total.iter().sum();
    let share = |count: &u64| if all == 0 { 1.0 / groups as f64 } else { *count as f64 / all as f64 };
    total.iter().map(share).collect()
}

/// Prices of tokens, as fractions of a token's activations, and of sequences, as fractions of a mean-sized request's
/// activations, [G] each.
#[derive(Debug)]
pub(crate) struct Prices {
    pub(crate) token: Vec<f32>,
    /// `None` if the units are tokens.
    pub(crate) sequence: Option<Vec<f32>>,
}

/// Returns the prices at which the trace's requests, each scored with T by its prompt, fill the ranks within the
/// margins. Online prices start from these.
pub(crate) fn dp_prices(trace: &Trace, shares: &[f16], groups: usize, margins: Margins) -> Prices {
    let row = |&token: &u32| shares.get(token as usize * groups..(token as usize + 1) * groups);
    let (mut tokens, mut value) = (Vec::new(), Vec::new());
    for request in trace.iter() {
        let prompt = &request.token_ids()[..request.prompt_len()];
        if let Some(share) = Score::of_rows(groups, prompt.iter().filter_map(row)).share() {
            tokens.push(prompt.len() as f64);
            value.extend(share.iter().map(|share| share * prompt.len() as f64));
        }
    }
    if tokens.is_empty() {
        return Prices { token: vec![0.0; groups], sequence: None };
    }
    let found = Requests { tokens: &tokens, value: &value, ranks: groups }.divide(margins);
    let mean = tokens.iter().sum::<f64>() / tokens.len() as f64;
    let in_shares = |prices: &[f64], unit: f64| prices.iter().map(|price| (price / unit) as f32).collect();
    Prices { token: in_shares(&found.token_price, 1.0), sequence: Some(in_shares(&found.sequence_price, mean)) }
}
