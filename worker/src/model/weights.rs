//! A checkpoint's tensors by name, checked against the configuration and packed. One block for all architectures: what
//! differs between them is a variant of a field.

use semmoe_tables::{ExpertId, GroupId, LayerIdx, Placement, RankId};

use super::attention::HeadNorms;
use super::checkpoint::{Checkpoint, TensorData, bf16_to_f32};
use super::compute::Linear;
use super::mlp::Mlp;
use super::{ModelConfig, ModelError};

/// All weights that one rank keeps.
pub(super) struct Weights {
    pub(super) embedding: Embedding,
    pub(super) blocks: Vec<Block>,
    pub(super) final_norm: Vec<f32>,
    pub(super) output: Linear,
}

/// One transformer layer.
pub(super) struct Block {
    pub(super) input_norm: Vec<f32>,
    pub(super) qkv: Linear,
    pub(super) head_norms: HeadNorms,
    pub(super) attention_out: Linear,
    pub(super) post_norm: Vec<f32>,
    pub(super) feed_forward: FeedForward,
}

/// What follows the attention of a layer.
pub(super) enum FeedForward {
    Dense(Mlp),
    Moe(Moe),
}

/// An MoE layer as one rank has it.
pub(super) struct Moe {
    pub(super) layer: LayerIdx,
    /// `[N, H]`
    pub(super) router: Linear,
    /// This rank's experts in ascending id.
    pub(super) experts: Vec<Mlp>,
}

/// The rows of the vocabulary.
pub(super) enum Embedding {
    Bf16(Vec<u16>),
    F32(Vec<f32>),
}

impl Embedding {
    fn new(data: TensorData<'_>) -> Self {
        match data {
            TensorData::Bf16(values) => Self::Bf16(values.iter().map(|v| u16::from_le_bytes(*v)).collect()),
            TensorData::F32(_) => Self::F32(data.to_vec()),
        }
    }

    /// Copies one token's row; its width is `out`'s.
    pub(super) fn read(&self, token: u32, out: &mut [f32]) {
        let start = token as usize * out.len();
        match self {
            Self::Bf16(values) => {
                for (out, bits) in out.iter_mut().zip(&values[start..]) {
                    *out = bf16_to_f32(*bits);
                }
            }
            Self::F32(values) => out.copy_from_slice(&values[start..][..out.len()]),
        }
    }
}

/// Reads one rank's weights.
pub(super) struct Loader<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) config: &'a ModelConfig,
    pub(super) placement: &'a Placement,
    pub(super) rank: RankId,
}

impl Loader<'_> {
    pub(super) fn load(&self) -> Result<Weights, ModelError> {
        let (vocab, hidden) = (self.config.vocab_size, self.config.hidden);
        let embedding = self.checkpoint.tensor("model.embed_tokens.weight", &[vocab, hidden])?;
        let output = match self.config.tied_embeddings {
            true => embedding,
            false => self.checkpoint.tensor("lm_head.weight", &[vocab, hidden])?,
        };
        let blocks = (0..self.config.num_layers).map(|layer| self.block(layer)).collect::<Result<_, _>>()?;
        Ok(Weights {
            embedding: Embedding::new(embedding),
            blocks,
            final_norm: self.vector("model.norm.weight".to_owned(), hidden)?,
            output: Linear::pack(&[output], hidden),
        })
    }

    fn block(&self, layer: usize) -> Result<Block, ModelError> {
        let ModelConfig { hidden, heads, kv_heads, head_dim, .. } = *self.config;
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let tensor = |part: &str, shape: [usize; 2]| self.checkpoint.tensor(&name(part), &shape);
        let qkv = [
            tensor("self_attn.q_proj", [heads * head_dim, hidden])?,
            tensor("self_attn.k_proj", [kv_heads * head_dim, hidden])?,
            tensor("self_attn.v_proj", [kv_heads * head_dim, hidden])?,
        ];
        let attention_out = tensor("self_attn.o_proj", [hidden, heads * head_dim])?;
        Ok(Block {
            input_norm: self.vector(name("input_layernorm"), hidden)?,
            qkv: Linear::pack(&qkv, hidden),
            head_norms: HeadNorms {
                query: self.vector(name("self_attn.q_norm"), head_dim)?,
                key: self.vector(name("self_attn.k_norm"), head_dim)?,
            },
            attention_out: Linear::pack(&[attention_out], heads * head_dim),
            post_norm: self.vector(name("post_attention_layernorm"), hidden)?,
            feed_forward: self.feed_forward(layer)?,
        })
    }

    fn feed_forward(&self, layer: usize) -> Result<FeedForward, ModelError> {
        let prefix = format!("model.layers.{layer}.mlp");
        match self.config.moe_layers.iter().position(|&moe| usize::from(moe) == layer) {
            None => {
                let tensors = self.mlp_tensors(&prefix, self.config.dense_width)?;
                Ok(FeedForward::Dense(self.pack_mlp(&tensors, self.config.dense_width)))
            }
            Some(index) => Ok(FeedForward::Moe(self.moe(&prefix, LayerIdx::new(index as u16))?)),
        }
    }

    /// Every expert is checked, this rank's are kept.
    fn moe(&self, prefix: &str, layer: LayerIdx) -> Result<Moe, ModelError> {
        let ModelConfig { hidden, num_experts, expert_width, .. } = *self.config;
        let router = self.checkpoint.tensor(&format!("{prefix}.gate.weight"), &[num_experts, hidden])?;
        let here = GroupId::new(self.rank.get());
        let mut experts = Vec::new();
        for expert in 0..num_experts as u16 {
            let tensors = self.mlp_tensors(&format!("{prefix}.experts.{expert}"), expert_width)?;
            if self.placement.group_of(layer, ExpertId::new(expert)) == here {
                experts.push(self.pack_mlp(&tensors, expert_width));
            }
        }
        Ok(Moe { layer, router: Linear::pack(&[router], hidden), experts })
    }

    /// Gate, up, down.
    fn mlp_tensors(&self, prefix: &str, width: usize) -> Result<[TensorData<'_>; 3], ModelError> {
        let hidden = self.config.hidden;
        let tensor = |part: &str, shape: [usize; 2]| self.checkpoint.tensor(&format!("{prefix}.{part}.weight"), &shape);
        Ok([
            tensor("gate_proj", [width, hidden])?,
            tensor("up_proj", [width, hidden])?,
            tensor("down_proj", [hidden, width])?,
        ])
    }

    fn pack_mlp(&self, [gate, up, down]: &[TensorData<'_>; 3], width: usize) -> Mlp {
        Mlp { gate_up: Linear::pack(&[*gate, *up], self.config.hidden), down: Linear::pack(&[*down], width) }
    }

    fn vector(&self, name: String, width: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.checkpoint.tensor(&name, &[width])?.to_vec())
    }
}
