//! Placements of experts by other methods than the solver's, layer by layer.

use std::cmp::Ordering;

use ndarray::{Array2, ArrayRef1, Axis};
use semmoe_solver::top_eigenpairs;

use crate::assignment::assign_groups;
use crate::counts::LayerCounts;

/// The group of each expert of one layer.
pub type Groups = Vec<u16>;

/// A random permutation of the contiguous placement.
pub fn random(experts: usize, groups: usize, random: &mut fastrand::Rng) -> Groups {
    let mut group_of: Groups = (0..experts).map(|expert| (expert * groups / experts) as u16).collect();
    random.shuffle(&mut group_of);
    group_of
}

/// EPLB without replicas: experts in descending order of load, each to the least loaded group with room.
pub fn eplb(counts: &LayerCounts, groups: usize) -> Groups {
    let each = counts.experts / groups;
    let mut group_of = vec![0; counts.experts];
    let (mut load, mut held) = (vec![0.0; groups], vec![0; groups]);
    for expert in by_load(counts) {
        let open = (0..groups).filter(|&group| held[group] < each);
        if let Some(group) = open.min_by(|&a, &b| f64::total_cmp(&load[a], &load[b])) {
            group_of[expert] = group as u16;
            load[group] += counts.load[expert];
            held[group] += 1;
        }
    }
    group_of
}

/// Greedy co-activation: a group starts with the hottest unplaced expert, then takes those that are most co-activated
/// with its members beyond chance until it is full.
pub fn coactivation(counts: &LayerCounts, groups: usize) -> Groups {
    let each = counts.experts / groups;
    let mut group_of = vec![u16::MAX; counts.experts];
    let order = by_load(counts);
    for group in 0..groups {
        let mut members: Vec<usize> = Vec::with_capacity(each);
        while members.len() < each {
            let left = order.iter().copied().filter(|&expert| group_of[expert] == u16::MAX);
            let beside = |expert: usize| members.iter().map(|&member| counts.centred(expert, member)).sum::<f64>();
            let best = left.reduce(|best, next| if beside(next) > beside(best) { next } else { best });
            let Some(expert) = best else { break };
            group_of[expert] = group as u16;
            members.push(expert);
        }
    }
    group_of
}

/// Greedy co-activation over all groups at once: experts in descending order of load, each to the open group with most
/// co-activations beyond chance per member.
pub fn coactivation_by_load(counts: &LayerCounts, groups: usize) -> Groups {
    let each = counts.experts / groups;
    let mut group_of = vec![0; counts.experts];
    let mut members = vec![Vec::new(); groups];
    for expert in by_load(counts) {
        let beside = |group: usize| members[group].iter().map(|&member| counts.centred(expert, member)).sum::<f64>();
        let open = (0..groups).filter(|&group| members[group].len() < each);
        if let Some(group) = open.reduce(|best, next| if beside(next) > beside(best) { next } else { best }) {
            group_of[expert] = group as u16;
            members[group].push(expert);
        }
    }
    group_of
}

/// Spectral clustering: the leading eigenvectors of the normalised co-activations; balanced k-means with exact
/// assignment from many starts, of which the one with most co-activations within groups is kept; then swaps that raise
/// those.
pub fn spectral(counts: &LayerCounts, groups: usize, random: &mut fastrand::Rng) -> Groups {
    let n = counts.experts;
    let scale: Vec<f64> = counts.load.iter().map(|load| load.max(1.0).sqrt()).collect();
    let normal = Array2::from_shape_fn((n, n), |(a, b)| counts.centred(a, b) / (scale[a] * scale[b]));
    let (values, vectors) = top_eigenpairs(normal, groups.min(n));
    let scale = values.mapv(|value| value.max(0.0).sqrt());
    let points = Array2::from_shape_fn((n, scale.len()), |(expert, axis)| vectors[[axis, expert]] * scale[axis]);
    let mut best: Option<(f64, Groups)> = None;
    for _ in 0..SPECTRAL_STARTS {
        let group_of = balanced_kmeans(&points, groups, random);
        let value = within(counts, &group_of);
        if best.as_ref().is_none_or(|best| value > best.0) {
            best = Some((value, group_of));
        }
    }
    let (_, mut group_of) = best.unwrap_or_default();
    while swap_within(counts, &mut group_of) {}
    group_of
}

const SPECTRAL_STARTS: usize = 16;
const KMEANS_ROUNDS: usize = 30;

fn balanced_kmeans(points: &Array2<f64>, groups: usize, random: &mut fastrand::Rng) -> Groups {
    let mut start: Vec<usize> = (0..points.nrows()).collect();
    random.shuffle(&mut start);
    let mut centres = points.select(Axis(0), &start[..groups]);
    let mut group_of = Vec::new();
    for _ in 0..KMEANS_ROUNDS {
        let distance =
            |a: &ArrayRef1<f64>, b: &ArrayRef1<f64>| a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum::<f64>();
        let nearness = |point: usize, group: usize| -distance(&points.row(point), &centres.row(group));
        let next = assign_groups(points.nrows(), groups, nearness);
        if next == group_of {
            break;
        }
        group_of = next;
        centres.fill(0.0);
        let each = (points.nrows() / groups) as f64;
        for (point, &group) in points.rows().into_iter().zip(&group_of) {
            centres.row_mut(usize::from(group)).zip_mut_with(&point, |sum, x| *sum += x / each);
        }
    }
    group_of
}

/// Co-activations within groups, beyond chance.
fn within(counts: &LayerCounts, group_of: &[u16]) -> f64 {
    let pairs = (0..counts.experts).flat_map(|a| (0..a).map(move |b| (a, b)));
    pairs.filter(|&(a, b)| group_of[a] == group_of[b]).map(|(a, b)| counts.centred(a, b)).sum()
}

/// Makes the first swap that raises co-activations within groups.
fn swap_within(counts: &LayerCounts, group_of: &mut [u16]) -> bool {
    let n = counts.experts;
    let beside = |group_of: &[u16], expert: usize, group: u16, without: usize| -> f64 {
        let others = (0..n).filter(|&other| other != expert && other != without && group_of[other] == group);
        others.map(|other| counts.centred(expert, other)).sum()
    };
    let least = 1e-9 * counts.load.iter().sum::<f64>();
    for a in 0..n {
        for b in 0..a {
            let (from, to) = (group_of[a], group_of[b]);
            if from == to {
                continue;
            }
            let gain = beside(group_of, a, to, b) + beside(group_of, b, from, a)
                - beside(group_of, a, from, b)
                - beside(group_of, b, to, a);
            if gain > least {
                group_of.swap(a, b);
                return true;
            }
        }
    }
    false
}

/// MoETuner's two programs: experts in groups of even load, then, layer by layer, an assignment of groups to devices
/// that keeps most tokens from the previous layer (`transitions`, [N, N]) where they are. The first is solved greedily
/// with swaps, the second exactly.
pub fn moetuner(counts: &[LayerCounts], transitions: &[Array2<f64>], groups: usize) -> Vec<Groups> {
    let mut layers: Vec<Groups> = Vec::with_capacity(counts.len());
    for (layer, counts) in counts.iter().enumerate() {
        let clusters = even_load(counts, groups);
        let Some(before) = layers.last() else {
            layers.push(clusters);
            continue;
        };
        let mut kept = Array2::<f64>::zeros((groups, groups));
        for ((from, to), flow) in transitions[layer - 1].indexed_iter() {
            kept[[usize::from(clusters[to]), usize::from(before[from])]] += flow;
        }
        let device = assign_groups(groups, groups, |cluster, device| kept[[cluster, device]]);
        layers.push(clusters.into_iter().map(|cluster| device[usize::from(cluster)]).collect());
    }
    layers
}

/// EPLB's assignment, improved by swaps between the most loaded group and the others.
fn even_load(counts: &LayerCounts, groups: usize) -> Groups {
    let mut group_of = eplb(counts, groups);
    loop {
        let mut load = vec![0.0; groups];
        group_of.iter().zip(&counts.load).for_each(|(&group, x)| load[usize::from(group)] += x);
        let squares = |a: usize, b: usize| -> f64 {
            let (from, to) = (load[usize::from(group_of[a])], load[usize::from(group_of[b])]);
            let moved = counts.load[a] - counts.load[b];
            moved * (from - to - moved)
        };
        let pairs = (0..counts.experts).flat_map(|a| (0..counts.experts).map(move |b| (a, b)));
        let apart = pairs.filter(|&(a, b)| group_of[a] != group_of[b]);
        let best = apart.max_by(|&(a, b), &(c, d)| squares(a, b).total_cmp(&squares(c, d)));
        match best {
            Some((a, b)) if squares(a, b) > 0.5 => group_of.swap(a, b),
            _ => return group_of,
        }
    }
}

/// ExFlow's program: experts of consecutive layers that follow each other share a device, as many as can be. Every
/// layer in turn is assigned exactly, given its neighbours, from several starts.
pub fn exflow(experts: usize, transitions: &[Array2<f64>], groups: usize, rng: &mut fastrand::Rng) -> Vec<Groups> {
    let layers = transitions.len() + 1;
    let mut best: Option<(f64, Vec<Groups>)> = None;
    for _ in 0..EXFLOW_STARTS {
        let mut placed: Vec<Groups> = (0..layers).map(|_| random(experts, groups, rng)).collect();
        let mut value = kept_between(transitions, &placed);
        loop {
            for layer in 0..layers {
                let mut gain = Array2::<f64>::zeros((experts, groups));
                if layer > 0 {
                    for ((from, to), flow) in transitions[layer - 1].indexed_iter() {
                        gain[[to, usize::from(placed[layer - 1][from])]] += flow;
                    }
                }
                if layer + 1 < layers {
                    for ((from, to), flow) in transitions[layer].indexed_iter() {
                        gain[[from, usize::from(placed[layer + 1][to])]] += flow;
                    }
                }
                placed[layer] = assign_groups(experts, groups, |expert, group| gain[[expert, group]]);
            }
            let next = kept_between(transitions, &placed);
            if next <= value * (1.0 + 1e-9) {
                break;
            }
            value = next;
        }
        if best.as_ref().is_none_or(|best| value > best.0) {
            best = Some((value, placed));
        }
    }
    best.unwrap_or_default().1
}

const EXFLOW_STARTS: usize = 8;

fn kept_between(transitions: &[Array2<f64>], placed: &[Groups]) -> f64 {
    let kept = transitions.iter().zip(placed.windows(2)).map(|(flows, pair)| {
        let together = flows.indexed_iter().filter(|((from, to), _)| pair[0][*from] == pair[1][*to]);
        together.map(|(_, flow)| flow).sum::<f64>()
    });
    kept.sum()
}

/// Experts, the hottest first.
fn by_load(counts: &LayerCounts) -> Vec<usize> {
    let mut order: Vec<usize> = (0..counts.experts).collect();
    let hotter = |&a: &usize, &b: &usize| -> Ordering { counts.load[b].total_cmp(&counts.load[a]).then(a.cmp(&b)) };
    order.sort_by(hotter);
    order
}

#[cfg(test)]
#[path = "baselines_tests.rs"]
mod tests;
