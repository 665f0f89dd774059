//! Reads and checks the `config.json` of a Hugging Face checkpoint.
//!
//! | module | what |
//! |---|---|
//! | `parts` | the variants of the transformer block: attention, router, shared expert, rotary embedding |
//! | `architecture` | model family names, and the keys and tensors that families name differently |
//! | `family` | the meaning of each family's keys, and the settings that are rejected |
//! | `rope` | the rotary embedding and YaRN |
//!
//! [`CheckpointConfig`] looks up and reads the keys, as it does for the planner, the profiler and `permute`.

mod architecture;
mod family;
mod parts;
mod rope;

use std::path::Path;

use semmoe_tables::{CheckpointConfig, ConfigError, LayerIdx, ModelInfo};
use serde_json::Value;

pub use architecture::Architecture;
pub(super) use architecture::GATED;
pub use parts::{
    AttentionKind, GroupLimit, GroupScore, GroupedAttention, HeadNormKind, LatentAttention, Rope, RopeLayout, Router,
    Scoring, SharedExpert, Yarn,
};

use super::{CacheShape, ModelError};
use family::Family;

/// Size limit for a `config.json` file.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
const MAX_LAYERS: u64 = 4096;
const MAX_POSITIONS: u64 = 1 << 24;
const MAX_EXPERTS: u64 = u16::MAX as u64 - 1;

/// A checked model configuration.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// V: number of rows in the embedding table.
    pub vocab_size: usize,
    /// H: width of the residual stream.
    pub hidden: usize,
    /// Number of layers.
    pub num_layers: usize,
    /// Query heads.
    pub heads: usize,
    /// The attention kind, the same in every layer.
    pub attention: AttentionKind,
    /// The rotary embedding.
    pub rope: Rope,
    /// Maximum sequence length in tokens.
    pub max_positions: usize,
    /// Epsilon of every RMS norm, except those inside latent attention.
    pub rms_norm_eps: f32,
    /// Whether the output projection uses the embedding matrix.
    pub tied_embeddings: bool,
    /// N: number of routed experts per MoE layer.
    pub num_experts: usize,
    /// k: experts per token.
    pub top_k: usize,
    /// I: intermediate width of one routed expert.
    pub expert_width: usize,
    /// Intermediate width of a dense layer's feed-forward network.
    pub dense_width: usize,
    /// The router of every MoE layer.
    pub router: Router,
    /// The shared expert, which processes every token in every MoE layer.
    pub shared: Option<SharedExpert>,
    /// The layer numbers of the L MoE layers, ascending.
    pub moe_layers: Vec<u16>,
    /// End-of-text token ids from `config.json`.
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Reads and checks a model directory's `config.json`.
    ///
    /// # Errors
    /// Reports the file, the key, the value found and the value expected in one sentence, or the name of an unsupported
    /// architecture.
    pub fn load(model_dir: &Path) -> Result<Self, ModelError> {
        let path = model_dir.join("config.json");
        let text = super::checkpoint::read_small_file(&path, MAX_CONFIG_BYTES, "a model configuration")?;
        Self::parse(&text, &path)
    }

    /// Parses and checks a configuration; `path` is used only in error messages.
    ///
    /// # Errors
    /// Reports the file, the key, the value found and the value expected in one sentence, or the name of an unsupported
    /// architecture.
    pub fn parse(json: &[u8], path: &Path) -> Result<Self, ModelError> {
        let fields = &CheckpointConfig::parse(path, json).map_err(ModelError::Config)?;
        // The architecture is checked first so that an unsupported model family is reported as such and not as a
        // missing key.
        let architecture = Architecture::of(fields)?;
        read(Family { architecture, fields }).map_err(ModelError::Config)
    }

    /// L: the number of MoE layers.
    pub fn num_moe_layers(&self) -> usize {
        self.moe_layers.len()
    }

    /// Returns the layer's index among the MoE layers, or `None` for a dense layer.
    pub(super) fn moe_layer(&self, layer: usize) -> Option<LayerIdx> {
        let index = self.moe_layers.binary_search(&u16::try_from(layer).ok()?).ok()?;
        Some(LayerIdx::new(index as u16))
    }

    /// Returns the shape of a sequence's cache.
    pub fn cache_shape(&self) -> CacheShape {
        let (kv_heads, key_width, value_width) = match &self.attention {
            AttentionKind::Grouped(grouped) => (grouped.kv_heads, grouped.head_dim, grouped.head_dim),
            AttentionKind::Latent(latent) => (1, latent.kv_rank + latent.rope_dim, latent.kv_rank),
        };
        CacheShape { layers: self.num_layers, kv_heads, key_width, value_width, max_positions: self.max_positions }
    }

    /// Number of rotated elements per head.
    pub fn rope_dim(&self) -> usize {
        match &self.attention {
            AttentionKind::Grouped(grouped) => grouped.head_dim,
            AttentionKind::Latent(latent) => latent.rope_dim,
        }
    }

    /// Describes the model for tables and traces. `model` is the name that clients use.
    pub fn model_info(&self, model: &str, tokenizer_sha256: Option<String>) -> ModelInfo {
        // The casts are lossless because parsing limits these values to the ranges of their target types.
        ModelInfo {
            model: model.to_owned(),
            tokenizer_sha256,
            num_experts: self.num_experts as u16,
            top_k: self.top_k as u16,
            vocab_size: self.vocab_size as u32,
            num_hidden_layers: self.num_layers as u16,
            layer_ids: self.moe_layers.clone(),
        }
    }
}

fn read(family: Family<'_>) -> Result<ModelConfig, ConfigError> {
    let Family { architecture, fields } = family;
    let max_positions: usize = fields.bounded("max_position_embeddings", MAX_POSITIONS)?;
    family.check_unsupported(max_positions)?;
    let heads = fields.dimension("num_attention_heads")?;
    let hidden = fields.dimension("hidden_size")?;
    let num_layers: u16 = fields.bounded("num_hidden_layers", MAX_LAYERS)?;
    let num_experts: usize = fields.bounded(architecture.experts_key(), MAX_EXPERTS)?;
    let top_k = fields.bounded("num_experts_per_tok", num_experts as u64)?;
    let expert_width = fields.dimension(architecture.expert_width_key())?;
    Ok(ModelConfig {
        architecture,
        vocab_size: fields.dimension("vocab_size")?,
        hidden,
        num_layers: num_layers.into(),
        heads,
        attention: family.attention(hidden, heads)?,
        rope: rope::read(fields, family.rope_layout()?, max_positions)?,
        max_positions,
        rms_norm_eps: epsilon(fields)?,
        tied_embeddings: fields.flag("tie_word_embeddings", false)?,
        num_experts,
        top_k,
        expert_width,
        dense_width: fields.dimension("intermediate_size")?,
        router: family.router(num_experts, top_k)?,
        shared: family.shared(expert_width)?,
        moe_layers: fields.moe_layers(num_layers)?,
        eos_token_ids: eos(fields)?,
    })
}

fn epsilon(fields: &CheckpointConfig) -> Result<f32, ConfigError> {
    let epsilon = fields.real("rms_norm_eps")?.filter(|value| (0.0..1.0).contains(value));
    epsilon.map(|value| value as f32).ok_or_else(|| fields.unexpected("rms_norm_eps", "a number in [0, 1)"))
}

fn eos(fields: &CheckpointConfig) -> Result<Vec<u32>, ConfigError> {
    const KEY: &str = "eos_token_id";
    token_ids(fields.get(KEY)).ok_or_else(|| fields.unexpected(KEY, "a token id, a list of token ids, or null"))
}

/// Parses a token id or a list of token ids. Null gives an empty list, anything else `None`.
pub(crate) fn token_ids(value: Option<&Value>) -> Option<Vec<u32>> {
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(single) => Some(vec![id(single)?]),
    }
}
