//! A prior from a model's input embeddings: a ridge regression over their principal components.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use ndarray::{Array1, Array2, ArrayView1, Axis, aview1, concatenate, s};
use semmoe_tables::{Embeddings, TokenId, in_parallel};

use super::components::principal;
use crate::algebra::{add, cholesky, rows, rows_mut, slice, slice_mut};

/// Maximum number of components retained; wider embeddings are reduced.
const MAX_COMPONENTS: usize = 128;
/// Tokens per job. Sums are computed chunk by chunk, so the results do not depend on the number of threads.
pub(super) const CHUNK: usize = 1024;

/// Feature rows [V, D]: embeddings scaled to unit length, centred, rescaled to unit length and projected onto the
/// directions of largest variance. Rows are zero where the checkpoint's embeddings are.
#[derive(Debug)]
pub(crate) struct DenseFeatures {
    rows: Array2<f32>,
    /// The factorization for the most recent weights, which layers usually share.
    factor: Mutex<Option<Arc<Factor>>>,
}

/// Cholesky factorization of the normal equations for given weights.
#[derive(Debug)]
struct Factor {
    weight: Vec<f32>,
    penalty: f64,
    /// The Cholesky factor L of `X' W X + penalty I = L L'`, [D, D].
    lower: Array2<f64>,
}

impl DenseFeatures {
    /// Builds rows from the first `vocabulary` embeddings, which must exist.
    pub(crate) fn new(embeddings: &Embeddings, vocabulary: usize, threads: usize) -> Self {
        let width = embeddings.width();
        let sums = in_chunks(vocabulary, CHUNK, threads, |tokens| {
            let (mut sum, mut row) = (Array1::<f64>::zeros(width), vec![0.0; width]);
            for token in tokens {
                read_unit(embeddings, token, &mut row);
                sum.zip_mut_with(&aview1(&row), |sum, &value| *sum += f64::from(value));
            }
            sum
        });
        let mut mean = Array1::<f64>::zeros(width);
        sums.iter().for_each(|sum| mean.zip_mut_with(sum, |mean, sum| *mean += sum / vocabulary as f64));
        let centred = Centred { embeddings, mean: mean.mapv(|value| value as f32) };
        let columns = width.min(MAX_COMPONENTS);
        let directions = (width > columns).then(|| principal(&centred, vocabulary, columns, threads));
        let rows = filled([vocabulary, columns], CHUNK, threads, |token, to| {
            let row = centred.row(token);
            match &directions {
                Some(directions) => project(&row, directions, to),
                None => to.copy_from_slice(&row),
            }
        });
        DenseFeatures { rows, factor: Mutex::new(None) }
    }

    pub(super) fn row(&self, token: usize) -> &[f32] {
        slice(self.rows.row(token))
    }

    /// Whether a token's embedding carries information.
    pub(crate) fn has(&self, token: usize) -> bool {
        self.row(token).iter().any(|&value| value != 0.0)
    }

    /// Computes the predictions of [`ridge::predict`](super::ridge::predict) for these rows by solving the normal
    /// equations directly.
    pub(crate) fn predict(&self, weight: &[f32], target: &[f32], penalty: f64, threads: usize) -> Vec<f32> {
        let targets = target.len() / weight.len().max(1);
        let factor = self.factor(weight, penalty, threads);
        let mut b = weighted_sums(weight, [self.rows.ncols(), targets], threads, |token, sum| {
            let y = &target[token * targets..(token + 1) * targets];
            for (sum, x) in rows_mut(sum).zip(self.row(token)) {
                add(sum, x * weight[token], y);
            }
        });
        factor.solve(&mut b);
        let b = b.mapv(|value| value as f32);
        filled([weight.len(), targets], CHUNK, threads, |token, to| project(self.row(token), &b, to))
            .into_iter()
            .collect()
    }

    fn factor(&self, weight: &[f32], penalty: f64, threads: usize) -> Arc<Factor> {
        let mut last = self.factor.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(factor) = last.as_ref().filter(|factor| factor.weight == weight && factor.penalty == penalty) {
            return Arc::clone(factor);
        }
        let lower = cholesky(self.normal(weight, penalty, threads));
        Arc::clone(last.insert(Arc::new(Factor { weight: weight.to_vec(), penalty, lower })))
    }

    /// Returns the lower triangle of `X' W X + penalty I`.
    fn normal(&self, weight: &[f32], penalty: f64, threads: usize) -> Array2<f64> {
        let columns = self.rows.ncols();
        let mut normal = weighted_sums(weight, [columns, columns], threads, |token, sum| {
            let x = self.row(token);
            for (at, sum) in rows_mut(sum).enumerate() {
                add(&mut sum[..=at], x[at] * weight[token], x);
            }
        });
        normal.diag_mut().iter_mut().for_each(|value| *value += penalty);
        normal
    }
}

/// Runs a job for each chunk of `size` numbers below `count`; returns the results in order.
pub(super) fn in_chunks<R: Send>(
    count: usize,
    size: usize,
    threads: usize,
    run: impl Fn(Range<usize>) -> R + Sync,
) -> Vec<R> {
    let starts: Vec<usize> = (0..count).step_by(size).collect();
    in_parallel(&starts, threads, |first| run(first..(first + size).min(count)))
}

/// Creates a zero matrix and fills its rows with `fill`, `size` rows per job.
pub(super) fn filled(
    shape: [usize; 2],
    size: usize,
    threads: usize,
    fill: impl Fn(usize, &mut [f32]) + Sync,
) -> Array2<f32> {
    let parts = in_chunks(shape[0], size, threads, |rows| {
        let mut part = Array2::zeros((rows.len(), shape[1]));
        rows.zip(part.rows_mut()).for_each(|(at, row)| fill(at, slice_mut(row)));
        part
    });
    stacked(&parts)
}

/// Stacks parts of equal width vertically.
pub(super) fn stacked(parts: &[Array2<f32>]) -> Array2<f32> {
    let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
    concatenate(Axis(0), &views).expect("at least one part, all of equal width")
}

/// Sums matrices over the tokens with nonzero weight, chunk by chunk; `add` adds a token's terms.
fn weighted_sums(
    weight: &[f32],
    shape: [usize; 2],
    threads: usize,
    add: impl Fn(usize, &mut Array2<f32>) + Sync,
) -> Array2<f64> {
    let sums = in_chunks(weight.len(), CHUNK, threads, |tokens| {
        let mut sum = Array2::zeros(shape);
        tokens.filter(|&token| weight[token] > 0.0).for_each(|token| add(token, &mut sum));
        sum
    });
    let mut all = Array2::<f64>::zeros(shape);
    sums.iter().for_each(|sum| all.zip_mut_with(sum, |all, &sum| *all += f64::from(sum)));
    all
}

impl Factor {
    /// Solves for right-hand sides [D, C], in place.
    fn solve(&self, b: &mut Array2<f64>) {
        let (size, lower) = (b.nrows(), &self.lower);
        (0..size).for_each(|at| self.settle(b, at, 0, lower.slice(s![at, ..at])));
        (0..size).rev().for_each(|at| self.settle(b, at, at + 1, lower.slice(s![at + 1.., at])));
    }

    /// Subtracts the rows starting at `first`, each times its factor, from row `at`, and divides the result by the
    /// diagonal entry.
    fn settle(&self, b: &mut Array2<f64>, at: usize, first: usize, factors: ArrayView1<'_, f64>) {
        let mut own = b.row(at).to_vec();
        for (factor, row) in factors.iter().zip(rows(b).skip(first)) {
            add(&mut own, -factor, row);
        }
        let diagonal = self.lower[[at, at]];
        b.row_mut(at).iter_mut().zip(own).for_each(|(to, own)| *to = own / diagonal);
    }
}

/// Adds the product of a row and a matrix to `to`, one matrix row at a time.
pub(super) fn project(row: &[f32], matrix: &Array2<f32>, to: &mut [f32]) {
    row.iter().zip(rows(matrix)).for_each(|(&value, matrix)| add(to, value, matrix));
}

/// Embeddings scaled to unit length, centred and rescaled to unit length.
pub(super) struct Centred<'a> {
    embeddings: &'a Embeddings,
    /// [H]
    pub(super) mean: Array1<f32>,
}

impl Centred<'_> {
    pub(super) fn row(&self, token: usize) -> Vec<f32> {
        let mut row = vec![0.0; self.mean.len()];
        if read_unit(self.embeddings, token, &mut row) {
            row.iter_mut().zip(&self.mean).for_each(|(value, mean)| *value -= mean);
            to_unit(&mut row);
        }
        row
    }
}

/// Reads an embedding and scales it to unit length; returns false and zeros if the embedding is zero.
fn read_unit(embeddings: &Embeddings, token: usize, row: &mut [f32]) -> bool {
    embeddings.read(TokenId::new(token as u32), row);
    to_unit(row)
}

fn to_unit(row: &mut [f32]) -> bool {
    let square: f64 = row.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    let by = if square > 1e-20 { 1.0 / square.sqrt() } else { 0.0 };
    row.iter_mut().for_each(|value| *value = (f64::from(*value) * by) as f32);
    by > 0.0
}
