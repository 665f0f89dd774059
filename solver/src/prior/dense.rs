//! A prior from a model's input embeddings: a ridge regression over their principal components.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use semmoe_tables::{Embeddings, TokenId, in_parallel};

use super::components::principal;

/// Components that are kept of wider embeddings.
const MAX_COMPONENTS: usize = 128;
/// Tokens of a job. Sums are made chunk by chunk, so that the number of threads changes nothing.
pub(super) const CHUNK: usize = 1024;

/// Rows [V, D]: embeddings of unit length, their mean taken away, of unit length again, in the directions in which they
/// differ most. Zero where the checkpoint has zeros.
#[derive(Debug)]
pub(crate) struct DenseFeatures {
    rows: Vec<f32>,
    columns: usize,
    /// Of the last weights: layers have the same, as a rule.
    factor: Mutex<Option<Arc<Factor>>>,
}

/// The normal equations of some weights, factored.
#[derive(Debug)]
struct Factor {
    weight: Vec<f32>,
    penalty: f64,
    /// L of `X' W X + penalty I = L L'`, [D, D].
    lower: Vec<f64>,
}

impl DenseFeatures {
    /// Of the first `vocabulary` embeddings, all there.
    pub(crate) fn new(embeddings: &Embeddings, vocabulary: usize, threads: usize) -> Self {
        let width = embeddings.width();
        let sums = in_chunks(vocabulary, CHUNK, threads, |tokens| {
            let (mut sum, mut row) = (vec![0.0f64; width], vec![0.0; width]);
            for token in tokens {
                read_unit(embeddings, token, &mut row);
                sum.iter_mut().zip(&row).for_each(|(sum, &value)| *sum += f64::from(value));
            }
            sum
        });
        let mut mean = vec![0.0f64; width];
        sums.iter().for_each(|sum| mean.iter_mut().zip(sum).for_each(|(mean, sum)| *mean += sum / vocabulary as f64));
        let mean: Vec<f32> = mean.into_iter().map(|value| value as f32).collect();
        let centred = Centred { embeddings, mean: &mean };
        let columns = width.min(MAX_COMPONENTS);
        let directions = (width > columns).then(|| principal(&centred, vocabulary, columns, threads));
        let rows = in_chunks(vocabulary, CHUNK, threads, |tokens| {
            let (mut rows, mut row) = (Vec::with_capacity(CHUNK * columns), vec![0.0; width]);
            for token in tokens {
                centred.read(token, &mut row);
                match &directions {
                    Some(directions) => project(&row, directions, columns, &mut rows),
                    None => rows.extend_from_slice(&row),
                }
            }
            rows
        });
        DenseFeatures { rows: rows.concat(), columns, factor: Mutex::new(None) }
    }

    pub(super) fn row(&self, token: usize) -> &[f32] {
        &self.rows[token * self.columns..(token + 1) * self.columns]
    }

    /// Whether a token's embedding says anything.
    pub(crate) fn has(&self, token: usize) -> bool {
        self.row(token).iter().any(|&value| value != 0.0)
    }

    /// The predictions of [`ridge::predict`](super::ridge::predict) with these rows, from the normal equations
    /// themselves.
    pub(crate) fn predict(&self, weight: &[f32], target: &[f32], penalty: f64, threads: usize) -> Vec<f32> {
        let targets = target.len() / weight.len().max(1);
        let factor = self.factor(weight, penalty, threads);
        let mut b = weighted_sums(weight, self.columns * targets, threads, |token, sum| {
            let y = &target[token * targets..(token + 1) * targets];
            for (sum, x) in sum.chunks_exact_mut(targets).zip(self.row(token)) {
                sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += x * weight[token] * y);
            }
        });
        factor.solve(&mut b, self.columns, targets);
        let b: Vec<f32> = b.into_iter().map(|value| value as f32).collect();
        let predicted = in_chunks(weight.len(), CHUNK, threads, |tokens| {
            let mut predicted = Vec::with_capacity(CHUNK * targets);
            tokens.for_each(|token| project(self.row(token), &b, targets, &mut predicted));
            predicted
        });
        predicted.concat()
    }

    fn factor(&self, weight: &[f32], penalty: f64, threads: usize) -> Arc<Factor> {
        let mut last = self.factor.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(factor) = last.as_ref().filter(|factor| factor.weight == weight && factor.penalty == penalty) {
            return Arc::clone(factor);
        }
        let lower = cholesky(self.normal(weight, penalty, threads), self.columns);
        Arc::clone(last.insert(Arc::new(Factor { weight: weight.to_vec(), penalty, lower })))
    }

    /// `X' W X + penalty I`, the lower half.
    fn normal(&self, weight: &[f32], penalty: f64, threads: usize) -> Vec<f64> {
        let columns = self.columns;
        let mut normal = weighted_sums(weight, columns * columns, threads, |token, sum| {
            let x = self.row(token);
            for (at, sum) in sum.chunks_exact_mut(columns).enumerate() {
                let by = x[at] * weight[token];
                sum[..=at].iter_mut().zip(x).for_each(|(sum, x)| *sum += by * x);
            }
        });
        (0..columns).for_each(|at| normal[at * columns + at] += penalty);
        normal
    }
}

/// Runs a job for each `size` of the numbers below `count`, in order.
pub(super) fn in_chunks<R: Send>(
    count: usize,
    size: usize,
    threads: usize,
    run: impl Fn(Range<usize>) -> R + Sync,
) -> Vec<R> {
    let starts: Vec<usize> = (0..count).step_by(size).collect();
    in_parallel(&starts, threads, |first| run(first..(first + size).min(count)))
}

/// Adds up `size` sums over the tokens with a weight, chunk by chunk; `add` adds those of a token.
fn weighted_sums(weight: &[f32], size: usize, threads: usize, add: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f64> {
    let sums = in_chunks(weight.len(), CHUNK, threads, |tokens| {
        let mut sum = vec![0.0f32; size];
        tokens.filter(|&token| weight[token] > 0.0).for_each(|token| add(token, &mut sum));
        sum
    });
    let mut all = vec![0.0f64; size];
    sums.iter().for_each(|sum| all.iter_mut().zip(sum).for_each(|(all, &sum)| *all += f64::from(sum)));
    all
}

impl Factor {
    /// From right-hand sides [D, C] to solutions.
    fn solve(&self, b: &mut [f64], size: usize, columns: usize) {
        let row = |at: usize| at * columns..(at + 1) * columns;
        for at in 0..size {
            let (before, rest) = b.split_at_mut(at * columns);
            let (own, diagonal) = (&mut rest[..columns], self.lower[at * size + at]);
            for (other, values) in before.chunks_exact(columns).enumerate() {
                own.iter_mut().zip(values).for_each(|(own, value)| *own -= self.lower[at * size + other] * value);
            }
            own.iter_mut().for_each(|own| *own /= diagonal);
        }
        for at in (0..size).rev() {
            let (before, after) = b.split_at_mut((at + 1) * columns);
            let own = &mut before[row(at)];
            for (other, values) in after.chunks_exact(columns).enumerate() {
                let factor = self.lower[(at + 1 + other) * size + at];
                own.iter_mut().zip(values).for_each(|(own, value)| *own -= factor * value);
            }
            own.iter_mut().for_each(|own| *own /= self.lower[at * size + at]);
        }
    }
}

/// L of a positive definite matrix of which the lower half is given.
fn cholesky(mut matrix: Vec<f64>, size: usize) -> Vec<f64> {
    for at in 0..size {
        for to in at..size {
            let products = (0..at).map(|before| matrix[to * size + before] * matrix[at * size + before]);
            let left = matrix[to * size + at] - products.sum::<f64>();
            // The penalty keeps the diagonal above zero but for rounding.
            matrix[to * size + at] = if to == at { left.max(1e-12).sqrt() } else { left / matrix[at * size + at] };
        }
    }
    matrix
}

/// Appends the `columns` products of a row with a matrix, [row, columns].
pub(super) fn project(row: &[f32], matrix: &[f32], columns: usize, to: &mut Vec<f32>) {
    let begin = to.len();
    to.resize(begin + columns, 0.0);
    let to = &mut to[begin..];
    for (value, matrix) in row.iter().zip(matrix.chunks_exact(columns)) {
        to.iter_mut().zip(matrix).for_each(|(to, matrix)| *to += value * matrix);
    }
}

/// Embeddings of unit length less their mean, of unit length again.
pub(super) struct Centred<'a> {
    embeddings: &'a Embeddings,
    /// [H]
    pub(super) mean: &'a [f32],
}

impl Centred<'_> {
    pub(super) fn read(&self, token: usize, row: &mut [f32]) {
        if read_unit(self.embeddings, token, row) {
            row.iter_mut().zip(self.mean).for_each(|(value, mean)| *value -= mean);
            to_unit(row);
        }
    }
}

/// An embedding at unit length; false, and zeros, where it has none.
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
