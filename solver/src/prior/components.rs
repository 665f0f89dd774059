//! The principal directions of the embeddings, computed by subspace iteration on a sample.

use ndarray::{Array1, Array2};

use super::dense::{Centred, filled, in_chunks, project, stacked};
use crate::algebra::{add, rows, rows_mut, slice};

/// Number of embeddings sampled, evenly spaced over the vocabulary.
const SAMPLE: usize = 4096;
/// Number of multiplications by the sample's covariance.
const ROUNDS: usize = 4;
/// Number of embeddings, or of embedding dimensions, per job.
const CHUNK: usize = 256;

/// Returns `count` orthonormal columns, [H, count], that approximately span the first principal components.
pub(super) fn principal(centred: &Centred<'_>, vocabulary: usize, count: usize, threads: usize) -> Array2<f32> {
    let (width, sample) = (centred.mean.len(), vocabulary.min(SAMPLE));
    let rows = filled([sample, width], CHUNK, threads, |at, to| {
        to.copy_from_slice(&centred.row(at * vocabulary / sample));
    });
    let mut random = fastrand::Rng::with_seed(1);
    let mut directions = Array2::from_shape_simple_fn((width, count), || random.f32() - 0.5);
    orthonormalise(&mut directions);
    for _ in 0..ROUNDS {
        let along = filled([sample, count], CHUNK, threads, |at, to| project(slice(rows.row(at)), &directions, to));
        directions = weighted_sums(&rows, &along, threads);
        orthonormalise(&mut directions);
    }
    directions
}

/// Computes `rows' along`, [H, count], for a range of the H dimensions at a time.
fn weighted_sums(sample: &Array2<f32>, along: &Array2<f32>, threads: usize) -> Array2<f32> {
    let parts = in_chunks(sample.ncols(), CHUNK, threads, |values| {
        let mut sums = Array2::zeros((values.len(), along.ncols()));
        for (row, along) in rows(sample).zip(rows(along)) {
            rows_mut(&mut sums).zip(&row[values.clone()]).for_each(|(sum, &value)| add(sum, value, along));
        }
        sums
    });
    stacked(&parts)
}

/// Orthonormalises the columns one by one; a linearly dependent column becomes zero.
fn orthonormalise(columns: &mut Array2<f32>) {
    let mut all: Vec<Array1<f64>> = Vec::with_capacity(columns.ncols());
    for mut to in columns.columns_mut() {
        let mut column = to.mapv(f64::from);
        let before = inner(&column, &column);
        // A second pass removes the residue of rounding.
        for _ in 0..2 {
            for other in &all {
                let along = inner(&column, other);
                column.scaled_add(-along, other);
            }
        }
        let after = inner(&column, &column);
        column *= if after > before * 1e-12 { 1.0 / after.sqrt() } else { 0.0 };
        to.assign(&column.mapv(|value| value as f32));
        all.push(column);
    }
}

/// Inner product, summed in index order.
fn inner(a: &Array1<f64>, b: &Array1<f64>) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
