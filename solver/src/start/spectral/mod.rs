//! A spectral seed: experts activated by the same units are close together along the first eigenvectors of their
//! co-activation matrix.
//!
//! Let `w[t,i]` be the activations of column i by unit t, `l` their sums over units and S the total tokens. The
//! co-activation of columns beyond chance is
//!
//! ```text
//! M[i,j] = ( sum over t of w[t,i] w[t,j] / mass[t]  -  l[i] l[j] / S ) / sqrt(l[i] l[j])
//! ```
//!
//! Column i is the point with coordinates `sqrt(lambda_k) v_k[i]` for the G largest eigenpairs. Balanced k-means
//! divides the points: every step assigns exactly N/G experts of every layer to each group. Of several tries, the one
//! with the smallest sum of squared distances is kept.

use ndarray::{Array2, ArrayView1};

use crate::algebra::{slice, top_eigenpairs};
use crate::input::Problem;
use crate::start::seeds::draw;
use crate::step::{Plan, Stop, Task, assign_evenly, to_profit, unit_step};

/// Size limits of the spectral seed: columns (eigenvectors take cubic time), and products of counts.
const MAX_COLUMNS: usize = 512;
const MAX_PRODUCTS: u64 = 1 << 28;
const TRIES: u32 = 8;
const MAX_ROUNDS: u32 = 30;

/// Whether the problem is small enough for [`spectral_plan`].
pub(crate) fn has_spectral(problem: &Problem) -> bool {
    let products = |unit| (problem.row(unit).count() as u64).pow(2);
    problem.column_load.len() <= MAX_COLUMNS && (0..problem.units()).map(products).sum::<u64>() <= MAX_PRODUCTS
}

/// Returns the best unit plan for experts that are divided only by co-activation, or `None` if stopped.
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
struct Points(Array2<f64>);

impl Points {
    fn new(problem: &Problem, groups: usize) -> Self {
        let (values, vectors) = top_eigenpairs(coactivation(problem), groups);
        let scale = values.mapv(|value| value.max(0.0).sqrt());
        Points(Array2::from_shape_fn((vectors.ncols(), groups), |(column, axis)| scale[axis] * vectors[[axis, column]]))
    }

    /// Runs balanced k-means; returns the sum of squared distances and the group of each column, or `None` if stopped.
    fn divide(&self, problem: &Problem, random: &mut fastrand::Rng, stop: Stop<'_>) -> Option<(f64, Vec<u16>)> {
        let Points(points) = self;
        let (columns, groups) = points.dim();
        let mut centres = Array2::zeros((groups, groups));
        for drawn in 0..groups {
            let before = || centres.rows().into_iter().take(drawn);
            let nearest = |column: usize| match drawn {
                0 => 1.0,
                _ => before().map(|centre| squared(points.row(column), centre)).fold(f64::INFINITY, f64::min),
            };
            let centre = draw(columns, nearest, random);
            centres.row_mut(drawn).assign(&points.row(centre));
        }
        let mut group_of = Vec::new();
        for _ in 0..MAX_ROUNDS {
            let next = self.nearest_with_room(problem, &centres, stop)?;
            if next == group_of {
                break;
            }
            group_of = next;
            centres.fill(0.0);
            let each = (columns / groups) as f64;
            for (point, &group) in points.rows().into_iter().zip(&group_of) {
                centres.row_mut(usize::from(group)).zip_mut_with(&point, |sum, x| *sum += x / each);
            }
        }
        let apart = |(point, &group): (ArrayView1<'_, f64>, &u16)| squared(point, centres.row(usize::from(group)));
        Some((points.rows().into_iter().zip(&group_of).map(apart).sum(), group_of))
    }

    /// Assigns N/G experts of every layer to each centre, with minimum squared distance.
    fn nearest_with_room(&self, problem: &Problem, centres: &Array2<f64>, stop: Stop<'_>) -> Option<Vec<u16>> {
        let Points(points) = self;
        let layer = |layer: usize| {
            let pairs =
                problem.columns(layer).flat_map(|column| centres.rows().into_iter().map(move |row| (column, row)));
            let profit: Vec<i64> =
                pairs.map(|(column, centre)| -to_profit(squared(points.row(column), centre))).collect();
            Some(assign_evenly(&profit, centres.nrows(), None, stop)?.label)
        };
        Some((0..problem.layers).map(layer).collect::<Option<Vec<_>>>()?.concat())
    }
}

fn squared(a: ArrayView1<'_, f64>, b: ArrayView1<'_, f64>) -> f64 {
    slice(a).iter().zip(slice(b)).map(|(x, y)| (x - y) * (x - y)).sum()
}

/// Returns the matrix M, [L * N, L * N].
fn coactivation(problem: &Problem) -> Array2<f64> {
    let (columns, tokens) = (problem.column_load.len(), problem.total_mass() as f64);
    let mut matrix = Array2::<f64>::zeros((columns, columns));
    for (unit, &mass) in problem.mass.iter().enumerate() {
        let row: Vec<(usize, f64)> = problem.row(unit).map(|(column, count)| (column, f64::from(count))).collect();
        for &(i, x) in &row {
            let mut to = matrix.row_mut(i);
            row.iter().for_each(|&(j, y)| to[j] += x * y / mass as f64);
        }
    }
    let load = |column: usize| (problem.column_load[column] as f64).max(1.0);
    for ((i, j), value) in matrix.indexed_iter_mut() {
        let chance = problem.column_load[i] as f64 * problem.column_load[j] as f64 / tokens;
        *value = (*value - chance) / (load(i) * load(j)).sqrt();
    }
    matrix
}

#[cfg(test)]
mod tests;
