//! Seeds for the alternation: groups of units that use similar experts (k-means++ and one balanced k-means step).

use crate::input::Problem;
use crate::step::{Plan, Stop, Transport, to_profit};

/// Draws an initial balanced grouping of the units.
///
/// A unit's point is its share of activations per column minus the mean over all units. The first centre is a unit
/// drawn by mass, each further one by mass times squared distance to the nearest centre. Then the units are assigned to
/// the centres with minimum total squared distance within the capacities. Returns `None` if stopped.
pub(crate) fn seed_plan(
    problem: &Problem,
    capacity: &[u64],
    random: &mut fastrand::Rng,
    stop: Stop<'_>,
) -> Option<Plan> {
    let groups = capacity.len();
    let mut distance = vec![0.0; problem.units() * groups];
    for_each_centre(problem, groups, random, stop, |group, unit, squared, _| {
        distance[unit * groups + group] = squared
    })?;
    let profit: Vec<i64> = distance.iter().map(|squared| -to_profit(*squared)).collect();
    Transport { mass: &problem.mass, profit: &profit, capacity }.solve_until(None, stop)
}

/// Draws a centre for each group, by mass and squared distance to the nearest previous one (k-means++). Calls `see`
/// with group, unit, their squared distance and whether that centre is the unit's nearest so far. Returns `None` if
/// stopped.
pub(crate) fn for_each_centre(
    problem: &Problem,
    groups: usize,
    random: &mut fastrand::Rng,
    stop: Stop<'_>,
    mut see: impl FnMut(usize, usize, f64, bool),
) -> Option<()> {
    let total = problem.total_mass() as f64;
    // Activations per token in each column, over all units.
    let mean: Vec<f64> = problem.column_load.iter().map(|&load| load as f64 / total).collect();
    let mut nearest = vec![f64::INFINITY; problem.units()];
    for group in 0..groups {
        if stop() {
            return None;
        }
        let weight = |unit: usize| match group {
            0 => problem.mass[unit] as f64,
            _ => problem.mass[unit] as f64 * nearest[unit],
        };
        let centre = draw(problem.units(), weight, random);
        for (unit, squared) in distances_to(problem, centre, &mean).into_iter().enumerate() {
            see(group, unit, squared, squared < nearest[unit]);
            nearest[unit] = nearest[unit].min(squared);
        }
    }
    Some(())
}

/// Returns the squared distance of every unit to the unit `centre`. The centre is first shrunk towards the mean
/// according to its mass: a token seen once is weak evidence about a group.
fn distances_to(problem: &Problem, centre: usize, mean: &[f64]) -> Vec<f64> {
    let mass = problem.mass[centre] as f64;
    let trust = mass / (mass + 4.0);
    let mut point: Vec<f64> = mean.iter().map(|mean| mean * (1.0 - trust)).collect();
    for (column, count) in problem.row(centre) {
        point[column] += trust * f64::from(count) / mass;
    }
    let norm: f64 = point.iter().map(|value| value * value).sum();
    (0..problem.units())
        .map(|unit| {
            let mass = problem.mass[unit] as f64;
            let (mut own, mut product) = (0.0, 0.0);
            for (column, count) in problem.row(unit) {
                let share = f64::from(count) / mass;
                own += share * share;
                product += share * point[column];
            }
            (own - 2.0 * product + norm).max(0.0)
        })
        .collect()
}

/// Draws an index with probability proportional to its weight, or the first index if all weights are zero.
pub(crate) fn draw(len: usize, weight: impl Fn(usize) -> f64, random: &mut fastrand::Rng) -> usize {
    let total: f64 = (0..len).map(&weight).sum();
    let mut left = random.f64() * total;
    (0..len)
        .find(|&index| {
            left -= weight(index);
            left < 0.0
        })
        .unwrap_or(0)
}
