//! Memory of one GPU: weights, activations and cache. Follows MixServe's equation 8, extended with bytes per parameter,
//! stages, attention replicas, and heads replicated if there are fewer heads than ranks.

use serde::Serialize;

use crate::layout::{Infeasible, Layout};
use crate::shape::ModelShape;

/// Memory use of the fullest rank's GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// Routed experts.
    pub expert_bytes: f64,
    /// Attention, shared experts and dense layers.
    pub dense_bytes: f64,
    /// Embedding, output projection, routers, norms.
    pub other_bytes: f64,
    /// Activations of the largest step.
    pub activation_bytes: f64,
    /// Bytes left for the KV cache.
    pub cache_bytes: f64,
    /// Token capacity of this rank's KV cache.
    pub cache_tokens: f64,
}

impl Memory {
    /// Bytes of all weights on the GPU.
    pub fn weight_bytes(&self) -> f64 {
        self.expert_bytes + self.dense_bytes + self.other_bytes
    }

    /// Computes a GPU's memory use in this layout, with `usable` bytes for the engine and at most `step_tokens` tokens
    /// per rank and step.
    ///
    /// # Errors
    /// [`Infeasible::Memory`] if the weights and activations do not fit.
    pub fn of(shape: &ModelShape, layout: &Layout, usable: f64, step_tokens: f64) -> Result<Self, Infeasible> {
        let weights = weights(shape, layout);
        // Hidden states before and after a layer, the layer's widest projection, and the tokens' routed copies.
        let width = (4 * shape.hidden + 2 * shape.attention.heads() * 128 / layout.attention_tp) as f64;
        let copies = shape.top_k as f64 * (2 * shape.hidden + 3 * shape.expert_width / layout.expert_tp) as f64;
        let activation_bytes = step_tokens * (width + copies / layout.attention_tp as f64) * 2.0;
        let cache_bytes = usable - weights.iter().sum::<f64>() - activation_bytes;
        if cache_bytes <= 0.0 {
            return Err(Infeasible::Memory {
                weights_gb: weights.iter().sum::<f64>() / 1e9,
                activations_gb: activation_bytes / 1e9,
                usable_gb: usable / 1e9,
            });
        }
        let token = shape.kv_bytes_per_layer(layout.attention_tp) * layout.stage_layers(shape) as f64;
        let ([expert_bytes, dense_bytes, other_bytes], cache_tokens) = (weights, cache_bytes / token);
        Ok(Self { expert_bytes, dense_bytes, other_bytes, activation_bytes, cache_bytes, cache_tokens })
    }

    /// Token capacity of all caches in the unit; ranks that share a sequence count once.
    pub fn unit_tokens(&self, layout: &Layout) -> f64 {
        self.cache_tokens * layout.attention_dp as f64
    }
}

/// Returns the bytes of routed experts, dense parts and the rest on the fullest rank.
fn weights(shape: &ModelShape, layout: &Layout) -> [f64; 3] {
    let stage = layout.stage_layers(shape) as f64 / shape.layers as f64;
    let (tp, ranks) = (layout.attention_tp as f64, (layout.expert_tp * layout.expert_ep) as f64);
    let experts = shape.routed_parameters() as f64 / ranks * stage * shape.precision.experts.bytes();
    let attention = (shape.layers * shape.attention.parameters(shape.hidden, layout.attention_tp)) as f64;
    let dense = (attention + shape.dense_parameters() as f64 / tp) * stage * shape.precision.dense.bytes();
    // The fullest stage has the embedding or the output projection; a single stage has both.
    let ends = shape.embedding_parameters() as f64 / if layout.pipeline > 1 { 2.0 } else { 1.0 };
    let other = (ends / tp + shape.small_parameters as f64 * stage) * shape.precision.other.bytes();
    [experts, dense, other]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixtures::{layout, qwen3_235b};

    /// MixServe's Table II on 16 GPUs, Qwen3-235B in bfloat16, GB per GPU: routed experts, and attention without the
    /// copies of key heads.
    #[test]
    fn weights_of_table_two() {
        let shape = qwen3_235b();
        let cases = [
            (layout(2, [8, 1], [8, 1]), 29.225),
            (layout(1, [8, 2], [1, 16]), 30.063),
            (layout(1, [4, 4], [1, 16]), 31.738),
        ];
        for (layout, gigabytes) in cases {
            let attention = shape.attention_parameters() as f64 * 2.0 / (layout.attention_tp * layout.pipeline) as f64;
            let found = (attention + Memory::of(&shape, &layout, 141e9, 0.0).unwrap().expert_bytes) / 1e9;
            assert!((found - gigabytes).abs() < 0.0005, "{}: {found}", layout.name());
        }
    }

    /// 0.85 x 141 GB less weights. The golden figures leave out replicated parts: routers, and projections of shared
    /// key heads.
    #[test]
    fn caches_of_the_reference_model() {
        let shape = qwen3_235b();
        for (layout, tokens) in [(layout(1, [8, 1], [8, 1]), 1.269e6), (layout(1, [1, 8], [1, 8]), 1.961e6)] {
            let found = Memory::of(&shape, &layout, 0.85 * 141e9, 0.0).unwrap().unit_tokens(&layout);
            assert!((found / tokens - 1.0).abs() < 0.004, "{}: {found}", layout.name());
        }
        let error = Memory::of(&shape, &layout(1, [4, 1], [4, 1]), 0.85 * 141e9 / 2.0, 0.0).unwrap_err();
        assert!(error.to_string().contains("weights need 11"), "{error}");
    }
}
