//! The unit step: given the experts' groups, the exact balanced assignment of tokens or requests to groups.

use crate::input::Problem;
use crate::step::clustering::Task;
use crate::step::topology::Topology;
use crate::step::transport::{Plan, Stop, Transport};

/// Profits per token are fixed-point numbers with this many fractional bits.
const PROFIT_BITS: u32 = 32;

/// One unit of a fixed-point profit.
pub(crate) const PROFIT_ONE: f64 = (1u64 << PROFIT_BITS) as f64;

/// Returns the profits of the units, [U, G]: the local activations per token, in fixed point.
pub(crate) fn profits_of_local(problem: &Problem, local: &[u64], groups: usize) -> Vec<i64> {
    profits_by(problem, local, groups, |&count| count as f64)
}

fn profits_by<T>(problem: &Problem, worth: &[T], groups: usize, value: impl Fn(&T) -> f64 + Copy) -> Vec<i64> {
    let rows = worth.chunks_exact(groups).zip(&problem.mass);
    rows.flat_map(|(row, &mass)| row.iter().map(move |worth| to_profit(value(worth) / mass as f64))).collect()
}

/// Returns the profits of the units, [U, G], given the group of each column. Activations on other groups may also have
/// a value.
pub(crate) fn weighed_profits(problem: &Problem, group_of: &[u16], groups: usize, topology: Topology) -> Vec<i64> {
    let local = problem.local_counts(group_of, groups);
    if !topology.has_nodes() {
        return profits_of_local(problem, &local, groups);
    }
    profits_by(problem, &topology.worth(&local, groups), groups, |worth| *worth)
}

/// Limit on profits, above any realistic number of layers times experts per token; keeps sums along a path within 64
/// bits.
const GREATEST_PROFIT: f64 = (1u64 << 55) as f64;

/// Converts activations per token to a profit.
pub(crate) fn to_profit(activations_per_token: f64) -> i64 {
    (activations_per_token * PROFIT_ONE).round().clamp(-GREATEST_PROFIT, GREATEST_PROFIT) as i64
}

/// Subtracts the price of a sequence on each group from the profits [U, G], spread over a unit's tokens.
pub(crate) fn charge_sequences(problem: &Problem, profit: &mut [i64], price: &[i64]) {
    if price.is_empty() {
        return;
    }
    for (row, &mass) in profit.chunks_exact_mut(price.len()).zip(&problem.mass) {
        row.iter_mut().zip(price).for_each(|(profit, price)| *profit -= price / mass as i64);
    }
}

/// Returns the maximum tokens per group: (1 + margin) times the mean, but at least enough to make the problem solvable.
pub(crate) fn mass_capacity(total_mass: u64, groups: usize, margin: f64) -> Vec<u64> {
    let mean = total_mass as f64 / groups as f64;
    let most = ((1.0 + margin) * mean).floor() as u64;
    vec![most.max(total_mass.div_ceil(groups as u64)); groups]
}

/// Runs the unit step. `start`: the last prices, which only make it faster. Returns `None` if stopped.
pub(crate) fn unit_step(task: &Task<'_>, group_of: &[u16], start: Option<&[i64]>, stop: Stop<'_>) -> Option<Plan> {
    let Task { problem, capacity, limits, .. } = *task;
    let mut profit = weighed_profits(problem, group_of, limits.groups, limits.topology);
    charge_sequences(problem, &mut profit, &task.sequences.price);
    Transport { mass: &problem.mass, profit: &profit, capacity }.solve_until(start, stop)
}
