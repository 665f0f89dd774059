//! The best division of requests over ranks under two simultaneous limits, by an interior-point method.
//!
//! ```text
//! maximise    sum over i, r of  x[i,r] * value[i,r]
//! subject to  sum over r of x[i,r] = 1  for every request i,  x >= 0,  and for every rank r
//!             sum over i of x[i,r] * tokens[i] <= (1 + margins.tokens) * mean tokens
//!             sum over i of x[i,r]             <= (1 + margins.sequences) * mean sequences
//! ```
//!
//! By duality, no division exceeds the value of any non-negative prices p, q:
//!
//! ```text
//! sum over i of  max over r of (value[i,r] - tokens[i] p[r] - q[r])  +  capacity . (p, q)
//! ```
//!
//! An even division satisfies both limits, so primal and dual are feasible from the start, and their difference is the
//! gap at every step. Eliminating the requests leaves a system in 2 x ranks prices.

use ndarray::Array2;

use crate::algebra::cholesky;
use crate::input::Margins;

/// Maximum ranks for which the bound is computed: the time and memory of a step grow quadratically with the ranks.
pub(crate) const MAX_RANKS: usize = 256;

/// Relative gap at which the search ends.
const GAP: f64 = 1e-7;
/// Maximum steps; about 30 are typical.
const MAX_STEPS: usize = 200;
/// Factor by which a step aims to reduce the gap, and the fraction of the way to the boundary that it takes.
const CENTRING: f64 = 0.1;
const OF_THE_WAY: f64 = 0.995;

/// Requests to divide: `tokens` [U], `value` [U, R].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requests<'a> {
    pub(crate) tokens: &'a [f64],
    pub(crate) value: &'a [f64],
    pub(crate) ranks: usize,
}

/// A division, and the prices that certify it.
#[derive(Clone, Debug)]
pub(crate) struct Division {
    /// [U, R] fractions of the requests.
    pub(crate) parts: Vec<f64>,
    /// Value of the division.
    pub(crate) primal: f64,
    /// Dual value of the prices: no division is better.
    pub(crate) dual: f64,
    /// [R] price of a token.
    pub(crate) token_price: Vec<f64>,
    /// [R] price of a sequence.
    pub(crate) sequence_price: Vec<f64>,
}

/// The current iterate; tokens are scaled by their mean and values by the largest value.
struct Interior {
    ranks: usize,
    /// [U]
    tokens: Vec<f64>,
    /// [U, R] fractions, and the loss of each rank compared with the best one under the prices.
    x: Vec<f64>,
    z: Vec<f64>,
    /// [2 R] unused capacity and prices: of tokens, then of sequences.
    slack: Vec<f64>,
    price: Vec<f64>,
}

/// A step in the fractions, losses, slack and prices.
type Step = [Vec<f64>; 4];

impl Requests<'_> {
    /// Returns the best division, to a relative gap of [`GAP`] or to rounding precision.
    pub(crate) fn divide(&self, margins: Margins) -> Division {
        let units = self.tokens.len();
        let mean = (self.tokens.iter().sum::<f64>() / units as f64).max(f64::MIN_POSITIVE);
        let most = self.value.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let even = units as f64 / self.ranks as f64;
        let tokens: Vec<f64> = self.tokens.iter().map(|tokens| tokens / mean).collect();
        let losses = self.value.chunks_exact(self.ranks).flat_map(|row| {
            let best = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            row.iter().map(move |value| 1.0 + (best - value) / most)
        });
        let each =
            |of_tokens: f64, of_sequences: f64| [vec![of_tokens; self.ranks], vec![of_sequences; self.ranks]].concat();
        let mut at = Interior {
            ranks: self.ranks,
            x: vec![1.0 / self.ranks as f64; self.value.len()],
            z: losses.collect(),
            slack: each(margins.tokens * even, margins.sequences * even),
            price: each(1.0, 1.0),
            tokens,
        };
        for _ in 0..MAX_STEPS {
            let value: f64 = at.x.iter().zip(self.value).map(|(x, value)| x * value / most).sum();
            if at.gap() <= GAP * value.max(1.0) {
                break;
            }
            at.advance();
        }
        self.divided(at, margins, mean, most)
    }

    /// Converts back to the units of the requests. Recomputes the values, so that accumulated rounding errors cannot
    /// invalidate the bound.
    fn divided(&self, at: Interior, margins: Margins, mean: f64, most: f64) -> Division {
        let Interior { ranks, mut x, price, .. } = at;
        let (tokens, sequences) = price.split_at(ranks);
        let token_price: Vec<f64> = tokens.iter().map(|price| price * most / mean).collect();
        let sequence_price: Vec<f64> = sequences.iter().map(|price| price * most).collect();
        let (mut primal, mut dual) = (0.0, 0.0);
        let rows = x.chunks_exact_mut(ranks).zip(self.value.chunks_exact(ranks));
        for ((x, value), tokens) in rows.zip(self.tokens) {
            let all: f64 = x.iter().sum();
            x.iter_mut().for_each(|part| *part /= all);
            primal += x.iter().zip(value).map(|(part, value)| part * value).sum::<f64>();
            let net = |rank: usize| value[rank] - tokens * token_price[rank] - sequence_price[rank];
            dual += (0..ranks).map(net).fold(f64::NEG_INFINITY, f64::max);
        }
        let even = self.tokens.len() as f64 / ranks as f64;
        for (token, sequence) in token_price.iter().zip(&sequence_price) {
            dual += even * ((1.0 + margins.tokens) * mean * token + (1.0 + margins.sequences) * sequence);
        }
        Division { parts: x, primal, dual, token_price, sequence_price }
    }
}

impl Interior {
    /// Returns the dual minus the primal value.
    fn gap(&self) -> f64 {
        let products = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        products(&self.x, &self.z) + products(&self.slack, &self.price)
    }

    fn advance(&mut self) {
        let target = CENTRING * self.gap() / (self.x.len() + self.price.len()) as f64;
        let [dx, dz, d_slack, d_price] = self.step(target);
        let room = |values: &[f64], steps: &[f64]| {
            let to_edge = values.iter().zip(steps).filter(|(_, step)| **step < 0.0).map(|(value, step)| -value / step);
            (OF_THE_WAY * to_edge.fold(f64::INFINITY, f64::min)).min(1.0)
        };
        let go = |values: &mut [f64], steps: &[f64], far: f64| {
            values.iter_mut().zip(steps).for_each(|(value, step)| *value += far * step);
        };
        let primal = room(&self.x, &dx).min(room(&self.slack, &d_slack));
        let dual = room(&self.z, &dz).min(room(&self.price, &d_price));
        go(&mut self.x, &dx, primal);
        go(&mut self.slack, &d_slack, primal);
        go(&mut self.z, &dz, dual);
        go(&mut self.price, &d_price, dual);
    }

    /// Computes Newton's step towards the point where each fraction times its loss, and each slack times its price,
    /// equals `target`.
    fn step(&self, target: f64) -> Step {
        let n = self.ranks;
        let mut matrix = Array2::<f64>::zeros((2 * n, 2 * n));
        let mut right: Vec<f64> =
            self.slack.iter().zip(&self.price).map(|(slack, price)| target / price - slack).collect();
        for (at, (slack, price)) in self.slack.iter().zip(&self.price).enumerate() {
            matrix[[at, at]] = slack / price;
        }
        // Lower triangles, indexed by the power of the tokens (0, 1, 2) that weights the sum.
        let mut sums = [0, 1, 2].map(|_| Array2::<f64>::zeros((n, n)));
        let rows = || self.x.chunks_exact(n).zip(self.z.chunks_exact(n)).zip(&self.tokens);
        // Per request: x / z of each fraction, and its centring term.
        let (mut ratio, mut wanted) = (vec![0.0; n], vec![0.0; n]);
        let answer = |x: &[f64], z: &[f64], ratio: &mut [f64], wanted: &mut [f64]| {
            for (at, (x, z)) in x.iter().zip(z).enumerate() {
                (ratio[at], wanted[at]) = (x / z, target / z - x);
            }
            (ratio.iter().sum::<f64>(), wanted.iter().sum::<f64>())
        };
        for ((x, z), tokens) in rows() {
            let (ratios, wants) = answer(x, z, &mut ratio, &mut wanted);
            for r in 0..n {
                let own = wanted[r] - ratio[r] * wants / ratios;
                right[r] += tokens * own;
                right[n + r] += own;
                for s in 0..=r {
                    let both = if r == s { ratio[r] } else { 0.0 } - ratio[r] * ratio[s] / ratios;
                    sums[0][[r, s]] += both;
                    sums[1][[r, s]] += tokens * both;
                    sums[2][[r, s]] += tokens * tokens * both;
                }
            }
        }
        for (r, s) in (0..n).flat_map(|r| (0..n).map(move |s| (r, s))) {
            let at = [r.max(s), r.min(s)];
            matrix[[r, s]] += sums[2][at];
            matrix[[n + r, s]] += sums[1][at];
            matrix[[n + r, n + s]] += sums[0][at];
        }
        let d_price = solved(&cholesky(matrix), right);
        let (mut dx, mut dz) = (Vec::with_capacity(self.x.len()), Vec::with_capacity(self.x.len()));
        for ((x, z), tokens) in rows() {
            let (ratios, _) = answer(x, z, &mut ratio, &mut wanted);
            let cost = |rank: usize| tokens * d_price[rank] + d_price[n + rank];
            let moved = (0..n).map(|rank| wanted[rank] - ratio[rank] * cost(rank)).sum::<f64>();
            let level = moved / ratios;
            dz.extend((0..n).map(|rank| level + cost(rank)));
            dx.extend((0..n).map(|rank| wanted[rank] - ratio[rank] * (level + cost(rank))));
        }
        let d_slack =
            (0..2 * n).map(|at| target / self.price[at] - self.slack[at] * (1.0 + d_price[at] / self.price[at]));
        [dx, dz, d_slack.collect(), d_price]
    }
}

/// Solves L L' y = right.
fn solved(lower: &Array2<f64>, mut right: Vec<f64>) -> Vec<f64> {
    let size = right.len();
    for at in 0..size {
        let before: f64 = (0..at).map(|to| lower[[at, to]] * right[to]).sum();
        right[at] = (right[at] - before) / lower[[at, at]];
    }
    for at in (0..size).rev() {
        let after: f64 = (at + 1..size).map(|to| lower[[to, at]] * right[to]).sum();
        right[at] = (right[at] - after) / lower[[at, at]];
    }
    right
}

#[cfg(test)]
mod tests;
