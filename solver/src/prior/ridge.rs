//! Ridge regression from sparse rows to many targets at once, solved by conjugate gradients.

use semmoe_tables::in_parallel;

use super::features::Features;

/// Relative residual below which a target has converged. The evaluation results are the same for any value below 0.03.
const TOLERANCE: f64 = 0.01;
/// Maximum conjugate-gradient steps; 12 are typical.
pub(super) const MAX_STEPS: usize = 30;
/// Minimum conjugate-gradient steps. With only five steps, LAR drops by 0.1 percentage points.
const MIN_STEPS: usize = 5;
/// Limit on feature-target products over all regressions of a solve, about a minute on one core. Steps are reduced to
/// stay within it.
const MAX_PRODUCTS: u64 = 30_000_000_000;

/// Settings of a regression.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ridge {
    pub(crate) penalty: f64,
    pub(crate) steps: usize,
}

/// Returns the maximum steps for regressing `targets`, counted over all layers, on `features`.
pub(super) fn steps_for(features: &Features, targets: usize) -> usize {
    let products = (features.entries() as u64).saturating_mul(targets as u64).max(1);
    usize::try_from(MAX_PRODUCTS / products).unwrap_or(MAX_STEPS).clamp(MIN_STEPS, MAX_STEPS)
}

/// Minimises, for each target y, `sum over t of w[t] (y[t] - x[t] b)^2 + penalty |b|^2` over b, and returns `x[t] b`
/// for all tokens, [V, C] like `target`. Rows without weight are not read from `target`.
///
/// Targets are independent of each other and summed in token order, so the results are bit-identical for any `threads`
/// and any other targets.
pub(crate) fn predict(features: &Features, weight: &[f32], target: &[f32], ridge: Ridge, threads: usize) -> Vec<f32> {
    let columns = target.len() / weight.len().max(1);
    if columns <= 4 {
        in_blocks::<4>(features, weight, target, ridge, threads)
    } else {
        in_blocks::<8>(features, weight, target, ridge, threads)
    }
}

/// Processes `WIDTH` targets at a time.
fn in_blocks<const WIDTH: usize>(
    features: &Features,
    weight: &[f32],
    target: &[f32],
    ridge: Ridge,
    threads: usize,
) -> Vec<f32> {
    let columns = target.len() / weight.len().max(1);
    let blocks: Vec<usize> = (0..columns).step_by(WIDTH).collect();
    let found = in_parallel(&blocks, threads, |first| {
        let width = WIDTH.min(columns - first);
        let mut rows = vec![[0.0; WIDTH]; weight.len()];
        for (to, from) in rows.iter_mut().zip(target.chunks_exact(columns)) {
            to[..width].copy_from_slice(&from[first..first + width]);
        }
        let coefficients = Fit { features, weight, ridge }.coefficients(&rows);
        rows.iter_mut().enumerate().for_each(|(token, row)| *row = product(features, token, &coefficients));
        rows
    });
    let mut predicted = vec![0.0; target.len()];
    for (&first, block) in blocks.iter().zip(&found) {
        let width = WIDTH.min(columns - first);
        for (to, from) in predicted.chunks_exact_mut(columns).zip(block) {
            to[first..first + width].copy_from_slice(&from[..width]);
        }
    }
    predicted
}

/// `x[token] b`.
fn product<const WIDTH: usize>(features: &Features, token: usize, b: &[[f32; WIDTH]]) -> [f32; WIDTH] {
    let mut sum = [0.0; WIDTH];
    for &feature in features.row(token) {
        sum.iter_mut().zip(&b[feature as usize]).for_each(|(sum, b)| *sum += b);
    }
    sum.map(|sum| sum * features.scale[token])
}

struct Fit<'a> {
    features: &'a Features,
    weight: &'a [f32],
    ridge: Ridge,
}

impl Fit<'_> {
    /// Solves the normal equations `(X' W X + penalty I) b = X' W y` for b, [F, WIDTH].
    fn coefficients<const WIDTH: usize>(&self, target: &[[f32; WIDTH]]) -> Vec<[f32; WIDTH]> {
        let mut residual = vec![[0.0; WIDTH]; self.features.features()];
        for token in self.tokens() {
            self.scatter(token, target[token].map(|y| y * self.weight[token]), &mut residual);
        }
        let mut b = vec![[0.0; WIDTH]; residual.len()];
        let mut direction = residual.clone();
        let mut image = vec![[0.0; WIDTH]; residual.len()];
        let mut square = squares(&residual);
        let done = square.map(|square| square * TOLERANCE * TOLERANCE);
        for _ in 0..self.ridge.steps {
            let curvature = self.apply(&direction, &mut image);
            let going: [bool; WIDTH] = std::array::from_fn(|c| square[c] > done[c] && curvature[c] > 0.0);
            if !going.contains(&true) {
                break;
            }
            let step: [f32; WIDTH] =
                std::array::from_fn(|c| if going[c] { (square[c] / curvature[c]) as f32 } else { 0.0 });
            for (b, direction) in b.iter_mut().zip(&direction) {
                (0..WIDTH).for_each(|c| b[c] += step[c] * direction[c]);
            }
            for (residual, image) in residual.iter_mut().zip(&image) {
                (0..WIDTH).for_each(|c| residual[c] -= step[c] * image[c]);
            }
            let next = squares(&residual);
            let kept: [f32; WIDTH] = std::array::from_fn(|c| if going[c] { (next[c] / square[c]) as f32 } else { 0.0 });
            for (direction, residual) in direction.iter_mut().zip(&residual) {
                (0..WIDTH).for_each(|c| direction[c] = residual[c] + kept[c] * direction[c]);
            }
            square = next;
        }
        b
    }

    /// `image = (X' W X + penalty I) direction`; returns `direction' image`.
    fn apply<const WIDTH: usize>(&self, direction: &[[f32; WIDTH]], image: &mut [[f32; WIDTH]]) -> [f64; WIDTH] {
        let mut curvature = squares(direction).map(|square| square * self.ridge.penalty);
        for (image, direction) in image.iter_mut().zip(direction) {
            *image = direction.map(|value| value * self.ridge.penalty as f32);
        }
        for token in self.tokens() {
            let along = product(self.features, token, direction);
            let weighted = along.map(|value| value * self.weight[token]);
            (0..WIDTH).for_each(|c| curvature[c] += f64::from(along[c]) * f64::from(weighted[c]));
            self.scatter(token, weighted, image);
        }
        curvature
    }

    /// Adds `x[token]' values`.
    fn scatter<const WIDTH: usize>(&self, token: usize, values: [f32; WIDTH], sums: &mut [[f32; WIDTH]]) {
        let values = values.map(|value| value * self.features.scale[token]);
        for &feature in self.features.row(token) {
            sums[feature as usize].iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
    }

    /// Iterates over the tokens with nonzero weight.
    fn tokens(&self) -> impl Iterator<Item = usize> {
        (0..self.weight.len()).filter(|&token| self.weight[token] > 0.0)
    }
}

fn squares<const WIDTH: usize>(rows: &[[f32; WIDTH]]) -> [f64; WIDTH] {
    let mut sum = [0.0; WIDTH];
    for row in rows {
        (0..WIDTH).for_each(|c| sum[c] += f64::from(row[c]) * f64::from(row[c]));
    }
    sum
}
