//! Matrix products as plainly as they can be written: sums in f64. A kernel that adds in f32, in whatever order, is
//! near.

use semmoe_kernels::Element;

/// `x W^T` of one group of rows after another, by their weights.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a, T> {
    /// Rows, `stride` elements apart.
    pub x: &'a [T],
    /// Elements from one row to the next.
    pub stride: usize,
    /// `[groups, N, K]`; with `silu` `[groups, 2 N, K]`, gate above up.
    pub weights: &'a [T],
    /// K
    pub inputs: usize,
    /// N
    pub outputs: usize,
    /// `[N]`, added.
    pub bias: Option<&'a [f32]>,
    /// `silu(gate) * up`
    pub silu: bool,
}

/// An output, and how far from it a kernel may be before it rounds to what it stores.
#[derive(Clone, Copy, Debug)]
pub struct Near {
    /// The output.
    pub value: f64,
    /// Of sums in f32.
    pub within: f64,
}

/// Of what a sum in f32 may miss, relative to the sum of all sizes.
const MISSED: f64 = 1e-6;

impl Near {
    /// Whether a stored value is near enough; NaN never is. `rounded`: of the last place of its type.
    pub fn is(&self, found: f64, rounded: f64) -> bool {
        (found - self.value).abs() <= self.within + rounded * self.value.abs() + 1e-7
    }
}

impl<T: Element> Product<'_, T> {
    /// The output of a row of x and a feature of a group.
    pub fn output(&self, row: usize, group: usize, feature: usize) -> Near {
        let fold = if self.silu { 2 } else { 1 };
        let first = group * fold * self.outputs + feature;
        let sum = self.sum(row, first);
        if !self.silu {
            let bias = self.bias.map_or(0.0, |bias| f64::from(bias[feature]));
            return Near { value: sum.value + bias, ..sum };
        }
        let up = self.sum(row, first + self.outputs);
        let gate = sum.value / (1.0 + (-sum.value).exp());
        // The slope of SiLU is never above 1.1.
        let within = 1.1 * sum.within * (up.value.abs() + up.within) + up.within * gate.abs();
        Near { value: gate * up.value, within: within + MISSED * (gate * up.value).abs() }
    }

    fn sum(&self, row: usize, weights: usize) -> Near {
        let x = &self.x[row * self.stride..][..self.inputs];
        let weights = &self.weights[weights * self.inputs..][..self.inputs];
        let products = || x.iter().zip(weights).map(|(x, w)| f64::from(x.widen()) * f64::from(w.widen()));
        Near { value: products().sum(), within: MISSED * products().map(f64::abs).sum::<f64>() }
    }
}

/// A part of the last place of a type: how far rounding to it moves a value, relative to it.
pub fn rounding<T: Element>() -> f64 {
    match size_of::<T>() {
        4 => 1e-6,
        _ => 1.0 / 256.0,
    }
}
