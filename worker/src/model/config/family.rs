//! How each architecture's configuration is interpreted: its keys and defaults, and the settings that are rejected
//! because this worker would compute something else.

use semmoe_tables::{CheckpointConfig, ConfigError};
use serde_json::Value;

use super::architecture::Architecture;
use super::parts::{
    AttentionKind, GroupLimit, GroupScore, GroupedAttention, HeadNormKind, LatentAttention, RopeLayout, Router,
    Scoring, SharedExpert,
};

/// A configuration of a supported architecture.
#[derive(Clone, Copy)]
pub(super) struct Family<'a> {
    pub(super) architecture: Architecture,
    pub(super) fields: &'a CheckpointConfig,
}

impl Family<'_> {
    /// Rejects settings under which this worker would silently deviate from the model as trained.
    pub(super) fn check_unsupported(&self, max_positions: usize) -> Result<(), ConfigError> {
        let fields = self.fields;
        for key in ["quantization_config", "compression_config"] {
            let is_absent = fields.get(key).is_none();
            fields.require(is_absent, key, || "null: only bf16, f16 and f32 weights are supported".to_owned())?;
        }
        only(fields, "hidden_act", "silu")?;
        for key in ["attention_bias", "mlp_bias", "use_sliding_window"] {
            only(fields, key, false)?;
        }
        match self.architecture {
            // Every token attends to its whole past, so a sliding window must not be shorter than the context.
            Architecture::Mixtral => {
                let window = fields.get("sliding_window").map(|window| window.as_u64().unwrap_or(0));
                let fits = window.is_none_or(|window| window >= max_positions as u64);
                fields.require(fits, "sliding_window", || format!("null, or at least {max_positions}"))
            }
            Architecture::DeepseekV2 => {
                only(fields, "scoring_func", "softmax")?;
                only(fields, "moe_layer_freq", 1)?;
                // Implementations disagree on whether normalised weights are also scaled.
                only(fields, "norm_topk_prob", false)
            }
            Architecture::DeepseekV3 => {
                only(fields, "scoring_func", "sigmoid")?;
                only(fields, "topk_method", "noaux_tc")?;
                only(fields, "moe_layer_freq", 1)
            }
            _ => Ok(()),
        }
    }

    /// Returns the attention kind of every layer.
    pub(super) fn attention(&self, hidden: usize, heads: usize) -> Result<AttentionKind, ConfigError> {
        let fields = self.fields;
        let kv_heads = fields.optional_dimension("num_key_value_heads")?.unwrap_or(heads);
        let (norms, qkv_bias) = match self.architecture {
            Architecture::DeepseekV2 | Architecture::DeepseekV3 => return self.latent(heads, kv_heads),
            Architecture::Qwen3Moe => (HeadNormKind::PerHead, false),
            Architecture::Qwen2Moe => (HeadNormKind::None, fields.flag("qkv_bias", true)?),
            Architecture::Mixtral => (HeadNormKind::None, false),
            Architecture::Olmoe => (HeadNormKind::Whole, false),
        };
        fields.require(heads.is_multiple_of(kv_heads), "num_key_value_heads", || {
            format!("a divisor of num_attention_heads ({heads})")
        })?;
        let head_dim = match fields.optional_dimension("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(fields.unexpected("hidden_size", format!("a multiple of num_attention_heads ({heads})")));
            }
        };
        if !head_dim.is_multiple_of(2) {
            return Err(fields.bad("head_dim", head_dim, "an even number"));
        }
        let clip = match self.architecture {
            Architecture::Olmoe => fields.positive("clip_qkv")?.map(|clip| clip as f32),
            _ => None,
        };
        Ok(AttentionKind::Grouped(GroupedAttention { kv_heads, head_dim, norms, qkv_bias, clip }))
    }

    fn latent(&self, heads: usize, kv_heads: usize) -> Result<AttentionKind, ConfigError> {
        let fields = self.fields;
        fields.require(kv_heads == heads, "num_key_value_heads", || format!("num_attention_heads ({heads})"))?;
        let rope_dim: usize = fields.dimension("qk_rope_head_dim")?;
        fields.require(rope_dim.is_multiple_of(2), "qk_rope_head_dim", || "an even number".to_owned())?;
        Ok(AttentionKind::Latent(LatentAttention {
            query_rank: fields.optional_dimension("q_lora_rank")?,
            kv_rank: fields.dimension("kv_lora_rank")?,
            nope_dim: fields.dimension("qk_nope_head_dim")?,
            rope_dim,
            value_dim: fields.dimension("v_head_dim")?,
        }))
    }

    /// Returns how a head's elements are paired for rotation.
    pub(super) fn rope_layout(&self) -> Result<RopeLayout, ConfigError> {
        let pairs = match self.architecture {
            Architecture::DeepseekV2 => true,
            Architecture::DeepseekV3 => self.fields.flag("rope_interleave", true)?,
            _ => false,
        };
        Ok(if pairs { RopeLayout::Pairs } else { RopeLayout::Halves })
    }

    /// Returns the router of every MoE layer, which selects k of N experts.
    pub(super) fn router(&self, num_experts: usize, top_k: usize) -> Result<Router, ConfigError> {
        let fields = self.fields;
        let normalise = match self.architecture {
            Architecture::Mixtral => true,
            Architecture::DeepseekV2 => false,
            Architecture::DeepseekV3 => fields.flag("norm_topk_prob", true)?,
            _ => fields.flag("norm_topk_prob", false)?,
        };
        let softmax = Router { scoring: Scoring::Softmax, groups: None, normalise, scale: 1.0 };
        let scale = |absent: f64| Ok(fields.positive("routed_scaling_factor")?.unwrap_or(absent) as f32);
        match self.architecture {
            Architecture::DeepseekV2 => {
                let groups = match fields.text("topk_method")? {
                    None | Some("greedy") => None,
                    Some("group_limited_greedy") => Some(self.groups(num_experts, top_k, GroupScore::Best)?),
                    Some(_) => {
                        return Err(fields.unexpected("topk_method", "\"greedy\" or \"group_limited_greedy\""));
                    }
                };
                Ok(Router { groups, scale: scale(1.0)?, ..softmax })
            }
            Architecture::DeepseekV3 => {
                let groups = Some(self.groups(num_experts, top_k, GroupScore::TwoBest)?);
                Ok(Router { scoring: Scoring::CorrectedSigmoid, groups, normalise, scale: scale(2.5)? })
            }
            _ => Ok(softmax),
        }
    }

    fn groups(&self, num_experts: usize, top_k: usize, by: GroupScore) -> Result<GroupLimit, ConfigError> {
        let fields = self.fields;
        let (groups, kept): (usize, usize) = (fields.dimension("n_group")?, fields.dimension("topk_group")?);
        fields.require(num_experts.is_multiple_of(groups), "n_group", || {
            format!("a divisor of n_routed_experts ({num_experts})")
        })?;
        let size = num_experts / groups;
        let enough = by != GroupScore::TwoBest || size >= 2;
        fields.require(enough, "n_group", || "at least two experts per group".to_owned())?;
        fields.require(kept <= groups && kept * size >= top_k, "topk_group", || {
            let least = top_k.div_ceil(size);
            format!("{least} to {groups}, because {top_k} experts are selected from groups of {size}")
        })?;
        Ok(GroupLimit { groups, kept, by })
    }

    /// Returns the shared expert, if the model has one.
    pub(super) fn shared(&self, expert_width: usize) -> Result<Option<SharedExpert>, ConfigError> {
        match self.architecture {
            Architecture::Qwen2Moe => {
                let width = self.fields.dimension("shared_expert_intermediate_size")?;
                Ok(Some(SharedExpert { width, gated: true }))
            }
            Architecture::DeepseekV2 | Architecture::DeepseekV3 => {
                let experts: usize = self.fields.count("n_shared_experts")?;
                Ok((experts > 0).then_some(SharedExpert { width: experts * expert_width, gated: false }))
            }
            _ => Ok(None),
        }
    }
}

/// Rejects any value other than `expected`; the key may be absent.
pub(super) fn only(fields: &CheckpointConfig, key: &str, expected: impl Into<Value>) -> Result<(), ConfigError> {
    let expected = expected.into();
    let same = |value: &Value| *value == expected || (value.is_number() && value.as_f64() == expected.as_f64());
    fields.require(fields.get(key).is_none_or(same), key, || expected.to_string())
}
