//! The shape of a mixture-of-experts model: dimensions, parameters, bytes, and the cache of keys and values.
//!
//! | module | what |
//! |---|---|
//! | `read` | from a Hugging Face `config.json` |
//! | `dtype` | bytes of a parameter |
//!
//! Parameter counts are exact: those of the published checkpoints, without multi-token-prediction heads.

mod dtype;
mod read;
#[cfg(test)]
mod tests;

pub use dtype::{Dtype, Precision};
use serde::Serialize;

/// A model's dimensions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelShape {
    /// `architectures` of `config.json`.
    pub architecture: String,
    /// H, elements.
    pub hidden: u64,
    /// Decoder layers.
    pub layers: u64,
    /// Layers with experts, at most `layers`.
    pub moe_layers: u64,
    /// Rows of the embedding.
    pub vocab: u64,
    /// Whether the output projection is the embedding.
    pub tied_embeddings: bool,
    /// Attention of every layer.
    pub attention: Attention,
    /// E, routed experts of an MoE layer.
    pub experts: u64,
    /// k, routed experts that a token activates.
    pub top_k: u64,
    /// I, rows of a routed expert's gate projection.
    pub expert_width: u64,
    /// Rows of all shared experts together; 0 without any.
    pub shared_width: u64,
    /// Rows of a dense layer's gate projection; 0 if every layer has experts.
    pub dense_width: u64,
    /// Parameters of routers, norms, biases and sinks, all layers together.
    pub small_parameters: u64,
    /// Layers with sliding-window attention, and the window's tokens.
    pub window: Option<Window>,
    /// Element types of weights and cache.
    pub precision: Precision,
}

/// Sliding-window attention in some layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Window {
    /// Layers with the window.
    pub layers: u64,
    /// Tokens in the window.
    pub tokens: u64,
}

/// A product with weights: `tokens x inputs` by `inputs x outputs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Inner dimension.
    pub inputs: u64,
    /// Outputs.
    pub outputs: u64,
}

impl Product {
    /// Its weights.
    pub fn parameters(&self) -> u64 {
        self.inputs * self.outputs
    }
}

/// The kind of attention, which determines computation and cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// Grouped-query attention: keys and values of `kv_heads` heads are cached.
    Grouped {
        /// Query heads.
        heads: u64,
        /// Heads of keys and values.
        kv_heads: u64,
        /// Elements of a head.
        head_dim: u64,
    },
    /// Multi-head latent attention: a latent and a rotary key are cached, shared by all heads.
    Latent {
        /// Heads.
        heads: u64,
        /// Rank of the query's projection; `None` if it is not factored.
        query_rank: Option<u64>,
        /// Elements of the latent.
        kv_rank: u64,
        /// Elements of a head's key without position.
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

    /// Parameters of all routed experts: layers x E x 3 H I.
    pub fn routed_parameters(&self) -> u64 {
        self.moe_layers * self.experts * self.expert_parameters()
    }

    /// Parameters of the attention projections of all layers.
    pub fn attention_parameters(&self) -> u64 {
        self.layers * self.attention.parameters(self.hidden, 1)
    }

    /// Parameters of shared experts and dense layers.
    pub fn dense_parameters(&self) -> u64 {
        3 * self.hidden * (self.moe_layers * self.shared_width + (self.layers - self.moe_layers) * self.dense_width)
    }

    /// Parameters of the embedding and of the output projection.
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

    /// Bytes of the cache for one token on one rank of `tensor` that share a sequence, over all layers, ignoring
    /// windows. Heads are replicated if there are fewer than ranks; every rank caches the whole latent.
    pub fn kv_bytes_per_token(&self, tensor: u64) -> f64 {
        self.layers as f64 * self.kv_bytes_per_layer(tensor)
    }

    /// Bytes of the cache for one token and one layer on one rank of `tensor` that share a sequence.
    pub fn kv_bytes_per_layer(&self, tensor: u64) -> f64 {
        self.attention.cached_elements(tensor) as f64 * self.precision.cache.bytes()
    }

    /// Tokens of a sequence of `context` tokens that a layer reads, averaged over the layers, respecting windows.
    pub fn seen_tokens(&self, context: f64) -> f64 {
        let Some(window) = self.window else { return context };
        let windowed = window.layers as f64 / self.layers as f64;
        windowed * context.min(window.tokens as f64) + (1.0 - windowed) * context
    }

    /// Bytes of the cache per token to send when a sequence's attention moves from one rank (EP) to `ranks` (TP): all
    /// ranks but the owner receive their heads.
    pub fn kv_moved_to_tp(&self, ranks: u64) -> f64 {
        (ranks.max(1) - 1) as f64 * self.kv_bytes_per_token(ranks)
    }

    /// Bytes of the cache per token to send on the way back: the owner receives the heads that it lacks.
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

    /// Parameters of the projections of one layer on one of `tensor` ranks that share the heads, without biases and
    /// norms.
    pub fn parameters(&self, hidden: u64, tensor: u64) -> u64 {
        self.products(hidden, tensor).map(|product| product.parameters()).sum()
    }

    /// The projections of one layer on one of `tensor` ranks that share the heads, as engines fuse them: key and value
    /// heads are replicated if there are fewer than ranks, and every rank has the projections down to a latent.
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

    /// Elements cached for a token in one layer on one of `tensor` ranks.
    pub fn cached_elements(&self, tensor: u64) -> u64 {
        match *self {
            Self::Grouped { kv_heads, head_dim, .. } => 2 * head_dim * kv_heads.div_ceil(tensor),
            Self::Latent { kv_rank, rope_dim, .. } => kv_rank + rope_dim,
        }
    }
}
