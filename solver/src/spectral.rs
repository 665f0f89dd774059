//! A spectral seed: experts that the same units activate lie near each other along the first eigenvectors of their
//! co-activation.
//!
//! With `w[t,i]` the activations of column i by unit t, `l` their sums and S all tokens, columns co-activate beyond
//! chance by
//!
//! ```text
//! M[i,j] = ( sum over t of w[t,i] w[t,j] / mass[t]  -  l[i] l[j] / S ) / sqrt(l[i] l[j])
//! ```
//!
//! Column i is the point `sqrt(lambda_k) v_k[i]` of the G greatest eigenpairs. Balanced k-means divides the points:
//! every step gives each group N/G experts of every layer, exactly; of several tries the one with the least squared
//! distances is taken.

use crate::bounds::greatest_eigenpairs;
use crate::clustering::Task;
use crate::problem::Problem;
use crate::seeds::draw;
use crate::transport::{Plan, Stop, assign_evenly};
use crate::unit_step::{to_profit, unit_step};

/// Beyond these sizes there is no spectral seed: columns (the eigenvectors take their cube), and products of counts.
const MAX_COLUMNS: usize = 512;
const MAX_PRODUCTS: u64 = 1 << 28;
const TRIES: u32 = 8;
const MAX_ROUNDS: u32 = 30;

/// Whether the problem is small enough for [`spectral_plan`].
pub(crate) fn has_spectral(problem: &Problem) -> bool {
    let products = |unit| (problem.row(unit).count() as u64).pow(2);
    problem.column_load.len() <= MAX_COLUMNS && (0..problem.units()).map(products).sum::<u64>() <= MAX_PRODUCTS
}

/// The best units for experts that are divided by their co-activation alone. `None` if `stop` said so before the end.
pub(crate) fn spectral_plan(task: &Task<'_>, random: &mut fastrand::Rng, stop: Stop<'_>) -> Option<Plan> {
    let points = Points::new(task.problem, task.limits.groups);
    let mut best: Option<(f64, Vec<u16>)> = None;
    for _ in 0..TRIES {
        if stop() {
            return None;
        }
        let found = points.divide(task.problem, random, stop)?;
        if best.as_ref().is_none_or(|best| found.0 < best.0) {
            best = Some(found);
        }
    }
    unit_step(task, &best?.1, None, stop)
}

/// The columns as points, [L * N, G].
struct Points {
    groups: usize,
    coordinates: Vec<f64>,
}

impl Points {
    fn new(problem: &Problem, groups: usize) -> Self {
        let columns = problem.column_load.len();
        let pairs = greatest_eigenpairs(columns, coactivation(problem), groups);
        let mut coordinates = vec![0.0; columns * groups];
        for (axis, (value, vector)) in pairs.iter().enumerate() {
            let scale = value.max(0.0).sqrt();
            vector.iter().enumerate().for_each(|(column, x)| coordinates[column * groups + axis] = scale * x);
        }
        Points { groups, coordinates }
    }

    fn of(&self, column: usize) -> &[f64] {
        &self.coordinates[column * self.groups..(column + 1) * self.groups]
    }

    /// Balanced k-means: the sum of squared distances, and the group of each column. `None` if `stop` said so before
    /// the end.
    fn divide(&self, problem: &Problem, random: &mut fastrand::Rng, stop: Stop<'_>) -> Option<(f64, Vec<u16>)> {
        let columns = problem.column_load.len();
        let mut centres: Vec<Vec<f64>> = Vec::with_capacity(self.groups);
        for _ in 0..self.groups {
            let nearest = |column: usize| match centres.len() {
                0 => 1.0,
                _ => centres.iter().map(|centre| squared(self.of(column), centre)).fold(f64::INFINITY, f64::min),
            };
            let centre = draw(columns, nearest, random);
            centres.push(self.of(centre).to_vec());
        }
        let mut group_of = Vec::new();
        for _ in 0..MAX_ROUNDS {
            let next = self.nearest_with_room(problem, &centres, stop)?;
            if next == group_of {
                break;
            }
            group_of = next;
            centres.iter_mut().for_each(|centre| centre.fill(0.0));
            let each = (columns / self.groups) as f64;
            for (column, &group) in group_of.iter().enumerate() {
                let centre = &mut centres[usize::from(group)];
                centre.iter_mut().zip(self.of(column)).for_each(|(sum, x)| *sum += x / each);
            }
        }
        let apart = |(column, &group): (usize, &u16)| squared(self.of(column), &centres[usize::from(group)]);
        Some((group_of.iter().enumerate().map(apart).sum(), group_of))
    }

    /// N/G experts of every layer to each centre, at least squared distance.
    fn nearest_with_room(&self, problem: &Problem, centres: &[Vec<f64>], stop: Stop<'_>) -> Option<Vec<u16>> {
        let layer = |layer: usize| {
            let profit: Vec<i64> = problem
                .columns(layer)
                .flat_map(|column| centres.iter().map(move |centre| -to_profit(squared(self.of(column), centre))))
                .collect();
            Some(assign_evenly(&profit, self.groups, None, stop)?.label)
        };
        Some((0..problem.layers).map(layer).collect::<Option<Vec<_>>>()?.concat())
    }
}

fn squared(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum()
}

/// M, [L * N, L * N].
fn coactivation(problem: &Problem) -> Vec<f64> {
    let (columns, tokens) = (problem.column_load.len(), problem.total_mass() as f64);
    let mut matrix = vec![0.0; columns * columns];
    for (unit, &mass) in problem.mass.iter().enumerate() {
        let row: Vec<(usize, f64)> = problem.row(unit).map(|(column, count)| (column, f64::from(count))).collect();
        for &(i, x) in &row {
            let to = &mut matrix[i * columns..(i + 1) * columns];
            row.iter().for_each(|&(j, y)| to[j] += x * y / mass as f64);
        }
    }
    let load = |column: usize| (problem.column_load[column] as f64).max(1.0);
    for i in 0..columns {
        for j in 0..columns {
            let chance = problem.column_load[i] as f64 * problem.column_load[j] as f64 / tokens;
            matrix[i * columns + j] = (matrix[i * columns + j] - chance) / (load(i) * load(j)).sqrt();
        }
    }
    matrix
}

#[cfg(test)]
#[path = "spectral_tests.rs"]
mod tests;
