//! Matrix products written as plainly as possible, with sums in f64, and the error that a kernel with f32 sums may
//! have.

use semmoe_kernels::Element;

/// `x W^T` for consecutive groups of rows, each with its own weights.
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
    /// `[N]`, added to the outputs.
    pub bias: Option<&'a [f32]>,
    /// Apply `silu(gate) * up`.
    pub silu: bool,
}

/// An output, and the tolerance for a kernel before it rounds to its output type.
#[derive(Clone, Copy, Debug)]
pub struct Near {
    /// The output.
    pub value: f64,
    /// The tolerance, for sums in f32.
    pub within: f64,
}

/// Error of an f32 sum relative to the sum of magnitudes.
const MISSED: f64 = 1e-6;

impl Near {
    /// Whether a stored value is within the tolerance; NaN never is. `rounded` is the relative rounding error of its
    /// type.
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

/// Relative error of rounding to a type, with some margin.
pub fn rounding<T: Element>() -> f64 {
    match size_of::<T>() {
        4 => 1e-6,
        _ => 1.0 / 256.0,
    }
}
