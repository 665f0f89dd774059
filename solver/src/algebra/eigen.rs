//! Eigenvalues and eigenvectors of dense symmetric matrices, with a rigorous error bound on the eigenvalues.
//!
//! Householder tridiagonalisation, then QL with implicit shifts (EISPACK's tred2 and tql2), with eigenvectors stored as
//! rows so that every inner loop is contiguous. Callers need not trust the solver's accuracy: [`Eigen::error`] bounds
//! the error afterwards.

use ndarray::{Array1, Array2, Axis, s};

use crate::algebra::matrix::norm;
use crate::algebra::rows::{add, dot, rows, slice, slice_mut};

/// Maximum QL sweeps per eigenvalue; about two are typical. Stopping early costs only accuracy, which [`Eigen::error`]
/// reports.
const MAX_SWEEPS: u32 = 64;

/// The unit roundoff of f64.
pub(crate) const UNIT_ROUNDOFF: f64 = f64::EPSILON / 2.0;

/// Returns the `count` largest eigenvalues of a symmetric matrix [n, n] in descending order, and their unit
/// eigenvectors, [count, n]. `count` must be at most n.
pub fn top_eigenpairs(matrix: Array2<f64>, count: usize) -> (Array1<f64>, Array2<f64>) {
    let Eigen { values, vectors } = Eigen::new(matrix);
    (values.slice_move(s![..count]), vectors.slice_move(s![..count, ..]))
}

/// Eigenpairs in descending order of eigenvalue.
#[derive(Debug)]
pub(crate) struct Eigen {
    /// [n]
    pub(crate) values: Array1<f64>,
    /// [n, n]; row i is the eigenvector of value i.
    pub(crate) vectors: Array2<f64>,
}

impl Eigen {
    pub(crate) fn new(matrix: Array2<f64>) -> Self {
        let mut work = Tridiagonal::new(matrix);
        for low in 0..work.diagonal.len() {
            work.settle(low);
        }
        work.sorted()
    }

    /// Returns a bound on the distance between each eigenvalue of `matrix` and the computed eigenvalue of the same
    /// rank.
    ///
    /// Let Q be the computed vectors and D the computed values. By Ostrowski's theorem, the eigenvalues of `Q^T D Q`
    /// are those of D times factors within `|Q Q^T - 1|` of 1; by Weyl's inequality, those of `matrix` differ from them
    /// by at most `|matrix - Q^T D Q|`. Both norms are computed (Frobenius) and padded for rounding errors. The bound
    /// is NaN or infinite if the values are.
    pub(crate) fn error(&self, matrix: &Array2<f64>) -> f64 {
        let n = matrix.nrows() as f64;
        let largest = self.values.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
        let (mut residual, mut defect) = (0.0, 0.0);
        for (at, own) in rows(&self.vectors).enumerate() {
            let mut rest = matrix.row(at).to_vec();
            for (value, vector) in self.values.iter().zip(rows(&self.vectors)) {
                add(&mut rest, -value * vector[at], vector);
            }
            residual += dot(&rest, &rest);
            for other in rows(&self.vectors).take(at) {
                defect += 2.0 * dot(own, other).powi(2);
            }
            defect += (dot(own, own) - 1.0).powi(2);
        }
        // By Cauchy-Schwarz, the n + 1 terms of each entry sum to at most (1 + defect) * largest (or 1) in magnitude.
        let rounding = 2.0 * (n + 8.0) * n * UNIT_ROUNDOFF;
        let defect = defect.sqrt() * (1.0 + rounding) + 2.0 * rounding;
        let residual = residual.sqrt() * (1.0 + rounding) + (largest * (1.0 + defect) + norm(matrix)) * rounding;
        residual + defect * largest
    }
}

/// A tridiagonal matrix: its diagonal, its subdiagonal (`off[i]` couples i and i + 1) and the rows that become
/// eigenvectors.
struct Tridiagonal {
    diagonal: Vec<f64>,
    off: Vec<f64>,
    rows: Array2<f64>,
    /// Used by `settle`: the total shift subtracted from the diagonal, and the largest magnitude so far.
    shift: f64,
    size: f64,
}

impl Tridiagonal {
    fn new(mut a: Array2<f64>) -> Self {
        let n = a.nrows();
        let mut off = vec![0.0; n];
        let mut factors = vec![0.0; n];
        for step in 0..n.saturating_sub(1) {
            let (mut above, mut below) = a.view_mut().split_at(Axis(0), step + 1);
            let reflector = &mut slice_mut(above.row_mut(step))[step + 1..];
            (off[step], factors[step]) = reflect(reflector);
            if factors[step] == 0.0 {
                continue;
            }
            let rows = below.rows().into_iter().map(|row| &slice(row)[step + 1..]);
            let mut product: Vec<f64> = rows.map(|row| factors[step] * dot(row, reflector)).collect();
            let half = -0.5 * factors[step] * dot(&product, reflector);
            add(&mut product, half, reflector);
            for (at, row) in below.rows_mut().into_iter().enumerate() {
                let (left, right) = (reflector[at], product[at]);
                let pairs = product.iter().zip(reflector.iter());
                slice_mut(row)[step + 1..].iter_mut().zip(pairs).for_each(|(x, (p, r))| *x -= left * p + right * r);
            }
        }
        let diagonal = a.diag().to_vec();
        Tridiagonal { diagonal, off, rows: accumulate(&a, &factors), shift: 0.0, size: 0.0 }
    }

    /// Sweeps until `off[low]` is negligible.
    fn settle(&mut self, low: usize) {
        self.size = self.size.max(self.diagonal[low].abs() + self.off[low].abs());
        let negligible = f64::EPSILON * self.size;
        let high = (low..self.off.len()).find(|&at| self.off[at].abs() <= negligible);
        let Some(high) = high.filter(|&high| high > low) else {
            self.diagonal[low] += self.shift;
            return;
        };
        for _ in 0..MAX_SWEEPS {
            self.sweep(low, high);
            if self.off[low].abs() <= negligible {
                break;
            }
        }
        self.diagonal[low] += self.shift;
        self.off[low] = 0.0;
    }

    fn sweep(&mut self, low: usize, high: usize) {
        let (d, e, n) = (&mut self.diagonal, &mut self.off, self.rows.ncols());
        // Index arithmetic instead of row views: there are millions of row pairs, and creating the views costs as much
        // as a rotation.
        let all = self.rows.as_slice_mut().expect("an owned matrix is contiguous");
        let before = d[low];
        let half = (d[low + 1] - before) / (2.0 * e[low]);
        let root = half.hypot(1.0).copysign(half);
        d[low] = e[low] / (half + root);
        d[low + 1] = e[low] * (half + root);
        let (next, shift) = (d[low + 1], before - d[low]);
        d[low + 2..].iter_mut().for_each(|value| *value -= shift);
        self.shift += shift;
        let next_off = e[low + 1];
        let (mut p, mut c, mut c2, mut c3, mut s, mut s2) = (d[high], 1.0, 1.0, 1.0, 0.0, 0.0);
        for at in (low..high).rev() {
            (c3, c2, s2) = (c2, c, s);
            let (g, h) = (c * e[at], c * p);
            let r = f64::hypot(p, e[at]);
            e[at + 1] = s * r;
            (s, c) = if r > 0.0 { (e[at] / r, p / r) } else { (0.0, 1.0) };
            p = c * d[at] - s * g;
            d[at + 1] = h + s * (c * g + s * d[at]);
            let (first, second) = all[at * n..(at + 2) * n].split_at_mut(n);
            for (x, y) in first.iter_mut().zip(second) {
                (*x, *y) = (c * *x - s * *y, s * *x + c * *y);
            }
        }
        p = -s * s2 * c3 * next_off * e[low] / next;
        e[low] = s * p;
        d[low] = c * p;
    }

    fn sorted(self) -> Eigen {
        let mut order: Vec<usize> = (0..self.diagonal.len()).collect();
        order.sort_by(|&a, &b| self.diagonal[b].total_cmp(&self.diagonal[a]));
        let values = order.iter().map(|&at| self.diagonal[at]).collect();
        Eigen { values, vectors: self.rows.select(Axis(0), &order) }
    }
}

/// Replaces `x` with the vector v of the reflection `1 - factor * v v^T` that maps `x` to `(length, 0, ...)`; returns
/// `length` and `factor`.
fn reflect(x: &mut [f64]) -> (f64, f64) {
    let tail = dot(&x[1..], &x[1..]);
    if tail == 0.0 {
        return (x[0], 0.0);
    }
    let length = -(x[0] * x[0] + tail).sqrt().copysign(x[0]);
    x[0] -= length;
    (length, 2.0 / (x[0] * x[0] + tail))
}

/// Returns the transposed product of the reflections: row i is coordinate i of the tridiagonal form in the original
/// basis.
fn accumulate(a: &Array2<f64>, factors: &[f64]) -> Array2<f64> {
    let mut rows = Array2::eye(a.nrows());
    for (step, &factor) in factors.iter().enumerate().rev().filter(|&(_, &factor)| factor != 0.0) {
        let reflector = &slice(a.row(step))[step + 1..];
        for row in rows.rows_mut().into_iter().skip(step + 1) {
            let row = &mut slice_mut(row)[step + 1..];
            let along = dot(row, reflector);
            add(row, -factor * along, reflector);
        }
    }
    rows
}
