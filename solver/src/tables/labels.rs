//! T for attention tp: the likeliest groups of a token in a layer.

use half::f16;
use semmoe_tables::{GroupLabels, LayerIdx, MAX_LABELS, NO_GROUP, Placement, Profile, TpParts, TraceRequest};

use crate::prior::evidence::Shrinkage;
use crate::tables::token_table::activation_evidence;

/// Builds `T_group` and `T_prob`: groups in descending order of the share of the token's activations expected there.
/// Leaves `A_group` and `A_prob` without evidence.
///
/// The share is the fraction of activations that stay local if the token is on that group, so the first label is the
/// best group. How often the group has most of the top-k experts would be a weaker measure: with even k, many tokens
/// have no such group, and ties would favour low groups.
pub(crate) fn tp_parts(profile: &Profile, placement: &Placement, shrinkage: &Shrinkage<'_>) -> TpParts {
    let (layers, groups) = (profile.model().layers(), usize::from(placement.groups()));
    let mut parts = TpParts { labels: MAX_LABELS.min(groups), ..TpParts::default() };
    for layer in LayerIdx::all(layers) {
        let evidence = activation_evidence(profile, layer, placement);
        let shrunk = shrinkage.fit(&evidence);
        let mut shares = vec![0.0; groups];
        for token in 0..evidence.seen.len() {
            let known = shrunk.shares(token, &mut shares);
            push_labels(&mut parts.token_group, &mut parts.token_prob, parts.labels, known.then_some(&shares));
        }
    }
    let rows = layers * groups * groups;
    parts.transition_group = vec![NO_GROUP; rows * parts.labels];
    parts.transition_prob = vec![f16::ZERO; rows * parts.labels];
    parts
}

/// Appends the likeliest groups, best first, the lowest group on ties. Without evidence, appends only unused labels.
pub(crate) fn push_labels(group: &mut Vec<u16>, prob: &mut Vec<f16>, labels: usize, shares: Option<&[f64]>) {
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

/// Labels pushed row by row.
#[derive(Debug, Default)]
pub(crate) struct Labels {
    pub(crate) group: Vec<u16>,
    pub(crate) prob: Vec<f16>,
}

/// Returns row `row` of pushed labels, or `None` if it has no evidence.
pub(crate) fn labels_of<'a>(group: &'a [u16], prob: &'a [f16], labels: usize, row: usize) -> Option<GroupLabels<'a>> {
    let span = row * labels..(row + 1) * labels;
    let groups = &group[span.clone()];
    (groups[0] != NO_GROUP).then_some(GroupLabels { groups, probs: &prob[span] })
}

/// A token's groups by layer; `None` where its route is unknown.
#[derive(Debug)]
pub(crate) struct MainGroups {
    groups: Vec<Option<u16>>,
    scratch: Vec<u32>,
}

impl MainGroups {
    pub(crate) fn new(placement: &Placement) -> Self {
        MainGroups { groups: vec![None; placement.layers()], scratch: Vec::new() }
    }

    /// Switches to another token.
    pub(crate) fn set(&mut self, placement: &Placement, request: TraceRequest<'_>, position: usize) {
        for (layer, group) in LayerIdx::all(placement.layers()).zip(&mut self.groups) {
            let route = request.route(position, layer);
            *group = route.map(|route| placement.main_group(layer, route.experts(), &mut self.scratch).get());
        }
    }

    /// Returns the groups in the two previous layers, older first.
    pub(crate) fn before(&self, layer: usize) -> Option<(u16, u16)> {
        let older = layer.checked_sub(2)?;
        Some((self.groups[older]?, self.groups[older + 1]?))
    }
}
