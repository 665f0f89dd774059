//! The expert step of a layer: repeatedly swaps the two experts that save the most remote ranks, until no swap saves
//! any.
//!
//! With the units fixed, a set of experts with W occurrences, w[c] of them by units of group c, costs `W - w[c]` for
//! every group c that it touches. Moving expert a from group A to group B saves `W - w[A]` if a is the set's only
//! expert in A, and costs `W - w[B]` if the set has none in B. Swapping a and b makes both moves, but changes nothing
//! for sets that contain both. So two sums over sets determine the change of every swap: the single moves, [N, G], and,
//! for every pair, the moves within sets that contain both, [N, N]. After a swap, only the sets with exactly one of the
//! two experts are recounted.

use super::routes::LayerRoutes;
use crate::step::{Loaded, Plan, exchange, group_loads, keeps_cap};

/// Maximum swaps per step, as a multiple of the number of experts in the layer.
const MAX_SWAPS: usize = 8;
/// Weights stay within 2^56; the remaining bits resolve split units.
const WEIGHT_BITS: u32 = 56;
const MAX_FRACTION_BITS: u32 = 16;

/// Returns the occurrences of each set by the group of their unit, [S, G], in fixed point; split units count by share.
pub(super) fn weights(routes: &LayerRoutes, mass: &[u64], plan: &Plan, groups: usize) -> Vec<i64> {
    let used = u64::BITS - routes.occurrences().leading_zeros();
    let fraction_bits = WEIGHT_BITS.saturating_sub(used).min(MAX_FRACTION_BITS);
    let mut weight = vec![0i64; routes.sets() * groups];
    for (set, row) in weight.chunks_exact_mut(groups).enumerate() {
        for &(unit, count) in routes.uses(set) {
            let (unit, whole) = (unit as usize, i64::from(count) << fraction_bits);
            match plan.splits.binary_search_by_key(&unit, |split| split.unit) {
                Err(_) => row[usize::from(plan.label[unit])] += whole,
                Ok(split) => plan.splits[split].spread(whole, mass[unit], row),
            }
        }
    }
    weight
}

/// A layer's placement with the savings of every single move.
pub(super) struct Search<'a> {
    routes: &'a LayerRoutes,
    groups: usize,
    group_of: Vec<u16>,
    /// [S, G]
    weight: Vec<i64>,
    /// Sets that contain each expert.
    containing: Vec<Vec<u32>>,
    /// [N, G] savings from moving an expert to a group.
    moved: Vec<i64>,
    /// [N, N], symmetric: the part of both moves' savings from sets that contain both experts.
    within: Vec<i64>,
    /// [G] number of experts of the current set in each group.
    held: Vec<u16>,
}

impl<'a> Search<'a> {
    pub(super) fn new(routes: &'a LayerRoutes, weight: Vec<i64>, groups: usize, group_of: &[u16]) -> Self {
        let experts = group_of.len();
        let mut containing = vec![Vec::new(); experts];
        for set in 0..routes.sets() {
            routes.set(set).iter().for_each(|&expert| containing[usize::from(expert)].push(set as u32));
        }
        let mut search = Search {
            routes,
            groups,
            group_of: group_of.to_vec(),
            weight,
            containing,
            moved: vec![0; experts * groups],
            within: vec![0; experts * experts],
            held: vec![0; groups],
        };
        (0..routes.sets()).for_each(|set| search.count(set, 1));
        search
    }

    /// Swaps experts until nothing is saved. Keeps groups within `cap` activations, or at most as far above it as
    /// before.
    pub(super) fn run(mut self, load: &[u64], cap: u64) -> Vec<u16> {
        let mut loads = group_loads(&self.group_of, load, self.groups);
        for _ in 0..MAX_SWAPS * self.group_of.len() {
            let Some((a, b)) = self.best_swap(load, &loads, cap) else { break };
            exchange(&mut loads, self.loaded(a, load), self.loaded(b, load));
            self.swap(a, b);
        }
        self.group_of
    }

    /// Returns the swap that saves the most, the first one on ties.
    fn best_swap(&self, load: &[u64], loads: &[u64], cap: u64) -> Option<(usize, usize)> {
        let mut best = None;
        let mut most = 0;
        for a in 0..self.group_of.len() {
            for b in a + 1..self.group_of.len() {
                let (of_a, of_b) = (self.loaded(a, load), self.loaded(b, load));
                if of_a.group == of_b.group || self.saves(a, b) <= most {
                    continue;
                }
                if keeps_cap(loads, of_a, of_b, cap) {
                    (best, most) = (Some((a, b)), self.saves(a, b));
                }
            }
        }
        best
    }

    fn group(&self, expert: usize) -> usize {
        usize::from(self.group_of[expert])
    }

    fn loaded(&self, expert: usize, load: &[u64]) -> Loaded {
        Loaded { group: self.group(expert), load: load[expert] }
    }

    /// Returns the number of remote ranks saved by swapping two experts of different groups.
    pub(super) fn saves(&self, a: usize, b: usize) -> i64 {
        let (experts, groups) = (self.group_of.len(), self.groups);
        self.moved[a * groups + self.group(b)] + self.moved[b * groups + self.group(a)] - self.within[a * experts + b]
    }

    pub(super) fn swap(&mut self, a: usize, b: usize) {
        let mut touched = [&self.containing[a][..], &self.containing[b][..]].concat();
        touched.sort_unstable();
        touched.dedup();
        touched.iter().for_each(|&set| self.count(set as usize, -1));
        self.group_of.swap(a, b);
        touched.iter().for_each(|&set| self.count(set as usize, 1));
    }

    /// Adds a set to the sums (sign 1), or removes it (sign -1).
    fn count(&mut self, set: usize, sign: i64) {
        let (groups, experts) = (self.groups, self.group_of.len());
        let members = self.routes.set(set);
        let weight = &self.weight[set * groups..(set + 1) * groups];
        let total: i64 = weight.iter().sum();
        self.held.fill(0);
        members.iter().for_each(|&expert| self.held[usize::from(self.group_of[usize::from(expert)])] += 1);
        for (at, &a) in members.iter().enumerate() {
            let a = usize::from(a);
            let from = usize::from(self.group_of[a]);
            let saved = if self.held[from] == 1 { total - weight[from] } else { 0 };
            for to in (0..groups).filter(|&to| to != from) {
                let paid = if self.held[to] == 0 { total - weight[to] } else { 0 };
                self.moved[a * groups + to] += sign * (saved - paid);
            }
            for &b in &members[at + 1..] {
                let b = usize::from(b);
                let to = usize::from(self.group_of[b]);
                if to != from {
                    let both = saved + if self.held[to] == 1 { total - weight[to] } else { 0 };
                    self.within[a * experts + b] += sign * both;
                    self.within[b * experts + a] += sign * both;
                }
            }
        }
    }
}
