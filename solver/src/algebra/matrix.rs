//! Operations on dense symmetric matrices [n, n] that ndarray lacks, including the projection that removes layer means.

use ndarray::{Array1, Array2, Axis, s};

use crate::algebra::rows::{dot, rows, rows_mut, slice};

/// Copies the lower triangle into the upper one.
pub(crate) fn mirror(matrix: &mut Array2<f64>) {
    for row in 0..matrix.nrows() {
        for column in 0..row {
            matrix[[column, row]] = matrix[[row, column]];
        }
    }
}

/// Returns `P M P - push * J`, where J projects onto the vectors that are constant within each block of `block` columns
/// and P = 1 - J. If `push` is at least the norm of M, the lowest `n / block` eigenvalues belong to J, and all others
/// are the eigenvalues on the complement.
pub(crate) fn centred(matrix: &Array2<f64>, block: usize, push: f64) -> Array2<f64> {
    let mut out = matrix.clone();
    for part in rows_mut(&mut out).flat_map(|row| row.chunks_exact_mut(block)) {
        let mean = part.iter().sum::<f64>() / block as f64;
        part.iter_mut().for_each(|value| *value -= mean);
    }
    for (at, mut rows) in out.axis_chunks_iter_mut(Axis(0), block).enumerate() {
        let mut mean = Array1::zeros(matrix.ncols());
        rows.rows().into_iter().for_each(|row| mean.scaled_add(1.0 / block as f64, &row));
        rows -= &mean;
        let mut diagonal = rows.slice_mut(s![.., at * block..(at + 1) * block]);
        diagonal -= push / block as f64;
    }
    mirror(&mut out);
    out
}

/// `M x`.
pub(crate) fn times(matrix: &Array2<f64>, x: &[f64]) -> Vec<f64> {
    rows(matrix).map(|row| dot(row, x)).collect()
}

/// Frobenius norm.
pub(crate) fn norm(matrix: &Array2<f64>) -> f64 {
    let all = matrix.flatten();
    dot(slice(all.view()), slice(all.view())).sqrt()
}

/// Returns the Cholesky factor L of a positive definite matrix, given its lower triangle.
pub(crate) fn cholesky(mut matrix: Array2<f64>) -> Array2<f64> {
    for at in 0..matrix.nrows() {
        for to in at..matrix.nrows() {
            let (own, pivot) = (slice(matrix.row(to)), slice(matrix.row(at)));
            let left = own[at] - own[..at].iter().zip(pivot).map(|(a, b)| a * b).sum::<f64>();
            // The ridge penalty keeps the diagonal positive except for rounding errors.
            matrix[[to, at]] = if to == at { left.max(1e-12).sqrt() } else { left / matrix[[at, at]] };
        }
    }
    matrix
}
