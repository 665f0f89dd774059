//! A look inside a step, for golden tests and recordings.

use semmoe_tables::LayerIdx;

/// Called with intermediate results of a step, all rows of all items; by default nothing is looked at.
pub trait Probe {
    /// The residual stream `[rows, H]` after the embedding (`layers` = 0) and after so many layers.
    fn residual(&mut self, _layers: usize, _rows: &[f32]) {}

    /// The router's logits `[rows, N]` of one MoE layer.
    fn router_logits(&mut self, _layer: LayerIdx, _logits: &[f32]) {}

    /// The choice of one MoE layer: experts and their weights, each `[rows, k]`.
    fn routes(&mut self, _layer: LayerIdx, _experts: &[u16], _weights: &[f32]) {}

    /// The residual stream after the final norm, `[rows that want logits, H]`.
    fn final_norm(&mut self, _rows: &[f32]) {}
}

/// Looks at nothing.
impl Probe for () {}
