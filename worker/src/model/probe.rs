//! A look inside a step, for golden tests and recordings.

use semmoe_tables::LayerIdx;

/// Called with intermediate results of a step, all rows of all items; by default nothing is looked at.
pub trait Probe {
    /// The residual stream `[rows, H]` after the embedding (`layers` = 0) and after so many layers.
    fn residual(&mut self, layers: usize, rows: &[f32]) {
        let _ = (layers, rows);
    }

    /// The router's logits `[rows, N]` of one MoE layer.
    fn router_logits(&mut self, layer: LayerIdx, logits: &[f32]) {
        let _ = (layer, logits);
    }

    /// What one MoE layer chose: experts and their weights, each `[rows, k]`.
    fn routes(&mut self, layer: LayerIdx, experts: &[u16], weights: &[f32]) {
        let _ = (layer, experts, weights);
    }

    /// The residual stream after the final norm, `[rows that want logits, H]`.
    fn final_norm(&mut self, rows: &[f32]) {
        let _ = rows;
    }
}

/// Looks at nothing.
pub(super) struct NoProbe;

impl Probe for NoProbe {}
