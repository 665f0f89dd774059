//! Swap search: pairs of experts of a layer change groups where that helps with the units' prices held.
//!
//! The alternation stops where neither half can improve alone. A swap is judged with both: the units may follow the
//! experts. With prices p the value of a placement is `sum over t of max over c (local[t,c] - mass[t] p[c])` plus a
//! constant (the dual of the unit step), and a swap changes only the units that use one of the two experts. It is an
//! upper bound on what the swap gains, so that the caller solves the unit step again and keeps the better of both.

use crate::expert_step::load_cap;
use crate::load_limit::group_loads;
use crate::problem::Problem;
use crate::unit_step::PROFIT_ONE;

/// Least gain, as a fraction of all activations, that makes a swap worth it.
const LEAST_GAIN: f64 = 1e-7;

struct Search<'a> {
    problem: &'a Problem,
    groups: usize,
    group_of: Vec<u16>,
    /// [U, G] local activations less the price of the unit's mass.
    value: Vec<f64>,
    /// [U] the greatest of each row of `value`.
    best: Vec<f64>,
}

/// One pass over all pairs of experts of every layer: returns the placement after all swaps that gain under `price`
/// (fixed point, per token) and keep each group within `max_over_mean` of the layer's mean load, or not worse than it
/// was. `None` if there is no such swap.
pub(crate) fn swap_pass(
    problem: &Problem,
    group_of: &[u16],
    price: &[i64],
    max_over_mean: f64,
    stop: &dyn Fn() -> bool,
) -> Option<Vec<u16>> {
    let mut search = Search::new(problem, group_of, price);
    let least = LEAST_GAIN * problem.total_activations() as f64;
    let mut swapped = false;
    for layer in 0..problem.layers {
        if stop() {
            break;
        }
        let first = layer * problem.experts;
        let load = &problem.column_load[first..first + problem.experts];
        let cap = load_cap(load.iter().sum(), search.groups, max_over_mean);
        let mut loads = group_loads(&search.group_of[first..first + problem.experts], load, search.groups);
        for a in 0..problem.experts {
            for b in a + 1..problem.experts {
                let (from, to) = (search.group(first + a), search.group(first + b));
                if from == to || !keeps_cap((loads[from], loads[to]), (load[a], load[b]), cap) {
                    continue;
                }
                if search.gain(first + a, first + b) > least {
                    search.swap(first + a, first + b);
                    loads[from] = loads[from] - load[a] + load[b];
                    loads[to] = loads[to] - load[b] + load[a];
                    swapped = true;
                }
            }
        }
    }
    swapped.then_some(search.group_of)
}

/// Whether two groups that exchange experts of these loads stay within the cap, or come no further above it.
pub(crate) fn keeps_cap((from, to): (u64, u64), (a, b): (u64, u64), cap: u64) -> bool {
    let after = (from - a + b).max(to - b + a);
    after <= cap || after <= from.max(to)
}

impl<'a> Search<'a> {
    fn new(problem: &'a Problem, group_of: &[u16], price: &[i64]) -> Self {
        let groups = price.len();
        let local = problem.local_counts(group_of, groups);
        let mut value = Vec::with_capacity(local.len());
        for (row, &mass) in local.chunks_exact(groups).zip(&problem.mass) {
            let after_price = |(&count, &price): (&u64, &i64)| count as f64 - mass as f64 * (price as f64 / PROFIT_ONE);
            value.extend(row.iter().zip(price).map(after_price));
        }
        let best = value.chunks_exact(groups).map(greatest).collect();
        Search { problem, groups, group_of: group_of.to_vec(), value, best }
    }

    fn group(&self, column: usize) -> usize {
        usize::from(self.group_of[column])
    }

    fn row(&self, unit: usize) -> &[f64] {
        &self.value[unit * self.groups..(unit + 1) * self.groups]
    }

    /// What exchanging the groups of two columns gains if every unit then takes its best group.
    fn gain(&self, a: usize, b: usize) -> f64 {
        let (from, to) = (self.group(a), self.group(b));
        let mut gain = 0.0;
        self.for_each_changed(a, b, |unit, moved| {
            let row = self.row(unit);
            let mut best = f64::NEG_INFINITY;
            for (group, &value) in row.iter().enumerate() {
                let change = f64::from(i8::from(group == to) - i8::from(group == from));
                best = best.max(value + change * moved);
            }
            gain += best - self.best[unit];
        });
        gain
    }

    fn swap(&mut self, a: usize, b: usize) {
        let (from, to) = (self.group(a), self.group(b));
        let mut changed = Vec::new();
        self.for_each_changed(a, b, |unit, moved| changed.push((unit, moved)));
        for (unit, moved) in changed {
            self.value[unit * self.groups + from] -= moved;
            self.value[unit * self.groups + to] += moved;
            self.best[unit] = greatest(self.row(unit));
        }
        self.group_of.swap(a, b);
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
