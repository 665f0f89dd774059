//! Swap search: two experts of a layer exchange groups if that gains at fixed unit prices.
//!
//! The alternation stops when neither step can improve the result by itself. A swap is evaluated with both: the units
//! may follow the experts. With prices p, the value of a placement is `sum over t of max over c (local[t,c] - mass[t]
//! p[c])` plus a constant (the dual of the unit step), and a swap affects only the units that use one of the two
//! experts. The change in this value is an upper bound on the swap's gain, so the caller solves the unit step again and
//! keeps the better result.

use crate::input::Problem;
use crate::step::clustering::Task;
use crate::step::expert_step::layer_cap;
use crate::step::held::Exchange;
use crate::step::load_limit::group_loads;
use crate::step::placement::CurrentPlacement;
use crate::step::topology::Topology;
use crate::step::transport::Stop;
use crate::step::unit_step::PROFIT_ONE;

/// Minimum gain of a swap, as a fraction of all activations.
pub(crate) const MIN_GAIN: f64 = 1e-7;

pub(crate) struct Search<'a> {
    problem: &'a Problem,
    groups: usize,
    group_of: Vec<u16>,
    placement: Option<&'a CurrentPlacement>,
    topology: Topology,
    /// [U, G] local activations (with nodes, their value) minus the price of the unit's mass.
    value: Vec<f64>,
    /// [U] the maximum of each row of `value`.
    best: Vec<f64>,
}

/// Maximum values that a pass over all pairs may compare. Beyond it, pairs are preselected by an estimate.
const MAX_VALUES_COMPARED: u64 = 1 << 29;

/// Number of pairs preselected by estimate, per expert of a layer.
const PAIRS_PER_EXPERT: usize = 2;

/// Makes one pass over the pairs of experts of every layer. Returns the placement after all swaps that gain under
/// `price` (fixed point, per token) and keep each group within `max_over_mean` times the layer's mean load, or no
/// further above it than before. Returns `None` if there is no such swap. With a current placement, the cost of moves
/// is deducted.
///
/// In large problems, only the pairs with the largest estimates are tried. The estimate adds up the gains of moving
/// each expert by itself to the other's group, which is exact except for the units that use both.
pub(crate) fn swap_pass(task: &Task<'_>, group_of: &[u16], price: &[i64], stop: Stop<'_>) -> Option<Vec<u16>> {
    let values = (task.problem.entries() * task.problem.experts * price.len()) as u64;
    passed(task, group_of, price, values > MAX_VALUES_COMPARED, stop)
}

/// Runs the pass over all pairs, or over those preselected by the estimate.
pub(crate) fn passed(
    task: &Task<'_>,
    group_of: &[u16],
    price: &[i64],
    by_estimate: bool,
    stop: Stop<'_>,
) -> Option<Vec<u16>> {
    let Task { problem, limits, .. } = task;
    let mut search = Search::new(task, group_of, price);
    let mut swapped = false;
    for layer in 0..problem.layers {
        let pairs = if by_estimate { search.likely_pairs(layer, stop) } else { all_pairs(problem.experts) };
        if stop() {
            break;
        }
        let (first, load) = (layer * problem.experts, problem.load(layer));
        let cap = layer_cap(load, search.groups, limits.max_over_mean);
        let mut loads = group_loads(&search.group_of[problem.columns(layer)], load, search.groups);
        let least = MIN_GAIN * problem.total_activations() as f64;
        for (a, b) in pairs {
            let [of_a, of_b] = [a, b].map(|expert| Loaded { group: search.group(first + expert), load: load[expert] });
            if !search.apart(first + a, first + b) || !keeps_cap(&loads, of_a, of_b, cap) {
                continue;
            }
            if search.gain(first + a, first + b) - search.cost(first + a, first + b) > least {
                search.swap(first + a, first + b);
                exchange(&mut loads, of_a, of_b);
                swapped = true;
            }
        }
        if limits.topology.gating_groups > 1 {
            swapped |= search.swap_gating_groups(first, load, cap, least, stop);
        }
    }
    swapped.then_some(search.group_of)
}

fn all_pairs(experts: usize) -> Vec<(usize, usize)> {
    (0..experts).flat_map(|a| (a + 1..experts).map(move |b| (a, b))).collect()
}

/// The group of an expert, and its activations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loaded {
    pub(crate) group: usize,
    pub(crate) load: u64,
}

/// Updates the loads for two experts that exchange groups.
pub(crate) fn exchange(loads: &mut [u64], a: Loaded, b: Loaded) {
    loads[a.group] = loads[a.group] - a.load + b.load;
    loads[b.group] = loads[b.group] - b.load + a.load;
}

/// Whether the groups of two exchanged experts stay within the cap, or exceed it by no more than before.
pub(crate) fn keeps_cap(loads: &[u64], a: Loaded, b: Loaded, cap: u64) -> bool {
    let (from, to) = (loads[a.group], loads[b.group]);
    let after = (from - a.load + b.load).max(to - b.load + a.load);
    after <= cap || after <= from.max(to)
}

impl<'a> Search<'a> {
    fn new(task: &Task<'a>, group_of: &[u16], price: &[i64]) -> Self {
        let Task { problem, limits, placement, .. } = *task;
        let local = problem.local_counts(group_of, price.len());
        let mut search = Search::of_local(problem, &local, price, limits.topology);
        if !task.sequences.price.is_empty() {
            for (row, best) in search.value.chunks_exact_mut(price.len()).zip(&mut search.best) {
                row.iter_mut()
                    .zip(&task.sequences.price)
                    .for_each(|(value, &price)| *value -= price as f64 / PROFIT_ONE);
                *best = greatest(row);
            }
        }
        Search { group_of: group_of.to_vec(), placement, ..search }
    }

    /// Creates a search from local activations [U, G], for a caller that tracks the groups of the columns itself.
    pub(crate) fn of_local(problem: &'a Problem, local: &[u64], price: &[i64], topology: Topology) -> Self {
        let groups = price.len();
        let worth = topology.worth(local, groups);
        let mut value = Vec::with_capacity(worth.len());
        for (row, &mass) in worth.chunks_exact(groups).zip(&problem.mass) {
            let after_price = |(worth, &price): (&f64, &i64)| worth - mass as f64 * (price as f64 / PROFIT_ONE);
            value.extend(row.iter().zip(price).map(after_price));
        }
        let best = value.chunks_exact(groups).map(greatest).collect();
        Search { problem, groups, group_of: Vec::new(), placement: None, topology, value, best }
    }

    fn group(&self, column: usize) -> usize {
        usize::from(self.group_of[column])
    }

    /// Whether two columns are in different groups that may exchange experts.
    fn apart(&self, a: usize, b: usize) -> bool {
        let (from, to) = (self.group(a), self.group(b));
        from != to && self.topology.exchangeable(from, to)
    }

    fn row(&self, unit: usize) -> &[f64] {
        &self.value[unit * self.groups..(unit + 1) * self.groups]
    }

    /// Returns pairs of a layer's experts in different groups with a positive estimated gain, largest first, a few per
    /// expert.
    fn likely_pairs(&self, layer: usize, stop: Stop<'_>) -> Vec<(usize, usize)> {
        let experts = self.problem.experts;
        let first = layer * experts;
        let mut alone = Vec::with_capacity(experts * self.groups);
        for column in self.problem.columns(layer) {
            if stop() {
                return Vec::new();
            }
            alone.extend(self.gains_alone(column));
        }
        let estimate = |a: usize, b: usize| {
            let gains = alone[a * self.groups + self.group(first + b)] + alone[b * self.groups + self.group(first + a)];
            gains - self.cost(first + a, first + b)
        };
        let apart = all_pairs(experts).into_iter().filter(|&(a, b)| self.apart(first + a, first + b));
        let mut pairs: Vec<_> = apart.map(|(a, b)| (estimate(a, b), a, b)).filter(|pair| pair.0 > 0.0).collect();
        pairs.sort_by(|x, y| y.0.total_cmp(&x.0).then((x.1, x.2).cmp(&(y.1, y.2))));
        pairs.truncate(PAIRS_PER_EXPERT * experts);
        pairs.into_iter().map(|(_, a, b)| (a, b)).collect()
    }

    /// Returns the gain of moving one column to each group, ignoring capacity, [G].
    fn gains_alone(&self, column: usize) -> Vec<f64> {
        let from = self.group(column);
        let mut gains = vec![0.0; self.groups];
        for &(unit, count) in self.problem.column(column) {
            let (row, best) = (self.row(unit as usize), self.best[unit as usize]);
            let mut without = row[from] - f64::from(count);
            for (group, &value) in row.iter().enumerate() {
                if group != from {
                    without = without.max(value);
                }
            }
            for (gain, &value) in gains.iter_mut().zip(row) {
                *gain += without.max(value + f64::from(count)) - best;
            }
        }
        gains[from] = 0.0;
        gains
    }

    /// Returns the migration cost of two columns exchanging their groups.
    fn cost(&self, a: usize, b: usize) -> f64 {
        let (from, to) = (self.group(a), self.group(b));
        self.placement.map_or(0.0, |placement| placement.change(a, from, to) + placement.change(b, to, from))
    }

    /// Exchanges entire gating groups, where that gains, in the layer that begins at column `first`: their experts,
    /// ordered by group, take each other's groups.
    fn swap_gating_groups(&mut self, first: usize, load: &[u64], cap: u64, least: f64, stop: Stop<'_>) -> bool {
        let gating_groups = self.topology.gating_groups;
        let each = load.len() / gating_groups;
        let most = |search: &Self| {
            let loads = group_loads(&search.group_of[first..first + load.len()], load, search.groups);
            loads.into_iter().max().unwrap_or(0)
        };
        let mut swapped = false;
        for (p, q) in all_pairs(gating_groups) {
            let (p, q) = (first + p * each, first + q * each);
            if self.topology.cell(self.group(p)) == self.topology.cell(self.group(q)) || stop() {
                continue;
            }
            let in_order = |start: usize| {
                let mut columns: Vec<usize> = (start..start + each).collect();
                columns.sort_by_key(|&column| (self.group(column), column));
                columns
            };
            let pairs: Vec<(usize, usize)> = in_order(p).into_iter().zip(in_order(q)).collect();
            let (before, mut gain) = (most(self), 0.0);
            for &(a, b) in &pairs {
                gain += self.gain(a, b) - self.cost(a, b);
                self.swap(a, b);
            }
            if gain > least && most(self) <= cap.max(before) {
                swapped = true;
            } else {
                pairs.iter().rev().for_each(|&(a, b)| self.swap(a, b));
            }
        }
        swapped
    }

    /// Returns the gain of exchanging the groups of two columns if every unit then moves to its best group.
    fn gain(&self, a: usize, b: usize) -> f64 {
        self.gain_of(&self.swapped(a, b))
    }

    /// Builds the exchange of two columns' groups.
    fn swapped(&self, a: usize, b: usize) -> Exchange {
        Exchange { a, b, from: self.group_of[a], to: Some(self.group_of[b]) }
    }

    /// Returns the gain of an exchange of columns.
    pub(crate) fn gain_of(&self, exchange: &Exchange) -> f64 {
        let changes = self.changes(exchange);
        let mut gain = 0.0;
        self.for_each_changed(exchange.a, exchange.b, |unit, moved| {
            let row = self.row(unit).iter().zip(&changes);
            let best = row.map(|(value, change)| value + change * moved).fold(f64::NEG_INFINITY, f64::max);
            gain += best - self.best[unit];
        });
        gain
    }

    /// Returns the change in each group's value, [G], from an activation that moves from group `from` to group `to`.
    fn changes(&self, &Exchange { from, to, .. }: &Exchange) -> Vec<f64> {
        let value = |of: usize, on: u16| self.topology.value(of, usize::from(on));
        (0..self.groups).map(|of| to.map_or(0.0, |to| value(of, to)) - value(of, from)).collect()
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.exchange(&self.swapped(a, b));
        self.group_of.swap(a, b);
    }

    /// Applies an exchange of columns, except to the groups, which the caller tracks.
    pub(crate) fn exchange(&mut self, exchange: &Exchange) {
        let mut changed = Vec::new();
        self.for_each_changed(exchange.a, exchange.b, |unit, moved| changed.push((unit, moved)));
        let changes = self.changes(exchange);
        for (unit, moved) in changed {
            let row = self.value[unit * self.groups..(unit + 1) * self.groups].iter_mut();
            row.zip(&changes).for_each(|(value, change)| *value += change * moved);
            self.best[unit] = greatest(self.row(unit));
        }
    }

    /// Calls `change(unit, count of a - count of b)` for every unit in which the two differ.
    fn for_each_changed(&self, a: usize, b: usize, mut change: impl FnMut(usize, f64)) {
        let (mut left, mut right) = (self.problem.column(a), self.problem.column(b));
        loop {
            let (unit, moved) = match (left.first(), right.first()) {
                (Some(&(u, x)), Some(&(v, y))) if u == v => {
                    (left, right) = (&left[1..], &right[1..]);
                    (u, f64::from(x) - f64::from(y))
                }
                (Some(&(u, x)), other) if other.is_none_or(|&(v, _)| u < v) => {
                    left = &left[1..];
                    (u, f64::from(x))
                }
                (_, Some(&(v, y))) => {
                    right = &right[1..];
                    (v, -f64::from(y))
                }
                _ => return,
            };
            if moved != 0.0 {
                change(unit as usize, moved);
            }
        }
    }
}

fn greatest(row: &[f64]) -> f64 {
    row.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}
