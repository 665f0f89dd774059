//! Access to a step's intermediate results, for golden tests and recordings.

use semmoe_tables::LayerIdx;

/// Called with intermediate results of a step, all rows of all items; ignores them by default.
pub trait Probe {
    /// The residual stream `[rows, H]` after the embedding (`layers` = 0) or after `layers` layers.
    fn residual(&mut self, _layers: usize, _rows: &[f32]) {}

    /// The router's logits `[rows, N]` of one MoE layer.
    fn router_logits(&mut self, _layer: LayerIdx, _logits: &[f32]) {}

    /// The choice of one MoE layer: experts and their weights, each `[rows, k]`.
    fn routes(&mut self, _layer: LayerIdx, _experts: &[u16], _weights: &[f32]) {}

    /// The residual stream after the final norm, `[rows that want logits, H]`.
    fn final_norm(&mut self, _rows: &[f32]) {}
}

/// Ignores everything.
impl Probe for () {}
