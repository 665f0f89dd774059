//! The expert step: given the units' groups, the exact balanced assignment of each layer's experts to groups.
//!
//! With the units fixed, the layers are independent: an expert gains its activations by the units in its group, and
//! every group has N/G experts. This is a transportation problem with unit masses. A limit on the activations that a
//! group may attract couples the experts of a layer; module `load_limit` handles it.

use crate::input::Problem;
use crate::step::clustering::Limits;
use crate::step::load_limit::{Layer, assign_within};
use crate::step::placement::CurrentPlacement;
use crate::step::transport::{Plan, Stop};

/// Gains stay within 2^56; the remaining bits resolve split units.
const GAIN_BITS: u32 = 56;
const MAX_FRACTION_BITS: u32 = 16;

/// Returns the activations of each column by the group of their unit, [L * N, G], in fixed point, and the number of
/// fractional bits. Split units count by share.
pub(crate) fn column_gains(problem: &Problem, plan: &Plan, groups: usize) -> (Vec<i64>, u32) {
    let used = u64::BITS - problem.total_activations().leading_zeros();
    let fraction_bits = GAIN_BITS.saturating_sub(used).min(MAX_FRACTION_BITS);
    let mut gains = vec![0i64; problem.column_load.len() * groups];
    let mut splits = plan.splits.iter().peekable();
    for unit in 0..problem.units() {
        let split = splits.next_if(|split| split.unit == unit);
        for (column, count) in problem.row(unit) {
            let whole = i64::from(count) << fraction_bits;
            let row = &mut gains[column * groups..(column + 1) * groups];
            match split {
                None => row[usize::from(plan.label[unit])] += whole,
                Some(split) => split.spread(whole, problem.mass[unit], row),
            }
        }
    }
    (gains, fraction_bits)
}

/// Returns the maximum activations that a group may attract in a layer: `max_over_mean` times the mean.
pub(crate) fn load_cap(layer_load: u64, groups: usize, max_over_mean: f64) -> u64 {
    (layer_load as f64 * max_over_mean / groups as f64).floor() as u64
}

/// Returns the lowest possible load of the hottest expert's group, which is reached with the coldest other experts.
pub(crate) fn load_floor(load: &[u64], groups: usize) -> u64 {
    let mut sorted = load.to_vec();
    sorted.sort_unstable();
    let hottest = sorted.pop().unwrap_or(0);
    hottest + sorted.iter().take((load.len() / groups).saturating_sub(1)).sum::<u64>()
}

/// Returns the maximum load of a group in a layer without replicas: [`load_cap`] or, if higher, the minimum over all
/// placements. That minimum makes the hottest expert's group as light as possible; other groups may have the same load.
pub(crate) fn layer_cap(load: &[u64], groups: usize, max_over_mean: f64) -> u64 {
    load_cap(load.iter().sum(), groups, max_over_mean).max(load_floor(load, groups))
}

/// Runs the expert step: returns the best group of every column for `plan` under the load limit. If the limit cannot be
/// met, a layer comes as close as the search gets. Keeps `current` in layers where nothing better is found. With
/// `placement`, moving an expert reduces its gain by the cost of the move. Returns `None` if stopped.
pub(crate) fn expert_step(
    problem: &Problem,
    plan: &Plan,
    limits: &Limits,
    placement: Option<&CurrentPlacement>,
    current: Option<&[u16]>,
    stop: Stop<'_>,
) -> Option<Vec<u16>> {
    let Limits { groups, max_over_mean, topology, .. } = *limits;
    let (mut gains, fraction_bits) = column_gains(problem, plan, groups);
    topology.weigh(&mut gains);
    let mut group_of = Vec::with_capacity(problem.column_load.len());
    for (layer, gain) in gains.chunks_exact_mut(problem.experts * groups).enumerate() {
        if let Some(placement) = placement {
            placement.charge(layer, gain, groups, fraction_bits);
        }
        let (columns, load) = (problem.columns(layer), problem.load(layer));
        let cap = layer_cap(load, groups, max_over_mean);
        let layer = Layer { gain, load, groups, topology, fraction_bits, cap };
        group_of.extend(assign_within(&layer, current.map(|current| &current[columns]), stop)?);
    }
    Some(group_of)
}

#[cfg(test)]
mod tests;
