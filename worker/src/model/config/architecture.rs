//! The supported architectures: their names, and the keys and tensors whose names differ between them.

use semmoe_tables::CheckpointConfig;

use crate::model::ModelError;

/// A model family, identified by its name under `architectures` in `config.json`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Architecture {
    /// `Qwen3MoeForCausalLM`
    Qwen3Moe,
    /// `Qwen2MoeForCausalLM`
    Qwen2Moe,
    /// `MixtralForCausalLM`
    Mixtral,
    /// `OlmoeForCausalLM`
    Olmoe,
    /// `DeepseekV2ForCausalLM`
    DeepseekV2,
    /// `DeepseekV3ForCausalLM`
    DeepseekV3,
}

/// Names of an MoE layer's parts in the checkpoint.
pub(in crate::model) struct MoeNames {
    /// The block with the router and the experts, relative to the layer.
    pub(in crate::model) block: &'static str,
    /// An expert's gate, up and down projections.
    pub(in crate::model) projections: [&'static str; 3],
    /// The shared expert, relative to the block.
    pub(in crate::model) shared: &'static str,
}

/// Names of the gate, up and down projections in every family's dense layers and shared experts.
pub(in crate::model) const GATED: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

impl Architecture {
    /// All supported architectures.
    pub const ALL: [Self; 6] =
        [Self::Qwen3Moe, Self::Qwen2Moe, Self::Mixtral, Self::Olmoe, Self::DeepseekV2, Self::DeepseekV3];

    /// The name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Qwen2Moe => "Qwen2MoeForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Olmoe => "OlmoeForCausalLM",
            Self::DeepseekV2 => "DeepseekV2ForCausalLM",
            Self::DeepseekV3 => "DeepseekV3ForCausalLM",
        }
    }

    /// Returns the first supported architecture that a configuration lists.
    pub(super) fn of(config: &CheckpointConfig) -> Result<Self, ModelError> {
        let listed = config.architectures();
        let known = listed.iter().find_map(|name| Self::ALL.into_iter().find(|known| known.name() == *name));
        known.ok_or_else(|| ModelError::Architecture {
            path: config.path().to_owned(),
            found: config.shown_architectures(),
            known: Self::ALL.map(Self::name).join(", "),
        })
    }

    /// Returns the configuration key for N, the number of experts.
    pub(super) fn experts_key(self) -> &'static str {
        match self {
            Self::Qwen3Moe | Self::Qwen2Moe | Self::Olmoe => "num_experts",
            Self::Mixtral => "num_local_experts",
            Self::DeepseekV2 | Self::DeepseekV3 => "n_routed_experts",
        }
    }

    /// Returns the configuration key for I, the width of an expert. Families without dense layers use the key for the
    /// dense width.
    pub(super) fn expert_width_key(self) -> &'static str {
        match self {
            Self::Mixtral | Self::Olmoe => "intermediate_size",
            _ => "moe_intermediate_size",
        }
    }

    pub(in crate::model) fn moe_names(self) -> MoeNames {
        match self {
            Self::Mixtral => {
                MoeNames { block: "block_sparse_moe", projections: ["w1", "w3", "w2"], shared: "shared_expert" }
            }
            Self::DeepseekV2 | Self::DeepseekV3 => {
                MoeNames { block: "mlp", projections: GATED, shared: "shared_experts" }
            }
            _ => MoeNames { block: "mlp", projections: GATED, shared: "shared_expert" },
        }
    }
}
