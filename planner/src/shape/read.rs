//! A shape from a Hugging Face `config.json`. Keys and defaults are those of `transformers`.

use serde_json::{Map, Value};

use super::{Attention, Dtype, ModelShape, Precision, Window};
use crate::PlanError;
use crate::fields::{Fields, json};

/// A thousand times the largest published model.
const MAX_PARAMETERS: f64 = 1e15;

/// How an architecture names its dimensions, and the small tensors that it adds.
struct Family {
    name: &'static str,
    experts_key: &'static str,
    expert_width_key: &'static str,
    dense: DenseLayers,
    /// Extra elements of one attention layer.
    small: Small,
}

/// Which layers have no experts.
enum DenseLayers {
    None,
    /// `decoder_sparse_step` and `mlp_only_layers`.
    Step,
    /// `first_k_dense_replace`.
    First,
    /// All: a dense model, which is planned as TP and DP.
    All,
}

/// Norms and biases beside the two norms of every layer.
#[derive(Clone, Copy, PartialEq)]
enum Small {
    /// None.
    Plain,
    /// A norm of one head's size for queries and one for keys.
    HeadNorms,
    /// Norms over all heads.
    WholeNorms,
    /// Norms over all heads; a correction for each expert.
    Corrected,
    /// Biases of the query, key and value projections; a gate for the shared expert.
    QkvBias,
    /// Norms of the latents.
    LatentNorms,
    /// Norms of the latents; a correction for each expert.
    LatentNormsAndCorrection,
    /// Biases everywhere, a sink for each head.
    Biased,
}

const FAMILIES: &[Family] = &[
    family("Qwen3MoeForCausalLM", "num_experts", "moe_intermediate_size", DenseLayers::Step, Small::HeadNorms),
    family("Qwen2MoeForCausalLM", "num_experts", "moe_intermediate_size", DenseLayers::Step, Small::QkvBias),
    family("MixtralForCausalLM", "num_local_experts", "intermediate_size", DenseLayers::None, Small::Plain),
    family("OlmoeForCausalLM", "num_experts", "intermediate_size", DenseLayers::None, Small::WholeNorms),
    family(
        "DeepseekV2ForCausalLM",
        "n_routed_experts",
        "moe_intermediate_size",
        DenseLayers::First,
        Small::LatentNorms,
    ),
    family(
        "DeepseekV3ForCausalLM",
        "n_routed_experts",
        "moe_intermediate_size",
        DenseLayers::First,
        Small::LatentNormsAndCorrection,
    ),
    family("GptOssForCausalLM", "num_local_experts", "intermediate_size", DenseLayers::None, Small::Biased),
    family("MiniMaxM2ForCausalLM", "num_local_experts", "intermediate_size", DenseLayers::None, Small::Corrected),
    family("LlamaForCausalLM", "", "intermediate_size", DenseLayers::All, Small::Plain),
    family("Qwen3ForCausalLM", "", "intermediate_size", DenseLayers::All, Small::HeadNorms),
];

const fn family(
    name: &'static str,
    experts_key: &'static str,
    expert_width_key: &'static str,
    dense: DenseLayers,
    small: Small,
) -> Family {
    Family { name, experts_key, expert_width_key, dense, small }
}

impl ModelShape {
    /// Reads a `config.json`; `file` names it in errors.
    ///
    /// # Errors
    /// [`PlanError::Syntax`] if it is not JSON, [`PlanError::Key`] about an architecture that is not known or a
    /// dimension that is missing, out of range, or does not divide.
    pub fn from_config(file: &str, text: &str) -> Result<Self, PlanError> {
        let object = json(file, "JSON", text)?;
        let outer = Fields::of_json(file, &object);
        // Models that see or hear have the language model's dimensions in a section of their own.
        let inner = if outer.get("hidden_size").is_none() { outer.inner("text_config") } else { None };
        let fields = inner.unwrap_or(outer);
        let family = family_of(&fields)?;
        let (hidden, layers) = (fields.dimension("hidden_size")?, fields.dimension("num_hidden_layers")?);
        // A dense model is one expert that no layer has.
        let dense = matches!(family.dense, DenseLayers::All);
        let experts = if dense { 1 } else { fields.dimension(family.experts_key)? };
        let top_k = if dense { 1 } else { fields.dimension("num_experts_per_tok")? };
        if top_k > experts {
            return Err(fields.unexpected("num_experts_per_tok", format!("at most {} ({experts})", family.experts_key)));
        }
        let attention = attention(&fields, hidden)?;
        let expert_width = fields.dimension(family.expert_width_key)?;
        let moe_layers = moe_layers(&fields, family, layers)?;
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
                    fields.count("n_shared_experts")? * expert_width
                }
                _ => 0,
            },
            dense_width: if moe_layers < layers { fields.dimension("intermediate_size")? } else { 0 },
            small_parameters: 0,
            window: window(&fields, layers)?,
            precision: precision(&fields)?,
        };
        // Summed as floats: a wrong configuration must not overflow.
        let widths = 3.0 * (experts * expert_width + shape.shared_width + shape.dense_width) as f64;
        let layer = widths * hidden as f64 + shape.attention.parameters(hidden, 1) as f64;
        if layer * layers as f64 > MAX_PARAMETERS {
            return Err(fields.unexpected("num_hidden_layers", format!("at most {MAX_PARAMETERS:e} parameters in all")));
        }
        shape.small_parameters = small(&shape, family);
        Ok(shape)
    }
}

fn family_of(fields: &Fields<'_>) -> Result<&'static Family, PlanError> {
    let listed = fields.get("architectures").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let known = |name: &str| FAMILIES.iter().find(|family| family.name == name);
    let found = listed.iter().filter_map(Value::as_str).find_map(known);
    found.ok_or_else(|| {
        let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        fields.unexpected("architectures", format!("one of {}", names.join(", ")))
    })
}

fn attention(fields: &Fields<'_>, hidden: u64) -> Result<Attention, PlanError> {
    let heads = fields.dimension("num_attention_heads")?;
    if fields.get("kv_lora_rank").is_some() {
        return Ok(Attention::Latent {
            heads,
            query_rank: fields.get("q_lora_rank").map(|_| fields.dimension("q_lora_rank")).transpose()?,
            kv_rank: fields.dimension("kv_lora_rank")?,
            nope_dim: fields.dimension("qk_nope_head_dim")?,
            rope_dim: fields.dimension("qk_rope_head_dim")?,
            value_dim: fields.dimension("v_head_dim")?,
        });
    }
    let kv_heads = fields.dimension_or("num_key_value_heads", heads)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(fields.unexpected("num_key_value_heads", format!("a divisor of num_attention_heads ({heads})")));
    }
    if fields.get("head_dim").is_none() && !hidden.is_multiple_of(heads) {
        return Err(fields.unexpected("hidden_size", format!("a multiple of num_attention_heads ({heads})")));
    }
    Ok(Attention::Grouped { heads, kv_heads, head_dim: fields.dimension_or("head_dim", hidden / heads)? })
}

fn moe_layers(fields: &Fields<'_>, family: &Family, layers: u64) -> Result<u64, PlanError> {
    let (moe, key) = match family.dense {
        DenseLayers::All => return Ok(0),
        DenseLayers::None => (layers, "num_hidden_layers"),
        DenseLayers::First => (layers.saturating_sub(fields.count("first_k_dense_replace")?), "first_k_dense_replace"),
        DenseLayers::Step => {
            let step = fields.dimension_or("decoder_sparse_step", 1)?;
            let dense = fields.numbers("mlp_only_layers")?;
            let moe = |layer: &u64| (layer + 1).is_multiple_of(step) && !dense.contains(layer);
            ((0..layers).filter(moe).count() as u64, "decoder_sparse_step")
        }
    };
    if moe == 0 {
        return Err(fields.unexpected(key, "at least one layer with experts"));
    }
    Ok(moe)
}

/// GPT-OSS names the kind of each layer; without the list every layer has the window.
fn window(fields: &Fields<'_>, layers: u64) -> Result<Option<Window>, PlanError> {
    if fields.get("sliding_window").is_none() || !fields.flag("use_sliding_window", true)? {
        return Ok(None);
    }
    let tokens = fields.dimension("sliding_window")?;
    let windowed = match fields.get("layer_types").and_then(Value::as_array) {
        Some(kinds) => kinds.iter().filter(|kind| kind.as_str() == Some("sliding_attention")).count() as u64,
        None if fields.get("layer_types").is_none() => layers,
        None => return Err(fields.unexpected("layer_types", "a list of the kinds of layers")),
    };
    if windowed > layers {
        return Err(fields.unexpected("layer_types", format!("at most {layers} entries")));
    }
    Ok((windowed > 0).then_some(Window { layers: windowed, tokens }))
}

fn precision(fields: &Fields<'_>) -> Result<Precision, PlanError> {
    let key = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    let base = match fields.text(key)? {
        None | Some("bfloat16" | "float16") => Dtype::Bf16,
        Some("float32") => Dtype::F32,
        Some(_) => return Err(fields.unexpected(key, "bfloat16, float16 or float32")),
    };
    let uniform = Precision::uniform(base);
    let Some(Value::Object(quantized)) = fields.get("quantization_config") else { return Ok(uniform) };
    match quantized.get("quant_method").and_then(Value::as_str) {
        Some("fp8") => Ok(Precision { experts: Dtype::Fp8, dense: Dtype::Fp8, ..uniform }),
        Some("mxfp4") => Ok(Precision { experts: Dtype::Mxfp4, ..uniform }),
        // Attention, shared experts and dense layers are on its list of exceptions.
        Some("compressed-tensors") if group_bits(quantized) == Some(4) => {
            Ok(Precision { experts: Dtype::Int4, ..uniform })
        }
        Some("gptq" | "awq") if quantized.get("bits").and_then(Value::as_u64) == Some(4) => {
            Ok(Precision { experts: Dtype::Int4, dense: Dtype::Int4, ..uniform })
        }
        _ => Err(fields.unexpected(
            "quantization_config",
            "quant_method fp8, mxfp4, or gptq, awq or compressed-tensors with 4 bits; give other types with --weights",
        )),
    }
}

/// Of the one group of `compressed-tensors`.
fn group_bits(quantized: &Map<String, Value>) -> Option<u64> {
    let groups = quantized.get("config_groups")?.as_object().filter(|groups| groups.len() == 1)?;
    groups.values().next()?.get("weights")?.get("num_bits")?.as_u64()
}

/// Parameters of routers, norms, biases and sinks.
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
