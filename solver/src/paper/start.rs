//! Line 44 of Algorithm 1, "cluster based on expert affinity": k-means over the units' activation shares, weighted by
//! tokens, with k-means++ seeds. The clusters may be uneven, as the paper does not require balance here.

use crate::input::Problem;
use crate::start::for_each_centre;

/// Maximum rounds of Lloyd's iteration; further rounds hardly change the clusters.
const MAX_ROUNDS: usize = 20;

/// Returns the initial group of every unit.
pub(super) fn cluster_units(problem: &Problem, groups: usize, random: &mut fastrand::Rng) -> Vec<u16> {
    let mut label = seed(problem, groups, random);
    for _ in 0..MAX_ROUNDS {
        let next = nearest_centre(problem, &label, groups);
        if next == label {
            break;
        }
        label = next;
    }
    label
}

/// Assigns each unit to the nearest of `groups` seed units, which are drawn far apart.
fn seed(problem: &Problem, groups: usize, random: &mut fastrand::Rng) -> Vec<u16> {
    let mut label = vec![0; problem.units()];
    for_each_centre(problem, groups, random, &|| false, |group, unit, _, nearest| {
        if nearest {
            label[unit] = group as u16;
        }
    });
    label
}

/// Runs one round: each centre is the mean share vector of its units, and an empty group attracts no unit.
fn nearest_centre(problem: &Problem, label: &[u16], groups: usize) -> Vec<u16> {
    let columns = problem.column_load.len();
    let mut centre = vec![0.0; columns * groups];
    let mut mass = vec![0u64; groups];
    for (unit, &group) in label.iter().enumerate() {
        mass[usize::from(group)] += problem.mass[unit];
        for (column, count) in problem.row(unit) {
            centre[column * groups + usize::from(group)] += f64::from(count);
        }
    }
    let mut squared = vec![0.0; groups];
    for sums in centre.chunks_exact_mut(groups) {
        for ((value, &mass), squared) in sums.iter_mut().zip(&mass).zip(&mut squared) {
            *value /= mass.max(1) as f64;
            *squared += *value * *value;
        }
    }
    let nearest = |unit: usize| {
        let mut product = vec![0.0; groups];
        for (column, count) in problem.row(unit) {
            let share = f64::from(count) / problem.mass[unit] as f64;
            let centres = &centre[column * groups..(column + 1) * groups];
            product.iter_mut().zip(centres).for_each(|(product, value)| *product += share * value);
        }
        let distance = |group: &usize| squared[*group] - 2.0 * product[*group];
        let held = (0..groups).filter(|&group| mass[group] > 0);
        held.min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0) as u16
    };
    (0..problem.units()).map(nearest).collect()
}
