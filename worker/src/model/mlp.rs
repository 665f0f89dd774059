//! A gated feed-forward network, used by dense layers and shared experts.

use super::compute::{Linear, add, add_scaled, silu_product};

/// `down(silu(gate(x)) * up(x))`
pub(super) struct Mlp<L = Linear> {
    /// The gate rows, then the up rows: `[2 x width, H]`.
    pub(super) gate_up: L,
    /// `[H, width]`
    pub(super) down: L,
}

/// A shared expert, weighted by a sigmoid gate `[1, H]` if it has one.
pub(super) struct Shared<L = Linear> {
    pub(super) mlp: Mlp<L>,
    pub(super) gate: Option<L>,
}

/// Scratch buffers reused between calls.
#[derive(Default)]
pub(super) struct MlpScratch {
    /// See [`Mlp::apply`].
    pub(super) work: Vec<f32>,
    /// `[m, H]`: a shared expert's results.
    shared: Vec<f32>,
    /// `[m]`
    gates: Vec<f32>,
}

impl Mlp {
    /// Returns the packed weights in order of use.
    pub(super) fn linears(&mut self) -> [&mut Linear; 2] {
        [&mut self.gate_up, &mut self.down]
    }

    /// Applies the network to `x [m, H]` and overwrites `out [m, H]`. `work` is a scratch buffer of any length and
    /// content.
    pub(super) fn apply(&self, x: &[f32], out: &mut [f32], work: &mut Vec<f32>) {
        let rows = x.len() / self.down.outputs;
        let width = self.gate_up.outputs / 2;
        work.resize(rows * 3 * width, 0.0);
        let (gate_up, product) = work.split_at_mut(rows * 2 * width);
        self.gate_up.apply(x, gate_up);
        silu_product(gate_up, width, product);
        self.down.apply(product, out);
    }
}

impl Shared {
    /// Applies the expert to `x [m, H]` and adds the results to `out [m, H]`.
    pub(super) fn add_to(&self, x: &[f32], out: &mut [f32], scratch: &mut MlpScratch) {
        let mut results = std::mem::take(&mut scratch.shared);
        results.resize(x.len(), 0.0);
        self.mlp.apply(x, &mut results, &mut scratch.work);
        match &self.gate {
            None => add(&results, out),
            Some(gate) => {
                let hidden = self.mlp.down.outputs;
                scratch.gates.resize(x.len() / hidden, 0.0);
                gate.apply(x, &mut scratch.gates);
                let rows = results.chunks_exact(hidden).zip(out.chunks_exact_mut(hidden));
                for ((result, out), gate) in rows.zip(&scratch.gates) {
                    add_scaled(result, 1.0 / (1.0 + (-gate).exp()), out);
                }
            }
        }
        scratch.shared = results;
    }
}
