//! Reads a shape from a Hugging Face `config.json`, with the keys and defaults of `transformers`.

use std::path::Path;

use semmoe_tables::{CheckpointConfig, ConfigError};
use serde_json::{Map, Value};

use super::{Attention, Dtype, ModelShape, Precision, Window};
use crate::PlanError;

/// Limit on parameters: a thousand times the largest published model.
const MAX_PARAMETERS: f64 = 1e15;

/// An architecture's configuration keys, and its additional small tensors.
struct Family {
    name: &'static str,
    /// Empty for a dense model, which can only be planned with TP and DP.
    experts_key: &'static str,
    expert_width_key: &'static str,
    /// Extra elements of one attention layer.
    small: Small,
}

/// Small tensors in addition to the two norms of every layer.
#[derive(Clone, Copy, PartialEq)]
enum Small {
    /// None.
    Plain,
    /// Two norms of head size, one for queries and one for keys.
    HeadNorms,
    /// Norms over all heads.
    WholeNorms,
    /// Norms over all heads, and a correction bias per expert.
    Corrected,
    /// Biases of the query, key and value projections, and a gate for the shared expert.
    QkvBias,
    /// Norms of the latents.
    LatentNorms,
    /// Norms of the latents, and a correction bias per expert.
    LatentNormsAndCorrection,
    /// Biases on all projections, and a sink per head.
    Biased,
}

const FAMILIES: &[Family] = &[
    family("Qwen3MoeForCausalLM", "num_experts", "moe_intermediate_size", Small::HeadNorms),
    family("Qwen2MoeForCausalLM", "num_experts", "moe_intermediate_size", Small::QkvBias),
    family("MixtralForCausalLM", "num_local_experts", "intermediate_size", Small::Plain),
    family("OlmoeForCausalLM", "num_experts", "intermediate_size", Small::WholeNorms),
    family("DeepseekV2ForCausalLM", "n_routed_experts", "moe_intermediate_size", Small::LatentNorms),
    family("DeepseekV3ForCausalLM", "n_routed_experts", "moe_intermediate_size", Small::LatentNormsAndCorrection),
    family("GptOssForCausalLM", "num_local_experts", "intermediate_size", Small::Biased),
    family("MiniMaxM2ForCausalLM", "num_local_experts", "intermediate_size", Small::Corrected),
    family("LlamaForCausalLM", "", "intermediate_size", Small::Plain),
    family("Qwen3ForCausalLM", "", "intermediate_size", Small::HeadNorms),
];

const fn family(name: &'static str, experts_key: &'static str, expert_width_key: &'static str, small: Small) -> Family {
    Family { name, experts_key, expert_width_key, small }
}

impl ModelShape {
    /// Reads a `config.json`; `file` names it in errors.
    ///
    /// # Errors
    /// [`PlanError::Syntax`] if the text is not JSON, [`PlanError::Key`] if the architecture is unknown, or a dimension
    /// is missing, out of range or not divisible.
    pub fn from_config(file: &str, text: &str) -> Result<Self, PlanError> {
        let fields = CheckpointConfig::parse(Path::new(file), text.as_bytes())?;
        let family = family_of(&fields)?;
        let (hidden, depth): (_, u16) = (fields.dimension("hidden_size")?, fields.dimension("num_hidden_layers")?);
        let layers = u64::from(depth);
        // A dense model is represented as one expert that no layer contains.
        let dense = family.experts_key.is_empty();
        let experts = if dense { 1 } else { fields.dimension(family.experts_key)? };
        let top_k = if dense { 1 } else { fields.bounded("num_experts_per_tok", experts)? };
        let attention = attention(&fields, hidden)?;
        let expert_width: u64 = fields.dimension(family.expert_width_key)?;
        let moe_layers = if dense { 0 } else { fields.moe_layers(depth)?.len() as u64 };
        let mut shape = Self {
            architecture: family.name.to_owned(),
            hidden,
            layers,
            moe_layers,
            vocab: fields.dimension("vocab_size")?,
            tied_embeddings: fields.flag("tie_word_embeddings", false)?,
            attention,
            experts,
            top_k,
            expert_width,
            shared_width: match family.small {
                Small::QkvBias => fields.dimension("shared_expert_intermediate_size")?,
                Small::LatentNorms | Small::LatentNormsAndCorrection => {
                    fields.count::<u64>("n_shared_experts")? * expert_width
                }
                _ => 0,
            },
            dense_width: if moe_layers < layers { fields.dimension("intermediate_size")? } else { 0 },
            small_parameters: 0,
            window: window(&fields, layers)?,
            precision: precision(&fields)?,
        };
        // Uses floats, so that an invalid configuration cannot overflow.
        let widths = 3.0 * (experts * expert_width + shape.shared_width + shape.dense_width) as f64;
        let layer = widths * hidden as f64 + shape.attention.parameters(hidden, 1) as f64;
        if layer * layers as f64 > MAX_PARAMETERS {
            let expected = format!("at most {MAX_PARAMETERS:e} parameters in total");
            return Err(fields.unexpected("num_hidden_layers", expected).into());
        }
        shape.small_parameters = small(&shape, family);
        Ok(shape)
    }
}

fn family_of(fields: &CheckpointConfig) -> Result<&'static Family, ConfigError> {
    let known = |name: &&str| FAMILIES.iter().find(|family| family.name == *name);
    fields.architectures().iter().find_map(known).ok_or_else(|| {
        let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        fields.unexpected("architectures", format!("one of {}", names.join(", ")))
    })
}

fn attention(fields: &CheckpointConfig, hidden: u64) -> Result<Attention, ConfigError> {
    let heads: u64 = fields.dimension("num_attention_heads")?;
    if fields.get("kv_lora_rank").is_some() {
        return Ok(Attention::Latent {
            heads,
            query_rank: fields.optional_dimension("q_lora_rank")?,
            value_dim: fields.dimension("v_head_dim")?,
            rope_dim: fields.dimension("qk_rope_head_dim")?,
            nope_dim: fields.dimension("qk_nope_head_dim")?,
            kv_rank: fields.dimension("kv_lora_rank")?,
        });
    }
    let kv_heads = fields.optional_dimension("num_key_value_heads")?.unwrap_or(heads);
    fields.require(heads.is_multiple_of(kv_heads), "num_key_value_heads", || {
        format!("a divisor of num_attention_heads ({heads})")
    })?;
    let head_dim = fields.optional_dimension("head_dim")?;
    fields.require(head_dim.is_some() || hidden.is_multiple_of(heads), "hidden_size", || {
        format!("a multiple of num_attention_heads ({heads})")
    })?;
    Ok(Attention::Grouped { heads, kv_heads, head_dim: head_dim.unwrap_or(hidden / heads) })
}

/// Reads the sliding window. GPT-OSS lists the kind of each layer; without a list every layer has the window.
fn window(fields: &CheckpointConfig, layers: u64) -> Result<Option<Window>, ConfigError> {
    if fields.get("sliding_window").is_none() || !fields.flag("use_sliding_window", true)? {
        return Ok(None);
    }
    let tokens = fields.dimension("sliding_window")?;
    let kinds = fields.optional("layer_types", "a list of layer kinds", Value::as_array)?;
    let has_window = |kind: &&Value| kind.as_str() == Some("sliding_attention");
    let windowed = kinds.map_or(layers, |kinds| kinds.iter().filter(has_window).count() as u64);
    fields.require(windowed <= layers, "layer_types", || format!("at most {layers} entries"))?;
    Ok((windowed > 0).then_some(Window { layers: windowed, tokens }))
}

fn precision(fields: &CheckpointConfig) -> Result<Precision, ConfigError> {
    let base = match fields.dtype()? {
        None | Some((_, "bfloat16" | "float16")) => Dtype::Bf16,
        Some((_, "float32")) => Dtype::F32,
        Some((key, _)) => return Err(fields.unexpected(key, "bfloat16, float16 or float32")),
    };
    let uniform = Precision::uniform(base);
    let key = if fields.get("compression_config").is_some() { "compression_config" } else { "quantization_config" };
    let Some(quantized) = fields.optional(key, "an object or null", Value::as_object)? else { return Ok(uniform) };
    match quantized.get("quant_method").and_then(Value::as_str) {
        Some("fp8") => Ok(Precision { experts: Dtype::Fp8, dense: Dtype::Fp8, ..uniform }),
        Some("mxfp4") => Ok(Precision { experts: Dtype::Mxfp4, ..uniform }),
        // Attention, shared experts and dense layers are exempt from quantization.
        Some("compressed-tensors") if group_bits(quantized) == Some(4) => {
            Ok(Precision { experts: Dtype::Int4, ..uniform })
        }
        Some("gptq" | "awq") if quantized.get("bits").and_then(Value::as_u64) == Some(4) => {
            Ok(Precision { experts: Dtype::Int4, dense: Dtype::Int4, ..uniform })
        }
        _ => Err(fields.unexpected(
            key,
            "quant_method fp8, mxfp4, or gptq, awq or compressed-tensors with 4 bits; pass other types with --weights",
        )),
    }
}

/// Returns the bits of the only group in a `compressed-tensors` configuration.
fn group_bits(quantized: &Map<String, Value>) -> Option<u64> {
    let groups = quantized.get("config_groups")?.as_object().filter(|groups| groups.len() == 1)?;
    groups.values().next()?.get("weights")?.get("num_bits")?.as_u64()
}

/// Counts the parameters of routers, norms, biases and sinks.
fn small(shape: &ModelShape, family: &Family) -> u64 {
    let (hidden, experts) = (shape.hidden, shape.experts);
    let (attention, moe) = match (shape.attention, family.small) {
        (Attention::Grouped { head_dim, .. }, Small::HeadNorms) => (2 * head_dim, 0),
        (Attention::Grouped { heads, kv_heads, head_dim }, Small::WholeNorms) => ((heads + kv_heads) * head_dim, 0),
        (Attention::Grouped { heads, kv_heads, head_dim }, Small::Corrected) => {
            ((heads + kv_heads) * head_dim, experts)
        }
        (Attention::Grouped { heads, kv_heads, head_dim }, Small::QkvBias) => {
            ((heads + 2 * kv_heads) * head_dim, hidden)
        }
        (Attention::Grouped { heads, kv_heads, head_dim }, Small::Biased) => {
            ((heads + 2 * kv_heads) * head_dim + hidden + heads, experts + experts * (2 * shape.expert_width + hidden))
        }
        (Attention::Latent { query_rank, kv_rank, .. }, small) => {
            (query_rank.unwrap_or(0) + kv_rank, if small == Small::LatentNormsAndCorrection { experts } else { 0 })
        }
        _ => (0, 0),
    };
    hidden + shape.layers * (attention + 2 * hidden) + shape.moe_layers * (moe + hidden * experts)
}
