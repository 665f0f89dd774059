//! Assigns experts to groups within a limit on the load that each group attracts.
//!
//! The assignment without the limit is exact. If it violates the limit, prices on load (a Lagrangian relaxation with
//! subgradient steps) produce a series of exact assignments. The best one within the limit is chosen or, if there is
//! none, the closest one is repaired by swaps. Finally, swaps that gain within the limit are made. Groups always have
//! the right number of experts, as only exact assignments and swaps are used. Both keep gating groups together where
//! required.

use crate::step::gating::assign_gated;
use crate::step::topology::Topology;
use crate::step::transport::{Stop, assign_evenly};

/// Rounds of the relaxation; further rounds rarely change the result.
const PRICE_ROUNDS: u32 = 24;

/// One in this many rounds also redistributes gating groups over cells, which is slow.
const ROUNDS_PER_DEALING: u32 = 6;

/// Number of experts whose swaps are compared between two polls of `stop`.
pub(crate) const EXPERTS_BETWEEN_LOOKS: usize = 16;

/// One layer: `gain` [N, G] fixed-point activations kept local, `load` [N] activations, `cap` per group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer<'a> {
    pub(crate) gain: &'a [i64],
    pub(crate) load: &'a [u64],
    pub(crate) groups: usize,
    pub(crate) topology: Topology,
    pub(crate) fraction_bits: u32,
    pub(crate) cap: u64,
}

/// Value of an assignment: the smaller excess over the cap wins, then the larger gain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Value {
    pub(crate) excess: u64,
    pub(crate) gain: i64,
}

impl Value {
    pub(crate) fn beats(&self, other: &Value) -> bool {
        (other.excess, self.gain) > (self.excess, other.gain)
    }
}

#[derive(Clone, Debug)]
struct Candidate {
    group_of: Vec<u16>,
    value: Value,
}

/// Returns the best assignment found for the layer, at least as good as `current`, or `None` if stopped.
pub(crate) fn assign_within(layer: &Layer<'_>, current: Option<&[u16]>, stop: Stop<'_>) -> Option<Vec<u16>> {
    let free = layer.candidate(layer.assign(&vec![0; layer.groups], None, stop)?);
    if free.value.excess == 0 {
        return Some(free.group_of);
    }
    let mut best = layer.relax(free, stop)?;
    while layer.improve_by_swap(&mut best, stop)? {}
    match current.map(|current| layer.candidate(current.to_vec())) {
        Some(current) if !best.value.beats(&current.value) => Some(current.group_of),
        _ => Some(best.group_of),
    }
}

/// Returns the load that each group attracts.
pub(crate) fn group_loads(group_of: &[u16], load: &[u64], groups: usize) -> Vec<u64> {
    let mut loads = vec![0; groups];
    for (&group, &load) in group_of.iter().zip(load) {
        loads[usize::from(group)] += load;
    }
    loads
}

/// Prices of load in fixed point, raised where groups exceed their cap (a subgradient step).
pub(crate) struct LoadPrices {
    pub(crate) price: Vec<f64>,
    mean: f64,
    one_activation: f64,
}

impl LoadPrices {
    pub(crate) fn new(load: &[u64], groups: usize, fraction_bits: u32) -> Self {
        let mean = (load.iter().sum::<u64>() as f64 / groups as f64).max(1.0);
        LoadPrices { price: vec![0.0; groups], mean, one_activation: (1u64 << fraction_bits) as f64 }
    }

    pub(crate) fn step(&mut self, round: u32, loads: &[u64], cap: u64) {
        let step = self.one_activation / f64::from(1 + round);
        for (price, &load) in self.price.iter_mut().zip(loads) {
            *price = (*price + step * (load as f64 - cap as f64) / self.mean).max(0.0);
        }
    }
}

impl Layer<'_> {
    /// Computes the exact balanced assignment with a price per activation on each group. With `dealt`, gating groups
    /// stay in their cells.
    fn assign(&self, price: &[i64], dealt: Option<&[u16]>, stop: Stop<'_>) -> Option<Vec<u16>> {
        let experts = self.load.len();
        let profit: Vec<i64> = (0..experts)
            .flat_map(|expert| (0..self.groups).map(move |group| (expert, group)))
            .map(|(expert, group)| self.gain_of(expert, group) - price[group] * self.load[expert] as i64)
            .collect();
        if self.topology.gating_groups > 1 {
            return assign_gated(&profit, self.groups, &self.topology, dealt, stop);
        }
        Some(assign_evenly(&profit, self.groups, None, stop)?.label)
    }

    fn gain_of(&self, expert: usize, group: usize) -> i64 {
        self.gain[expert * self.groups + group]
    }

    fn candidate(&self, group_of: Vec<u16>) -> Candidate {
        let excess = excess(&group_loads(&group_of, self.load, self.groups), self.cap);
        let gain = group_of.iter().enumerate().map(|(expert, &group)| self.gain_of(expert, usize::from(group))).sum();
        Candidate { group_of, value: Value { excess, gain } }
    }

    /// Runs subgradient steps on load prices, starting from the unconstrained assignment.
    fn relax(&self, free: Candidate, stop: Stop<'_>) -> Option<Candidate> {
        let mut prices = LoadPrices::new(self.load, self.groups, self.fraction_bits);
        let mut last = free.group_of.clone();
        let mut best = free;
        for round in 0..PRICE_ROUNDS {
            prices.step(round, &group_loads(&last, self.load, self.groups), self.cap);
            let rounded: Vec<i64> = prices.price.iter().map(|price| price.round() as i64).collect();
            let dealt = (!round.is_multiple_of(ROUNDS_PER_DEALING)).then_some(&last[..]);
            let candidate = self.candidate(self.assign(&rounded, dealt, stop)?);
            last.clone_from(&candidate.group_of);
            if candidate.value.beats(&best.value) {
                best = candidate;
            }
        }
        Some(best)
    }

    /// Makes the best swap, if any helps: one that reduces the excess or, without adding excess, gains.
    fn improve_by_swap(&self, candidate: &mut Candidate, stop: Stop<'_>) -> Option<bool> {
        let loads = group_loads(&candidate.group_of, self.load, self.groups);
        let mut best = candidate.value;
        let mut swap = None;
        for a in 0..self.load.len() {
            if a.is_multiple_of(EXPERTS_BETWEEN_LOOKS) && stop() {
                return None;
            }
            for b in a + 1..self.load.len() {
                let (from, to) = (usize::from(candidate.group_of[a]), usize::from(candidate.group_of[b]));
                if from == to || !self.topology.exchangeable(from, to) {
                    continue;
                }
                let after = self.after_swap(candidate, &loads, a, b);
                if after.beats(&best) {
                    best = after;
                    swap = Some((a, b));
                }
            }
        }
        let Some((a, b)) = swap else { return Some(false) };
        candidate.group_of.swap(a, b);
        candidate.value = best;
        Some(true)
    }

    fn after_swap(&self, candidate: &Candidate, loads: &[u64], a: usize, b: usize) -> Value {
        let Candidate { group_of, value: before } = candidate;
        let (from, to) = (usize::from(group_of[a]), usize::from(group_of[b]));
        let over = |load: u64| load.saturating_sub(self.cap);
        let (moved_a, moved_b) = (self.load[a], self.load[b]);
        let excess = before.excess - over(loads[from]) - over(loads[to])
            + over(loads[from] - moved_a + moved_b)
            + over(loads[to] - moved_b + moved_a);
        let gain =
            before.gain - self.gain_of(a, from) - self.gain_of(b, to) + self.gain_of(a, to) + self.gain_of(b, from);
        Value { excess, gain }
    }
}

/// Returns the activations of a layer above the cap.
pub(crate) fn excess(loads: &[u64], cap: u64) -> u64 {
    loads.iter().map(|load| load.saturating_sub(cap)).sum()
}
