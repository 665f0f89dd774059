//! T and A for attention tp: the likeliest groups of a token in a layer, and those after two known groups.

use half::f16;
use semmoe_tables::{LayerIdx, MAX_LABELS, NO_GROUP, Placement, Profile, Route, TpParts, Trace};

use crate::evidence::{LayerEvidence, Shrinkage};
use crate::token_table::activation_evidence;

/// Builds `T_group`, `T_prob`, `A_group` and `A_prob`.
///
/// A token's group in a layer is the one that holds most of its top-k, ties to the lowest. With a trace its
/// probability is counted; for tokens that the trace lacks, and without a trace, the profile's share of activations
/// stands for it. A needs a trace: without one, and for pairs of groups never seen, there is no evidence.
pub(crate) fn tp_parts(
    profile: &Profile,
    trace: Option<&Trace>,
    placement: &Placement,
    shrinkage: &Shrinkage<'_>,
) -> TpParts {
    let groups = usize::from(placement.groups());
    let mut parts = TpParts { labels: MAX_LABELS.min(groups), ..TpParts::default() };
    for layer in (0..profile.model().layers()).map(|layer| LayerIdx::new(layer as u16)) {
        push_tokens(&mut parts, &label_evidence(profile, trace, placement, layer), shrinkage);
        push_transitions(&mut parts, trace, placement, (layer, shrinkage.prior_occurrences()));
    }
    parts
}

/// Occurrences of every token by main group: counted in the trace, else by share of activations.
pub(crate) fn label_evidence(
    profile: &Profile,
    trace: Option<&Trace>,
    placement: &Placement,
    layer: LayerIdx,
) -> LayerEvidence {
    let activations = activation_evidence(profile, layer, placement);
    let Some(trace) = trace else { return activations };
    let groups = usize::from(placement.groups());
    let vocabulary = profile.model().vocab_size as usize;
    let counts = count_main_groups(trace, layer, placement.layer(layer), vocabulary, groups);
    let mut on_group = activations.on_group;
    for (row, counts) in on_group.chunks_exact_mut(groups).zip(counts.chunks_exact(groups)) {
        if counts.iter().any(|&count| count > 0) {
            row.iter_mut().zip(counts).for_each(|(row, &count)| *row = f64::from(count));
        }
    }
    LayerEvidence::new(on_group, groups, column_shares(&counts, groups))
}

/// The group that holds most of a route's experts, the lowest of equals.
pub(crate) fn main_group(route: Route<'_>, group_of: &[u16], scratch: &mut [u32]) -> usize {
    scratch.fill(0);
    for expert in route.experts() {
        scratch[usize::from(group_of[expert.index()])] += 1;
    }
    (1..scratch.len()).fold(0, |best, group| if scratch[group] > scratch[best] { group } else { best })
}

fn push_tokens(parts: &mut TpParts, evidence: &LayerEvidence, shrinkage: &Shrinkage<'_>) {
    let shrunk = shrinkage.fit(evidence);
    let mut shares = vec![0.0; evidence.groups];
    for token in 0..evidence.seen.len() {
        let known = shrunk.shares(token, &mut shares);
        push_labels(&mut parts.token_group, &mut parts.token_prob, parts.labels, known.then_some(&shares));
    }
}

fn push_transitions(
    parts: &mut TpParts,
    trace: Option<&Trace>,
    placement: &Placement,
    (layer, prior_occurrences): (LayerIdx, f64),
) {
    let groups = usize::from(placement.groups());
    let counts = trace.filter(|_| layer.get() >= 2).map(|trace| count_transitions(trace, layer, placement));
    let counts = counts.unwrap_or_else(|| vec![0; groups * groups * groups]);
    let prior = column_shares(&counts, groups);
    for counts in counts.chunks_exact(groups) {
        let seen: f64 = counts.iter().map(|&count| f64::from(count)).sum();
        let shrunk =
            |(&count, prior): (&u32, &f64)| (f64::from(count) + prior_occurrences * prior) / (seen + prior_occurrences);
        let shares: Vec<f64> = counts.iter().zip(&prior).map(shrunk).collect();
        let TpParts { labels, transition_group, transition_prob, .. } = parts;
        push_labels(transition_group, transition_prob, *labels, (seen > 0.0).then_some(&shares));
    }
}

/// Occurrences of each token by its main group, [V, G].
fn count_main_groups(trace: &Trace, layer: LayerIdx, group_of: &[u16], vocabulary: usize, groups: usize) -> Vec<u32> {
    let mut counts = vec![0u32; vocabulary * groups];
    let mut scratch = vec![0; groups];
    for request in trace.iter() {
        for (position, &token) in request.token_ids().iter().enumerate() {
            if let Some(route) = request.route(position, layer) {
                let count = &mut counts[token as usize * groups + main_group(route, group_of, &mut scratch)];
                *count = count.saturating_add(1);
            }
        }
    }
    counts
}

/// Tokens by their main groups in the two layers before and in this one, [G, G, G], older first.
fn count_transitions(trace: &Trace, layer: LayerIdx, placement: &Placement) -> Vec<u32> {
    let groups = usize::from(placement.groups());
    let mut counts = vec![0u32; groups * groups * groups];
    let mut scratch = vec![0; groups];
    for request in trace.iter() {
        for position in 0..request.token_ids().len() {
            let window = (layer.get() - 2..=layer.get()).map(LayerIdx::new);
            let index = window.into_iter().try_fold(0, |index, layer| {
                let route = request.route(position, layer)?;
                Some(index * groups + main_group(route, placement.layer(layer), &mut scratch))
            });
            if let Some(index) = index {
                counts[index] = counts[index].saturating_add(1);
            }
        }
    }
    counts
}

/// Share of each column of [rows, G] counts; equal shares without counts.
fn column_shares(counts: &[u32], groups: usize) -> Vec<f64> {
    let mut total = vec![0u64; groups];
    for row in counts.chunks_exact(groups) {
        total.iter_mut().zip(row).for_each(|(total, &count)| *total += u64::from(count));
    }
    let all: u64 = total.iter().sum();
    let share = |count: &u64| if all == 0 { 1.0 / groups as f64 } else { *count as f64 / all as f64 };
    total.iter().map(share).collect()
}

/// Appends the likeliest groups, best first, of equals the lowest; only unused labels where nothing is known.
fn push_labels(group: &mut Vec<u16>, prob: &mut Vec<f16>, labels: usize, shares: Option<&Vec<f64>>) {
    let Some(shares) = shares else {
        group.extend(std::iter::repeat_n(NO_GROUP, labels));
        prob.extend(std::iter::repeat_n(f16::ZERO, labels));
        return;
    };
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]).then(a.cmp(&b)));
    for &g in &order[..labels] {
        group.push(g as u16);
        prob.push(f16::from_f64(shares[g]));
    }
}
