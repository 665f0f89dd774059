//! A gated feed-forward network: an expert, or the whole of a dense layer.

use super::compute::{Linear, silu_product};

/// `down(silu(gate(x)) * up(x))`
pub(super) struct Mlp {
    /// Gate above up: `[2 x width, H]`.
    pub(super) gate_up: Linear,
    /// `[H, width]`
    pub(super) down: Linear,
}

/// Buffers that are reused between calls.
#[derive(Default)]
pub(super) struct MlpScratch {
    gate_up: Vec<f32>,
    product: Vec<f32>,
}

impl Mlp {
    /// `x [m, H]` to `out [m, H]`, overwritten.
    pub(super) fn apply(&self, x: &[f32], out: &mut [f32], scratch: &mut MlpScratch) {
        let rows = x.len() / self.down.outputs();
        let width = self.gate_up.outputs() / 2;
        scratch.gate_up.resize(rows * 2 * width, 0.0);
        scratch.product.resize(rows * width, 0.0);
        self.gate_up.apply(x, &mut scratch.gate_up);
        silu_product(&scratch.gate_up, width, &mut scratch.product);
        self.down.apply(&scratch.product, out);
    }
}
