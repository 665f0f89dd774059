//! Matrix rows as slices, and sums over them in a fixed order, so that results are bit-identical on every machine.

use std::ops::{AddAssign, Mul};
use std::slice::{ChunksExact, ChunksExactMut};

use ndarray::{Array2, ArrayView1, ArrayViewMut1};

const CONTIGUOUS: &str = "matrix rows are contiguous";

/// A row as a slice.
pub(crate) fn slice<T>(row: ArrayView1<'_, T>) -> &[T] {
    row.to_slice().expect(CONTIGUOUS)
}

/// A row as a mutable slice.
pub(crate) fn slice_mut<T>(row: ArrayViewMut1<'_, T>) -> &mut [T] {
    row.into_slice().expect(CONTIGUOUS)
}

/// The rows of a matrix as slices.
pub(crate) fn rows<T>(matrix: &Array2<T>) -> ChunksExact<'_, T> {
    matrix.as_slice().expect(CONTIGUOUS).chunks_exact(matrix.ncols())
}

/// The rows of a matrix as mutable slices.
pub(crate) fn rows_mut<T>(matrix: &mut Array2<T>) -> ChunksExactMut<'_, T> {
    let columns = matrix.ncols();
    matrix.as_slice_mut().expect(CONTIGUOUS).chunks_exact_mut(columns)
}

/// `to += factor * from`.
pub(crate) fn add<T: Copy + AddAssign + Mul<Output = T>>(to: &mut [T], factor: T, from: &[T]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * *from);
}

/// Inner product, accumulated in eight partial sums in a fixed order.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a8.remainder().iter().zip(b8.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a8.zip(b8) {
        for at in 0..8 {
            sums[at] += a[at] * b[at];
        }
    }
    sums.iter().sum::<f64>() + rest
}
