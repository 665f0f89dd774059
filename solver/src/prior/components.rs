//! The directions in which embeddings differ most, by subspace iteration on a sample.

use super::dense::{Centred, in_chunks, project};

/// Embeddings looked at, evenly spaced over the vocabulary.
const SAMPLE: usize = 4096;
/// Multiplications with the sample's covariance.
const ROUNDS: usize = 4;
/// Embeddings, or values of them, of a job.
const CHUNK: usize = 256;

/// `count` orthonormal columns, [H, count], that span about the first principal components.
pub(super) fn principal(centred: &Centred<'_>, vocabulary: usize, count: usize, threads: usize) -> Vec<f32> {
    let (width, sample) = (centred.mean.len(), vocabulary.min(SAMPLE));
    let rows = in_chunks(sample, CHUNK, threads, |chunk| {
        let mut rows = vec![0.0; chunk.len() * width];
        chunk.zip(rows.chunks_exact_mut(width)).for_each(|(at, row)| centred.read(at * vocabulary / sample, row));
        rows
    })
    .concat();
    let mut random = fastrand::Rng::with_seed(1);
    let mut directions: Vec<f32> = (0..width * count).map(|_| random.f32() - 0.5).collect();
    orthonormalise(&mut directions, count);
    for _ in 0..ROUNDS {
        let along = in_chunks(sample, CHUNK, threads, |chunk| {
            let mut along = Vec::with_capacity(CHUNK * count);
            let rows = rows[chunk.start * width..chunk.end * width].chunks_exact(width);
            rows.for_each(|row| project(row, &directions, count, &mut along));
            along
        })
        .concat();
        directions = weighted_sums(&rows, &along, width, count, threads);
        orthonormalise(&mut directions, count);
    }
    directions
}

/// `rows' along`, [H, count], a range of the H values at a time.
fn weighted_sums(rows: &[f32], along: &[f32], width: usize, count: usize, threads: usize) -> Vec<f32> {
    in_chunks(width, CHUNK, threads, |values| {
        let mut sums = vec![0.0f32; values.len() * count];
        for (row, along) in rows.chunks_exact(width).zip(along.chunks_exact(count)) {
            for (sum, value) in sums.chunks_exact_mut(count).zip(&row[values.clone()]) {
                sum.iter_mut().zip(along).for_each(|(sum, along)| *sum += value * along);
            }
        }
        sums
    })
    .concat()
}

/// Makes the columns of [H, count] orthonormal, one after the other; what is left of a dependent one is zero.
fn orthonormalise(columns: &mut [f32], count: usize) {
    let mut all: Vec<Vec<f64>> = Vec::with_capacity(count);
    for at in 0..count {
        let mut column: Vec<f64> = columns.iter().skip(at).step_by(count).map(|&value| f64::from(value)).collect();
        let before = square(&column);
        // Twice is enough for what rounding leaves.
        for _ in 0..2 {
            for other in &all {
                let along: f64 = column.iter().zip(other).map(|(a, b)| a * b).sum();
                column.iter_mut().zip(other).for_each(|(value, other)| *value -= along * other);
            }
        }
        let after = square(&column);
        let by = if after > before * 1e-12 { 1.0 / after.sqrt() } else { 0.0 };
        column.iter_mut().for_each(|value| *value *= by);
        for (to, value) in columns.iter_mut().skip(at).step_by(count).zip(&column) {
            *to = *value as f32;
        }
        all.push(column);
    }
}

fn square(column: &[f64]) -> f64 {
    column.iter().map(|value| value * value).sum()
}
