//! Lines 53 to 55 of Algorithm 1: derives T and its confidence from the groups of units, and A with its confidence
//! (appendix A.2).

use half::f16;
use semmoe_tables::{LayerIdx, NO_GROUP, Placement, Profile, TpParts, Trace};

use crate::input::has_route;
use crate::tables::{Sequences, count_groups};

/// Line 54: returns the distribution of each token's occurrences over the groups of their requests, [V, G] (a single
/// group if tokens are the units). A token without evidence gets equal values.
pub(super) fn token_matrix(profile: &Profile, trace: Option<&Trace>, label: &[u16], groups: usize) -> Vec<f16> {
    let mut counts = vec![0u64; profile.model().vocab_size as usize * groups];
    match trace {
        Some(trace) => {
            // Requests without a known route are not units.
            for (request, &group) in trace.iter().filter(|request| has_route(*request)).zip(label) {
                for (_, token) in request.tokens().filter(|(position, _)| request.is_routed(*position)) {
                    counts[token.index() * groups + usize::from(group)] += 1;
                }
            }
        }
        None => {
            for ((token, count), &group) in profile.seen().zip(label) {
                counts[token.index() * groups + usize::from(group)] = count;
            }
        }
    }
    let mut shares = Vec::with_capacity(counts.len());
    for row in counts.chunks_exact(groups) {
        let total: u64 = row.iter().sum();
        let share = |&count: &u64| if total == 0 { 1.0 / groups as f64 } else { count as f64 / total as f64 };
        shares.extend(row.iter().map(share).map(f16::from_f64));
    }
    shares
}

/// Sets T for attention tp: one label per token and layer, with the fraction of the token's activations that it keeps
/// local.
pub(super) fn set_labels<'a>(
    parts: &mut TpParts,
    profile: &Profile,
    placement: &Placement,
    labels: impl Iterator<Item = &'a [u16]>,
) {
    parts.token_group.fill(NO_GROUP);
    parts.token_prob.fill(f16::ZERO);
    let vocabulary = profile.model().vocab_size as usize;
    let mut on_group = vec![0u64; usize::from(placement.groups())];
    for (layer, label) in labels.enumerate() {
        let id = LayerIdx::new(layer as u16);
        for ((token, _), &group) in profile.seen().zip(label) {
            count_groups(profile, id, token, placement.layer(id), &mut on_group);
            let total: u64 = on_group.iter().sum();
            if total > 0 {
                let at = (layer * vocabulary + token.index()) * parts.labels;
                parts.token_group[at] = group;
                parts.token_prob[at] = f16::from_f64(on_group[usize::from(group)] as f64 / total as f64);
            }
        }
    }
}

/// Sets A for attention tp: one label per pair of groups in the two previous layers, with the fraction of the layer's
/// activations on that group.
pub(super) fn set_transitions(parts: &mut TpParts, trace: &Trace, placement: &Placement) {
    let counted = Sequences::of(trace, placement, |_| true).labels;
    let rows = parts.transition_group.chunks_exact_mut(parts.labels).zip(&counted.group);
    rows.for_each(|(row, &group)| row[0] = group);
    let rows = parts.transition_prob.chunks_exact_mut(parts.labels).zip(&counted.prob);
    rows.for_each(|(row, &prob)| row[0] = prob);
}
