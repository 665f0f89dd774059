//! A for attention tp: the groups that follow the groups of the two previous layers, kept in layers where that helps.
//!
//! T already has much of the information in a token's earlier groups, since the token determines them. At face value, A
//! would count it twice, so A is tempered with a weight, and left out of layers where no weight helps.

use std::collections::HashMap;

use semmoe_tables::{Placement, TpParts, Trace, TraceRequest, likeliest_group};
use serde::Serialize;

use crate::tables::labels::{Labels, MainGroups, labels_of, push_labels};

/// Candidate weights; the last one takes A at face value.
const WEIGHTS: [f64; 4] = [0.125, 0.25, 0.5, 1.0];

/// The effect of A in one layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerTransitions {
    /// The model's layer number.
    pub layer: u16,
    /// Local activation rate on the judging requests with every token on its likeliest group by T alone; `None` for a
    /// layer without known routes.
    pub lar_t: Option<f64>,
    /// Local activation rate on the judging requests by T and A.
    pub lar_t_and_a: Option<f64>,
    /// Local activation rate on the judging requests with A at face value, i.e. a weight of 1.
    pub lar_t_and_a_untempered: Option<f64>,
    /// The weight of A, chosen on other requests; `None` in the first two layers, which have no A.
    pub weight: Option<f64>,
    /// Whether A is in the tables, because it is better than T alone on both the choosing and the judging requests.
    pub kept: bool,
}

/// Counts A on `trace` and adds it to `parts`, which has T, in the layers where A beats T alone on both the choosing
/// and the judging requests, neither of which the solve used.
pub(crate) fn keep_transitions(
    parts: &mut TpParts,
    trace: &Trace,
    placement: &Placement,
    prior_occurrences: f64,
    [choose, judge]: [&Trace; 2],
) -> Vec<LayerTransitions> {
    let counts = Counts::of(trace.iter(), trace.model().top_k, placement);
    let tables: Vec<Labels> =
        WEIGHTS.iter().map(|&weight| counts.tempered(parts.labels, prior_occurrences, weight)).collect();
    let chosen_on = local_by(choose, placement, parts, &tables);
    let judged_on = local_by(judge, placement, parts, &tables);
    let size = counts.groups * counts.groups * parts.labels;
    let mut layers = Vec::with_capacity(placement.layers());
    for (layer, (chosen, judged)) in chosen_on.iter().zip(&judged_on).enumerate() {
        // Ties go to the smallest weight.
        let best = (1..WEIGHTS.len()).fold(0, |best, at| if chosen.by[at] > chosen.by[best] { at } else { best });
        let kept = chosen.by[best] > chosen.alone && judged.by[best] > judged.alone;
        if kept {
            let rows = layer * size..(layer + 1) * size;
            parts.transition_group[rows.clone()].copy_from_slice(&tables[best].group[rows.clone()]);
            parts.transition_prob[rows.clone()].copy_from_slice(&tables[best].prob[rows]);
        }
        let rate = |local: u64| (judged.activations > 0).then(|| local as f64 / judged.activations as f64);
        layers.push(LayerTransitions {
            layer: trace.model().layer_ids[layer],
            lar_t: rate(judged.alone),
            lar_t_and_a: rate(judged.by[best]).filter(|_| layer >= 2),
            lar_t_and_a_untempered: rate(judged.by[WEIGHTS.len() - 1]).filter(|_| layer >= 2),
            weight: (layer >= 2).then_some(WEIGHTS[best]),
            kept,
        });
    }
    layers
}

/// Activations by group, given a token's groups in the two previous layers.
pub(crate) struct Counts {
    groups: usize,
    top_k: f64,
    /// Ascending indices into [L, G, G, G] that were seen (the two previous groups come first, the older before the
    /// newer), with counts.
    after: Vec<(usize, u64)>,
    /// [L, G] all activations.
    all: Vec<u64>,
}

impl Counts {
    pub(crate) fn of<'a>(requests: impl Iterator<Item = TraceRequest<'a>>, top_k: u16, placement: &Placement) -> Self {
        let (layers, groups) = (placement.layers(), usize::from(placement.groups()));
        let (mut after, mut all) = (HashMap::new(), vec![0; layers * groups]);
        let mut main = MainGroups::new(placement);
        for request in requests {
            for position in 0..request.token_ids().len() {
                main.set(placement, request, position);
                for (id, route) in request.routes(position) {
                    let layer = id.index();
                    let row = main.before(layer).map(|(older, newer)| row_of(layer, older, newer, groups));
                    for expert in route.experts() {
                        let group = usize::from(placement.layer(id)[expert.index()]);
                        all[layer * groups + group] += 1;
                        if let Some(row) = row {
                            *after.entry(row * groups + group).or_default() += 1;
                        }
                    }
                }
            }
        }
        let mut after: Vec<(usize, u64)> = after.into_iter().collect();
        after.sort_unstable();
        Counts { groups, top_k: top_k.into(), after, all }
    }

    /// Returns the labels of every row, by the shares that `fill` computes from a layer's number and a row's counts. A
    /// row has no label if its two groups were never seen.
    pub(crate) fn labels(&self, labels: usize, fill: impl Fn(usize, &[u64], &mut [f64])) -> Labels {
        let mut table = Labels::default();
        let (mut counts, mut shares) = (vec![0; self.groups], vec![0.0; self.groups]);
        let mut after = self.after.iter().peekable();
        for row in 0..self.all.len() * self.groups {
            counts.fill(0);
            let mut seen = false;
            while let Some(&(at, count)) = after.next_if(|(at, _)| at / self.groups == row) {
                (counts[at % self.groups], seen) = (count, true);
            }
            if seen {
                fill(row / (self.groups * self.groups), &counts, &mut shares);
            }
            push_labels(&mut table.group, &mut table.prob, labels, seen.then_some(&shares));
        }
        table
    }

    /// Computes our own A: a row's shares, shrunk towards the layer's shares, divided by them, and raised to the power
    /// of the weight.
    fn tempered(&self, labels: usize, prior_occurrences: f64, weight: f64) -> Labels {
        self.labels(labels, |layer, counts, shares| {
            let all = &self.all[layer * self.groups..(layer + 1) * self.groups];
            let total = all.iter().sum::<u64>() as f64;
            let seen = counts.iter().sum::<u64>() as f64 / self.top_k;
            for ((share, &count), &all) in shares.iter_mut().zip(counts).zip(all) {
                let prior = all as f64 / total;
                let shrunk = (count as f64 / self.top_k + prior_occurrences * prior) / (seen + prior_occurrences);
                *share = if all == 0 { 0.0 } else { (shrunk / prior).powf(weight) };
            }
            let sum: f64 = shares.iter().sum();
            shares.iter_mut().for_each(|share| *share /= sum);
        })
    }
}

fn row_of(layer: usize, older: u16, newer: u16, groups: usize) -> usize {
    (layer * groups + usize::from(older)) * groups + usize::from(newer)
}

/// Activations of a layer, and the number of local ones.
#[derive(Clone, Debug, Default, PartialEq)]
struct Local {
    activations: u64,
    /// Local activations by T alone. Here and below, a token without evidence has no local activations.
    alone: u64,
    /// Local activations with each table of A.
    by: [u64; WEIGHTS.len()],
}

fn local_by(trace: &Trace, placement: &Placement, parts: &TpParts, tables: &[Labels]) -> Vec<Local> {
    let (layers, groups) = (placement.layers(), placement.groups());
    let vocabulary = trace.model().vocab_size as usize;
    let mut local = vec![Local::default(); layers];
    let mut on_group = vec![0u64; usize::from(groups)];
    let mut main = MainGroups::new(placement);
    for request in trace.iter() {
        for (position, token) in request.tokens() {
            main.set(placement, request, position);
            for (id, route) in request.routes(position) {
                let (layer, local) = (id.index(), &mut local[id.index()]);
                on_group.fill(0);
                for expert in route.experts() {
                    on_group[usize::from(placement.layer(id)[expert.index()])] += 1;
                    local.activations += 1;
                }
                let row = layer * vocabulary + token.index();
                let t = labels_of(&parts.token_group, &parts.token_prob, parts.labels, row);
                let stays = |a| likeliest_group(t, a, groups).map_or(0, |likely| on_group[likely.group.index()]);
                local.alone += stays(None);
                let before = main.before(layer).map(|(older, newer)| row_of(layer, older, newer, usize::from(groups)));
                for (by, table) in local.by.iter_mut().zip(tables) {
                    *by += stays(before.and_then(|row| labels_of(&table.group, &table.prob, parts.labels, row)));
                }
            }
        }
    }
    local
}
