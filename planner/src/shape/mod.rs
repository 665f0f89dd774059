//! The shape of a mixture-of-experts model: dimensions, parameters, bytes, and the KV cache.
//!
//! | module | contents |
//! |---|---|
//! | `read` | reads a shape from a Hugging Face `config.json` |
//! | `dtype` | bytes of a parameter |
//!
//! Parameter counts equal those of the published checkpoints, without multi-token-prediction heads.

mod dtype;
mod read;
#[cfg(test)]
mod tests;

pub use dtype::{Dtype, Precision};
use serde::Serialize;

/// A model's dimensions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelShape {
    /// The `architectures` entry in `config.json`.
    pub architecture: String,
    /// H: elements of a hidden state.
    pub hidden: u64,
    /// Decoder layers.
    pub layers: u64,
    /// Layers with experts, at most `layers`.
    pub moe_layers: u64,
    /// Vocabulary size: rows of the embedding.
    pub vocab: u64,
    /// Whether the output projection shares the embedding's weights.
    pub tied_embeddings: bool,
    /// The kind of attention in every layer.
    pub attention: Attention,
    /// E: routed experts per MoE layer.
    pub experts: u64,
    /// k: routed experts that a token activates.
    pub top_k: u64,
    /// I: rows of a routed expert's gate projection.
    pub expert_width: u64,
    /// Total rows of all shared experts; 0 without shared experts.
    pub shared_width: u64,
    /// Rows of a dense layer's gate projection; 0 if every layer has experts.
    pub dense_width: u64,
    /// Parameters of routers, norms, biases and sinks over all layers.
    pub small_parameters: u64,
    /// Sliding-window attention, if some layers use it.
    pub window: Option<Window>,
    /// Element types of weights and cache.
    pub precision: Precision,
}

/// Sliding-window attention in some layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Window {
    /// Number of layers with the window.
    pub layers: u64,
    /// Tokens in the window.
    pub tokens: u64,
}

/// A product with weights: `tokens x inputs` by `inputs x outputs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Inner dimension.
    pub inputs: u64,
    /// Number of outputs.
    pub outputs: u64,
}

impl Product {
    /// Number of weights.
    pub fn parameters(&self) -> u64 {
        self.inputs * self.outputs
    }
}

/// The kind of attention, which determines computation and cache size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// Grouped-query attention, which caches keys and values of `kv_heads` heads.
    Grouped {
        /// Query heads.
        heads: u64,
        /// Key and value heads.
        kv_heads: u64,
        /// Elements of a head.
        head_dim: u64,
    },
    /// Multi-head latent attention, which caches a latent and a rotary key shared by all heads.
    Latent {
        /// Heads.
        heads: u64,
        /// Rank of the query projection; `None` if it is not factored.
        query_rank: Option<u64>,
        /// Elements of the latent.
        kv_rank: u64,
        /// Elements of a head's key without the rotary part.
        nope_dim: u64,
        /// Elements of the rotary key.
        rope_dim: u64,
        /// Elements of a head's value.
        value_dim: u64,
    },
}

impl ModelShape {
    /// Parameters of one routed expert, without biases: 3 H I.
    pub fn expert_parameters(&self) -> u64 {
        3 * self.hidden * self.expert_width
    }

    /// Parameters of all routed experts: MoE layers x E x 3 H I.
    pub fn routed_parameters(&self) -> u64 {
        self.moe_layers * self.experts * self.expert_parameters()
    }

    /// Parameters of all layers' attention projections.
    pub fn attention_parameters(&self) -> u64 {
        self.layers * self.attention.parameters(self.hidden, 1)
    }

    /// Parameters of shared experts and dense layers.
    pub fn dense_parameters(&self) -> u64 {
        3 * self.hidden * (self.moe_layers * self.shared_width + (self.layers - self.moe_layers) * self.dense_width)
    }

    /// Parameters of the embedding and the output projection.
    pub fn embedding_parameters(&self) -> u64 {
        self.vocab * self.hidden * if self.tied_embeddings { 1 } else { 2 }
    }

    /// All parameters.
    pub fn parameters(&self) -> u64 {
        self.routed_parameters()
            + self.attention_parameters()
            + self.dense_parameters()
            + self.embedding_parameters()
            + self.small_parameters
    }

    /// KV cache bytes per token on one of `tensor` ranks that share a sequence, over all layers, ignoring windows.
    /// Heads are replicated if there are fewer heads than ranks; every rank caches the whole latent.
    pub fn kv_bytes_per_token(&self, tensor: u64) -> f64 {
        self.layers as f64 * self.kv_bytes_per_layer(tensor)
    }

    /// KV cache bytes per token and layer on one of `tensor` ranks that share a sequence.
    pub fn kv_bytes_per_layer(&self, tensor: u64) -> f64 {
        self.attention.cached_elements(tensor) as f64 * self.precision.cache.bytes()
    }

    /// Number of tokens that a layer reads of a sequence with `context` tokens, averaged over layers, with windows
    /// applied.
    pub fn seen_tokens(&self, context: f64) -> f64 {
        let Some(window) = self.window else { return context };
        let windowed = window.layers as f64 / self.layers as f64;
        windowed * context.min(window.tokens as f64) + (1.0 - windowed) * context
    }

    /// KV cache bytes per token to send when a sequence's attention moves from one rank (EP) to `ranks` ranks (TP): all
    /// ranks except the owner receive their heads.
    pub fn kv_moved_to_tp(&self, ranks: u64) -> f64 {
        (ranks.max(1) - 1) as f64 * self.kv_bytes_per_token(ranks)
    }

    /// KV cache bytes per token to send when a sequence moves back from `ranks` ranks (TP) to one (EP): the owner
    /// receives the heads that it lacks.
    pub fn kv_moved_to_ep(&self, ranks: u64) -> f64 {
        self.kv_bytes_per_token(1) - self.kv_bytes_per_token(ranks)
    }
}

impl Attention {
    /// Query heads.
    pub fn heads(&self) -> u64 {
        match *self {
            Self::Grouped { heads, .. } | Self::Latent { heads, .. } => heads,
        }
    }

    /// Parameters of one layer's projections on one of `tensor` ranks that share the heads, without biases and norms.
    pub fn parameters(&self, hidden: u64, tensor: u64) -> u64 {
        self.products(hidden, tensor).map(|product| product.parameters()).sum()
    }

    /// One layer's projections on one of `tensor` ranks that share the heads, fused as in engines: key and value heads
    /// are replicated if there are fewer heads than ranks, and every rank has the down-projections to a latent.
    pub fn products(&self, hidden: u64, tensor: u64) -> impl Iterator<Item = Product> + use<> {
        let product = |inputs, outputs| Some(Product { inputs, outputs });
        let found = match *self {
            Self::Grouped { heads, kv_heads, head_dim } => {
                let (own, shared) = (heads.div_ceil(tensor), kv_heads.div_ceil(tensor));
                [product(hidden, head_dim * (own + 2 * shared)), product(own * head_dim, hidden), None, None]
            }
            Self::Latent { heads, query_rank, kv_rank, nope_dim, rope_dim, value_dim } => {
                let (own, key) = (heads.div_ceil(tensor), nope_dim + rope_dim);
                [
                    product(hidden, query_rank.unwrap_or(own * key) + kv_rank + rope_dim),
                    query_rank.and_then(|rank| product(rank, own * key)),
                    product(kv_rank, own * (nope_dim + value_dim)),
                    product(own * value_dim, hidden),
                ]
            }
        };
        found.into_iter().flatten()
    }

    /// Elements cached per token and layer on one of `tensor` ranks.
    pub fn cached_elements(&self, tensor: u64) -> u64 {
        match *self {
            Self::Grouped { kv_heads, head_dim, .. } => 2 * head_dim * kv_heads.div_ceil(tensor),
            Self::Latent { kv_rank, rope_dim, .. } => kv_rank + rope_dim,
        }
    }
}
