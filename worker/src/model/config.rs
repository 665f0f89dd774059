//! `config.json` of a Hugging Face checkpoint, read once and checked.

use std::path::{Path, PathBuf};

use semmoe_tables::ModelInfo;
use serde::Deserialize;
use serde_json::Value;

use super::ModelError;

const KNOWN_ARCHITECTURES: &str = "Qwen3MoeForCausalLM";
/// A configuration is small; what is larger is not one.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Bounds every dimension, so that products of a few of them cannot overflow.
const MAX_DIMENSION: u64 = 1 << 24;

/// A checked model configuration.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelConfig {
    /// V: rows of the embedding.
    pub vocab_size: usize,
    /// H: width of the residual stream.
    pub hidden: usize,
    /// All layers.
    pub num_layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// The longest sequence, in tokens.
    pub max_positions: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Whether the output matrix is the embedding.
    pub tied_embeddings: bool,
    /// N: routed experts of an MoE layer.
    pub num_experts: usize,
    /// k: experts per token.
    pub top_k: usize,
    /// I: width of one routed expert.
    pub expert_width: usize,
    /// Width of the feed-forward part of a dense layer.
    pub dense_width: usize,
    /// Whether the k router weights are scaled to sum to 1.
    pub normalise_top_k: bool,
    /// The layer number of each MoE layer, ascending; its length is L.
    pub moe_layers: Vec<u16>,
    /// Tokens that end a text, by `config.json`.
    pub eos_token_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct RawConfig {
    #[serde(default)]
    architectures: Vec<String>,
    vocab_size: u64,
    hidden_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    max_position_embeddings: u64,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    tie_word_embeddings: bool,
    num_experts: u64,
    num_experts_per_tok: u64,
    moe_intermediate_size: u64,
    intermediate_size: u64,
    #[serde(default)]
    norm_topk_prob: bool,
    #[serde(default = "one")]
    decoder_sparse_step: u64,
    #[serde(default)]
    mlp_only_layers: Vec<u64>,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    eos_token_id: Option<Value>,
}

#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
}

const fn one() -> u64 {
    1
}

impl ModelConfig {
    /// Reads and checks `config.json` of a model directory.
    ///
    /// # Errors
    /// One sentence that names the file, the key, what was found and what was expected; an unknown architecture by name.
    pub fn load(model_dir: &Path) -> Result<Self, ModelError> {
        let path = model_dir.join("config.json");
        let text = super::checkpoint::read_small_file(&path, MAX_CONFIG_BYTES, "a model configuration")?;
        Self::parse(&text, &path)
    }

    /// Checks the bytes of a configuration; `path` is only for messages.
    ///
    /// # Errors
    /// As [`ModelConfig::load`].
    pub fn parse(json: &[u8], path: &Path) -> Result<Self, ModelError> {
        let not_json =
            |error: serde_json::Error| ModelError::Json { path: path.to_path_buf(), detail: error.to_string() };
        // The architecture first: another family's configuration should be told as that, not as a missing key.
        let value: Value = serde_json::from_slice(json).map_err(not_json)?;
        check_architecture(&value, path)?;
        let raw: RawConfig = serde_json::from_value(value).map_err(not_json)?;
        Checker { path }.check(&raw)
    }

    /// L: the number of MoE layers.
    #[must_use]
    pub fn num_moe_layers(&self) -> usize {
        self.moe_layers.len()
    }

    /// What tables and traces say about the model they belong to. `model` is the name clients know.
    #[must_use]
    pub fn model_info(&self, model: &str, tokenizer_sha256: Option<String>) -> ModelInfo {
        // Lossless: `check` bounds these by their types.
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

fn check_architecture(value: &Value, path: &Path) -> Result<(), ModelError> {
    let found = match value.get("architectures").and_then(Value::as_array) {
        Some(list) if list.iter().any(|a| a == KNOWN_ARCHITECTURES) => return Ok(()),
        Some(list) => list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", "),
        None => String::new(),
    };
    let found: String = found.chars().take(200).collect();
    Err(ModelError::Architecture {
        path: path.to_path_buf(),
        found: if found.is_empty() { "(none)".to_owned() } else { found },
        known: KNOWN_ARCHITECTURES,
    })
}

struct Checker<'a> {
    path: &'a Path,
}

impl Checker<'_> {
    fn check(&self, raw: &RawConfig) -> Result<ModelConfig, ModelError> {
        self.check_unsupported(raw)?;
        let heads = self.dimension("num_attention_heads", raw.num_attention_heads)?;
        let kv_heads =
            self.dimension("num_key_value_heads", raw.num_key_value_heads.unwrap_or(raw.num_attention_heads))?;
        if heads % kv_heads != 0 {
            let expected = format!("a divisor of num_attention_heads ({heads})");
            return Err(self.bad("num_key_value_heads", kv_heads, expected));
        }
        let hidden = self.dimension("hidden_size", raw.hidden_size)?;
        let head_dim = self.dimension("head_dim", raw.head_dim.unwrap_or((hidden / heads) as u64))?;
        if head_dim % 2 != 0 {
            return Err(self.bad("head_dim", head_dim, "an even number"));
        }
        let num_layers = self.bounded("num_hidden_layers", raw.num_hidden_layers, 4096)?;
        let num_experts = self.bounded("num_experts", raw.num_experts, u64::from(u16::MAX) - 1)?;
        let top_k = self.bounded("num_experts_per_tok", raw.num_experts_per_tok, raw.num_experts)?;
        Ok(ModelConfig {
            vocab_size: self.dimension("vocab_size", raw.vocab_size)?,
            hidden,
            num_layers,
            heads,
            kv_heads,
            head_dim,
            max_positions: self.dimension("max_position_embeddings", raw.max_position_embeddings)?,
            rms_norm_eps: self.epsilon(raw.rms_norm_eps)?,
            rope_theta: self.rope_theta(raw)?,
            tied_embeddings: raw.tie_word_embeddings,
            num_experts,
            top_k,
            expert_width: self.dimension("moe_intermediate_size", raw.moe_intermediate_size)?,
            dense_width: self.dimension("intermediate_size", raw.intermediate_size)?,
            normalise_top_k: raw.norm_topk_prob,
            moe_layers: self.moe_layers(raw, num_layers)?,
            eos_token_ids: self.eos(raw.eos_token_id.as_ref())?,
        })
    }

    /// What would silently compute something else than the checkpoint means.
    fn check_unsupported(&self, raw: &RawConfig) -> Result<(), ModelError> {
        debug_assert!(!raw.architectures.is_empty());
        if let Some(act) = raw.hidden_act.as_deref().filter(|act| *act != "silu") {
            return Err(self.bad("hidden_act", format!("{act:?}"), "\"silu\""));
        }
        if raw.attention_bias {
            return Err(self.bad("attention_bias", true, "false"));
        }
        if raw.use_sliding_window {
            return Err(self.bad("use_sliding_window", true, "false"));
        }
        if let Some(scaling) = raw.rope_scaling.as_ref().filter(|s| !s.is_null()) {
            let found: String = scaling.to_string().chars().take(200).collect();
            return Err(self.bad("rope_scaling", found, "null"));
        }
        let rope_type = raw.rope_parameters.as_ref().and_then(|p| p.rope_type.as_deref());
        if let Some(other) = rope_type.filter(|t| *t != "default") {
            return Err(self.bad("rope_parameters.rope_type", format!("{other:?}"), "\"default\""));
        }
        Ok(())
    }

    fn rope_theta(&self, raw: &RawConfig) -> Result<f64, ModelError> {
        let nested = raw.rope_parameters.as_ref().and_then(|p| p.rope_theta);
        let theta = raw.rope_theta.or(nested).unwrap_or(10_000.0);
        if theta.is_finite() && theta > 1.0 {
            Ok(theta)
        } else {
            Err(self.bad("rope_theta", theta, "a number above 1"))
        }
    }

    fn epsilon(&self, value: f64) -> Result<f32, ModelError> {
        if (0.0..1.0).contains(&value) {
            Ok(value as f32)
        } else {
            Err(self.bad("rms_norm_eps", value, "a number from 0 to 1"))
        }
    }

    fn moe_layers(&self, raw: &RawConfig, num_layers: usize) -> Result<Vec<u16>, ModelError> {
        let step = self.dimension("decoder_sparse_step", raw.decoder_sparse_step)? as u64;
        let layers: Vec<u16> = (0..num_layers as u16)
            .filter(|&layer| {
                let layer = u64::from(layer);
                !raw.mlp_only_layers.contains(&layer) && (layer + 1) % step == 0
            })
            .collect();
        if layers.is_empty() {
            return Err(self.bad("mlp_only_layers", "every layer", "at least one MoE layer"));
        }
        Ok(layers)
    }

    fn eos(&self, value: Option<&Value>) -> Result<Vec<u32>, ModelError> {
        let ids = match value {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(list)) => list.clone(),
            Some(single) => vec![single.clone()],
        };
        let parsed: Option<Vec<u32>> = ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
        parsed.ok_or_else(|| {
            let found: String = format!("{ids:?}").chars().take(200).collect();
            self.bad("eos_token_id", found, "a token id, a list of token ids, or null")
        })
    }

    fn dimension(&self, field: &'static str, value: u64) -> Result<usize, ModelError> {
        self.bounded(field, value, MAX_DIMENSION)
    }

    fn bounded(&self, field: &'static str, value: u64, most: u64) -> Result<usize, ModelError> {
        if (1..=most).contains(&value) {
            Ok(value as usize)
        } else {
            Err(self.bad(field, value, format!("1 to {most}")))
        }
    }

    fn bad(&self, field: &'static str, found: impl ToString, expected: impl Into<String>) -> ModelError {
        ModelError::Config {
            path: PathBuf::from(self.path),
            field,
            found: found.to_string(),
            expected: expected.into(),
        }
    }
}
