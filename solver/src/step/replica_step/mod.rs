//! The expert step with replicas: every group of a layer holds S/G different experts, and every expert is held.
//!
//! With the units fixed, expert e gains `gain[e,c]` in every group c that holds it. The problem
//!
//! ```text
//! maximise    sum over e, c of  gain[e,c] x[e,c]
//! subject to  sum over e of x[e,c] = S/G for every group,  sum over c of x[e,c] >= 1 for every expert,  x in {0, 1}
//! ```
//!
//! is a minimum-cost flow on a bipartite graph with unit arcs and lower bounds of one at the experts, so integer
//! solutions are optimal. Without the lower bounds, every group takes its best S/G experts. Then each expert that no
//! group holds is added along the cheapest chain: it replaces an expert in some group, which replaces another expert in
//! another group, ..., until the displaced expert is one that another group still holds. The chain is a shortest path
//! in the residual graph (Bellman-Ford, no negative cycles), so after each chain the choice is optimal among those that
//! cover the experts so far.

use crate::step::held::{Exchange, Traffic};
use crate::step::load_limit::{EXPERTS_BETWEEN_LOOKS, LoadPrices, Value, excess};
use crate::step::transport::Stop;

/// Rounds of the relaxation on load prices.
const PRICE_ROUNDS: u32 = 12;
/// Maximum exchanges that repair or improve a layer.
const MAX_EXCHANGES: usize = 64;

/// One layer: its traffic, whose `own` is an expert's gain in each group, the slots per group, and the load limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplicaLayer<'a> {
    pub(crate) traffic: Traffic<'a>,
    pub(crate) slots: usize,
    pub(crate) cap: u64,
}

#[derive(Clone, Debug)]
struct Candidate {
    holders: Vec<Vec<u16>>,
    loads: Vec<u64>,
    value: Value,
}

/// Returns the best holders found for each expert: the exact optimum if it meets the load limit, and never worse than
/// `current`. Once stopped, returns the best so far.
pub(crate) fn replicate_within(
    layer: &ReplicaLayer<'_>,
    current: Option<&[Vec<u16>]>,
    stop: Stop<'_>,
) -> Vec<Vec<u16>> {
    let free = layer.candidate(best_holders(layer.traffic.own, layer.traffic.groups, layer.slots, stop));
    if free.value.excess == 0 {
        return free.holders;
    }
    let mut best = layer.relax(free, stop);
    let current = current.map(|current| layer.candidate(current.to_vec()));
    // Repairing the current choice often loses less than repairing the unconstrained one.
    for mut candidate in std::iter::once(best.clone()).chain(current) {
        for _ in 0..MAX_EXCHANGES {
            if !layer.improve(&mut candidate, stop) {
                break;
            }
        }
        if candidate.value.beats(&best.value) {
            best = candidate;
        }
    }
    best.holders
}

impl ReplicaLayer<'_> {
    fn gain_of(&self, expert: usize, group: u16) -> i64 {
        self.traffic.own[expert * self.traffic.groups + usize::from(group)]
    }

    fn candidate(&self, holders: Vec<Vec<u16>>) -> Candidate {
        let loads = self.traffic.loads(&holders);
        let pairs = holders.iter().enumerate();
        let gain = pairs.map(|(expert, held)| held.iter().map(|&group| self.gain_of(expert, group)).sum::<i64>()).sum();
        let value = Value { excess: excess(&loads, self.cap), gain };
        Candidate { holders, loads, value }
    }

    /// Runs subgradient steps on load prices, starting from the unconstrained choice. The load that an expert would add
    /// to a group is linearised at the last choice.
    fn relax(&self, free: Candidate, stop: Stop<'_>) -> Candidate {
        let groups = self.traffic.groups;
        let mut prices = LoadPrices::new(self.traffic.load, groups, self.traffic.fraction_bits);
        let (mut last, mut best) = (free.clone(), free);
        for round in 0..PRICE_ROUNDS {
            if stop() {
                break;
            }
            prices.step(round, &last.loads, self.cap);
            let mut profit = self.traffic.own.to_vec();
            for (expert, held) in last.holders.iter().enumerate() {
                for group in 0..groups as u16 {
                    let brought = self.brought(expert, held, group) as f64;
                    profit[expert * groups + usize::from(group)] -=
                        (prices.price[usize::from(group)] * brought).round() as i64;
                }
            }
            last = self.candidate(best_holders(&profit, groups, self.slots, stop));
            if last.value.beats(&best.value) {
                best = last.clone();
            }
        }
        best
    }

    /// Returns the load that an expert adds to `group` if the group joins its current holders.
    fn brought(&self, expert: usize, held: &[u16], group: u16) -> u64 {
        let mut with = held.to_vec();
        if let Err(at) = with.binary_search(&group) {
            with.insert(at, group);
        }
        let mut shares = self.traffic.shares(expert, &with);
        shares.find(|(holder, _)| *holder == usize::from(group)).map_or(0, |(_, share)| share)
    }

    /// Makes the best exchange, if any helps: one that reduces the excess or, without adding excess, gains.
    fn improve(&self, candidate: &mut Candidate, stop: Stop<'_>) -> bool {
        let experts = self.traffic.load.len();
        let mut best = candidate.value;
        let mut chosen = None;
        for a in 0..experts {
            if a.is_multiple_of(EXPERTS_BETWEEN_LOOKS) && stop() {
                return false;
            }
            for b in a + 1..experts {
                for exchange in Exchange::of_pair(&candidate.holders, a, b) {
                    let gain = candidate.value.gain + self.gained(&exchange);
                    if candidate.value.excess == 0 && gain <= best.gain {
                        continue;
                    }
                    let loads = self.traffic.loads_after(&candidate.loads, &candidate.holders, &exchange);
                    let after = Value { excess: excess(&loads, self.cap), gain };
                    if after.beats(&best) {
                        best = after;
                        chosen = Some((exchange, loads));
                    }
                }
            }
        }
        let Some((exchange, loads)) = chosen else { return false };
        let (of_a, of_b) = exchange.after(&candidate.holders);
        candidate.holders[exchange.a] = of_a;
        candidate.holders[exchange.b] = of_b;
        (candidate.loads, candidate.value) = (loads, best);
        true
    }

    fn gained(&self, exchange: &Exchange) -> i64 {
        let Exchange { a, b, from, to } = *exchange;
        let there = to.map_or(0, |to| self.gain_of(a, to) - self.gain_of(b, to));
        self.gain_of(b, from) - self.gain_of(a, from) + there
    }
}

/// Returns the exact choice without a load limit: holders of each expert, ascending, with maximum `profit` [N, G]. The
/// caller guarantees `slots * groups >= N` and `slots <= N`. Once stopped, experts without a slot take the first spare
/// ones.
pub(crate) fn best_holders(profit: &[i64], groups: usize, slots: usize, stop: Stop<'_>) -> Vec<Vec<u16>> {
    let experts = profit.len() / groups;
    let mut cover = Cover { profit, groups, held: vec![false; profit.len()], copies: vec![0; experts] };
    for group in 0..groups {
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by_key(|&expert| (std::cmp::Reverse(cover.profit_of(expert, group)), expert));
        for &expert in &order[..slots] {
            cover.held[expert * groups + group] = true;
            cover.copies[expert] += 1;
        }
    }
    let mut spare = 0;
    for expert in 0..experts {
        match cover.copies[expert] {
            0 if stop() => spare = cover.take_spare(expert, spare),
            0 => cover.bring_in(expert),
            _ => {}
        }
    }
    let rows = cover.held.chunks_exact(groups);
    rows.map(|row| (0u16..).zip(row).filter(|(_, held)| **held).map(|(group, _)| group).collect()).collect()
}

struct Cover<'a> {
    profit: &'a [i64],
    groups: usize,
    /// [N, G]
    held: Vec<bool>,
    /// [N] number of groups that hold the expert.
    copies: Vec<u32>,
}

/// Minimum losses of paths from the expert that is being added.
struct Reached {
    /// [N] minimum loss of a path that ends by displacing this expert, and the group that it is displaced from.
    expert: Vec<Option<(i64, usize)>>,
    /// [G] minimum loss of a path that takes a slot in this group, and the expert that takes the slot.
    group: Vec<Option<(i64, usize)>>,
}

impl Cover<'_> {
    fn profit_of(&self, expert: usize, group: usize) -> i64 {
        self.profit[expert * self.groups + group]
    }

    /// Assigns a slot to an expert that no group holds, at the minimum loss.
    fn bring_in(&mut self, expert: usize) {
        let reached = self.shortest_paths(expert);
        let ends = (0..self.copies.len()).filter(|&end| self.copies[end] > 1);
        // Every held expert can be displaced, and while one expert has no slot, another has at least two.
        let Some((_, mut end)) = ends.filter_map(|end| Some((reached.expert[end]?.0, end))).min() else { return };
        self.copies[end] -= 1;
        self.copies[expert] += 1;
        while end != expert {
            let (Some((_, group)), groups) = (reached.expert[end], self.groups) else { return };
            let Some((_, taker)) = reached.group[group] else { return };
            self.held[end * groups + group] = false;
            self.held[taker * groups + group] = true;
            end = taker;
        }
    }

    /// Assigns to the expert the first slot, from `spare` on, whose current expert has another slot; returns the slot
    /// after it.
    fn take_spare(&mut self, expert: usize, spare: usize) -> usize {
        let is_spare = |&at: &usize| self.held[at] && self.copies[at / self.groups] > 1;
        let Some(at) = (spare..self.held.len()).find(is_spare) else { return spare };
        self.held[at] = false;
        self.held[expert * self.groups + at % self.groups] = true;
        self.copies[at / self.groups] -= 1;
        self.copies[expert] += 1;
        at + 1
    }

    /// Runs Bellman-Ford over experts and groups.
    fn shortest_paths(&self, from: usize) -> Reached {
        let experts = self.copies.len();
        let mut reached = Reached { expert: vec![None; experts], group: vec![None; self.groups] };
        let mut waiting = vec![from];
        while !waiting.is_empty() {
            let mut improved = vec![false; self.groups];
            for expert in std::mem::take(&mut waiting) {
                let so_far = if expert == from { 0 } else { reached.expert[expert].map_or(0, |(loss, _)| loss) };
                for group in (0..self.groups).filter(|&group| !self.held[expert * self.groups + group]) {
                    let loss = so_far - self.profit_of(expert, group);
                    if reached.group[group].is_none_or(|(known, _)| loss < known) {
                        reached.group[group] = Some((loss, expert));
                        improved[group] = true;
                    }
                }
            }
            for group in (0..self.groups).filter(|&group| improved[group]) {
                let Some((so_far, _)) = reached.group[group] else { continue };
                for expert in (0..experts).filter(|&expert| self.held[expert * self.groups + group]) {
                    let loss = so_far + self.profit_of(expert, group);
                    if reached.expert[expert].is_none_or(|(known, _)| loss < known) {
                        reached.expert[expert] = Some((loss, group));
                        waiting.push(expert);
                    }
                }
            }
            waiting.sort_unstable();
            waiting.dedup();
        }
        reached
    }
}

#[cfg(test)]
mod tests;
