//! Exposes a step's intermediate results to golden tests and recordings.

use semmoe_tables::LayerIdx;

/// Receives a step's intermediate results for all rows of all items. The default methods ignore them.
pub trait Probe {
    /// The residual stream `[rows, H]` after the embedding (`layers` = 0) or after `layers` layers.
    fn residual(&mut self, _layers: usize, _rows: &[f32]) {}

    /// The router logits `[rows, N]` of one MoE layer.
    fn router_logits(&mut self, _layer: LayerIdx, _logits: &[f32]) {}

    /// The experts selected in one MoE layer and their weights, each `[rows, k]`.
    fn routes(&mut self, _layer: LayerIdx, _experts: &[u16], _weights: &[f32]) {}

    /// The residual stream after the final norm, `[rows with requested output, H]`.
    fn final_norm(&mut self, _rows: &[f32]) {}
}

/// Ignores everything.
impl Probe for () {}
