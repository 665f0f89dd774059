//! Loads a checkpoint's tensors by name, checks them against the configuration and packs them.

use std::ops::Range;

use semmoe_tables::{ExpertId, LayerIdx};

use super::attention::{Attention, Heads};
use super::checkpoint::{Checkpoint, TensorData, TensorPlace};
use super::compute::PanelType;
use super::config::{AttentionKind, GATED, GroupedAttention, HeadNormKind, LatentAttention, Scoring};
use super::expert::{ExpertTypes, Experts, Place, SwitchRoom};
use super::grouped::{Grouped, HeadNorms, Projected};
use super::latent::Latent;
use super::mlp::{Mlp, Shared};
use super::slices::HeadSlice;
use super::weights::{Block, FeedForward, HeadWeights, Moe, Packer, Panels, Weights};
use super::{ModelConfig, ModelError};
use crate::ep::ExpertPlacement;

/// Reads one rank's weights.
pub(super) struct Loader<'a, P = Panels> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) config: &'a ModelConfig,
    /// The heads that the rank loads; the tensors of all heads are checked.
    pub(super) heads: HeadSlice,
    pub(super) packer: &'a P,
}

impl<'a, P: Packer> Loader<'a, P> {
    pub(super) fn load(&self) -> Result<Weights<P::Matrix, P::Table>, ModelError> {
        let (vocab, hidden) = (self.config.vocab_size, self.config.hidden);
        let embedding = self.checkpoint.tensor("model.embed_tokens.weight", &[vocab, hidden])?;
        let output = match self.config.tied_embeddings {
            true => embedding,
            false => self.checkpoint.tensor("lm_head.weight", &[vocab, hidden])?,
        };
        let blocks = (0..self.config.num_layers).map(|layer| self.block(layer)).collect::<Result<_, _>>()?;
        Ok(Weights {
            embedding: self.packer.table(embedding, hidden)?,
            blocks,
            final_norm: self.vector("model.norm.weight", hidden)?,
            output: self.packer.pack_whole(&[output], hidden)?,
        })
    }

    /// `[layers]`: attention only.
    pub(super) fn load_heads(&self) -> Result<Vec<HeadWeights<P::Matrix>>, ModelError> {
        (0..self.config.num_layers).map(|layer| self.heads(layer)).collect()
    }

    fn block(&self, layer: usize) -> Result<Block<P::Matrix>, ModelError> {
        let hidden = self.config.hidden;
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        Ok(Block {
            input_norm: self.vector(&name("input_layernorm"), hidden)?,
            heads: self.heads(layer)?,
            post_norm: self.vector(&name("post_attention_layernorm"), hidden)?,
            feed_forward: self.feed_forward(layer)?,
        })
    }

    fn heads(&self, layer: usize) -> Result<HeadWeights<P::Matrix>, ModelError> {
        let hidden = self.config.hidden;
        let prefix = format!("model.layers.{layer}.self_attn");
        let (attention, value_width) = match &self.config.attention {
            AttentionKind::Grouped(shape) => (Attention::Grouped(self.grouped(&prefix, shape)?), shape.head_dim),
            AttentionKind::Latent(shape) => (Attention::Latent(self.latent(&prefix, shape)?), shape.value_dim),
        };
        let (out_width, own) = (self.config.heads * value_width, self.heads.heads(self.config.heads));
        let attention_out = self.weight(&prefix, "o_proj", [hidden, out_width])?;
        let own = own.start * value_width..own.end * value_width;
        Ok(HeadWeights { attention, out: self.packer.pack(&[attention_out], out_width, own, None)? })
    }

    fn grouped(&self, prefix: &str, shape: &GroupedAttention) -> Result<Grouped<P::Matrix>, ModelError> {
        let ModelConfig { hidden, heads, rms_norm_eps, .. } = *self.config;
        let GroupedAttention { kv_heads, head_dim, .. } = *shape;
        let (query, key) = (heads * head_dim, kv_heads * head_dim);
        let elements = |heads: Range<usize>| heads.start * head_dim..heads.end * head_dim;
        let (own, own_kv) = (elements(self.heads.heads(heads)), elements(self.heads.kv_heads(kv_heads)));
        // A norm that spans all heads needs all of them, even if the rank stores only some.
        let (queries, keys) = match shape.norms {
            HeadNormKind::Whole => (0..query, 0..key),
            HeadNormKind::None | HeadNormKind::PerHead => (own.clone(), own_kv.clone()),
        };
        let projected = Projected {
            queries: queries.len(),
            keys: keys.len(),
            first_query: own.start - queries.start,
            first_key: own_kv.start - keys.start,
        };
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for (part, rows, kept) in [("q_proj", query, queries), ("k_proj", key, keys), ("v_proj", key, own_kv.clone())] {
            let weight = self.weight(prefix, part, [rows, hidden])?;
            weights.push(weight.part(kept.start * hidden..kept.end * hidden));
            if shape.qkv_bias {
                biases.extend_from_slice(&self.vector(&format!("{prefix}.{part}.bias"), rows)?[kept]);
            }
        }
        let qkv = self.packer.pack(&weights, hidden, 0..hidden, shape.qkv_bias.then_some(biases))?;
        let norms = |query: usize, key: usize| -> Result<Option<HeadNorms>, ModelError> {
            let norm = |part: &str, width| self.vector(&format!("{prefix}.{part}.weight"), width);
            Ok(Some(HeadNorms { query: norm("q_norm", query)?, key: norm("k_norm", key)?, eps: rms_norm_eps }))
        };
        let norms = match shape.norms {
            HeadNormKind::None => None,
            HeadNormKind::PerHead => norms(head_dim, head_dim)?,
            HeadNormKind::Whole => norms(query, key)?,
        };
        let scale = 1.0 / (head_dim as f32).sqrt();
        let group = own.len() / own_kv.len();
        let kv_heads = own_kv.len() / head_dim;
        let heads = Heads { kv_heads, group, key_width: head_dim, value_width: head_dim, scale };
        Ok(Grouped { heads, projected, qkv, norms, clip: shape.clip })
    }

    fn latent(&self, prefix: &str, shape: &LatentAttention) -> Result<Latent<P::Matrix>, ModelError> {
        let ModelConfig { hidden, heads, .. } = *self.config;
        let LatentAttention { kv_rank, nope_dim, rope_dim, value_dim, .. } = *shape;
        let tensor = |part: &str, shape: [usize; 2]| self.weight(prefix, part, shape);
        let kv_down = tensor("kv_a_proj_with_mqa", [kv_rank + rope_dim, hidden])?;
        let (queries, own) = (heads * shape.query_width(), self.heads.heads(heads));
        let own_queries = |all: TensorData<'a>, inputs: usize| {
            let head = shape.query_width() * inputs;
            all.part(own.start * head..own.end * head)
        };
        let (query_down, query_up) = match shape.query_rank {
            None => (own_queries(tensor("q_proj", [queries, hidden])?, hidden), None),
            Some(rank) => {
                let up = self.packer.pack_whole(&[own_queries(tensor("q_b_proj", [queries, rank])?, rank)], rank)?;
                let norm = self.vector(&format!("{prefix}.q_a_layernorm.weight"), rank)?;
                (tensor("q_a_proj", [rank, hidden])?, Some((norm, up)))
            }
        };
        let kv_up = tensor("kv_b_proj", [heads * (nope_dim + value_dim), kv_rank])?;
        let rows = |from: usize, count: usize| kv_up.part(from * kv_rank..(from + count) * kv_rank);
        let keys = |head: usize| self.packer.pack_transposed(rows(head * (nope_dim + value_dim), nope_dim), nope_dim);
        let values =
            |head: usize| self.packer.pack_whole(&[rows(head * (nope_dim + value_dim) + nope_dim, value_dim)], kv_rank);
        let stretched = self.config.rope.yarn.as_ref().map_or(1.0, |yarn| yarn.score_factor);
        let scale = (stretched / (shape.query_width() as f64).sqrt()) as f32;
        Ok(Latent {
            heads: Heads { kv_heads: 1, group: own.len(), key_width: kv_rank + rope_dim, value_width: kv_rank, scale },
            shape: shape.clone(),
            down: self.packer.pack_whole(&[query_down, kv_down], hidden)?,
            query_up,
            kv_norm: self.vector(&format!("{prefix}.kv_a_layernorm.weight"), kv_rank)?,
            absorb: own.clone().map(keys).collect::<Result<_, _>>()?,
            expand: own.map(values).collect::<Result<_, _>>()?,
        })
    }

    fn feed_forward(&self, layer: usize) -> Result<FeedForward<P::Matrix>, ModelError> {
        let below = format!("model.layers.{layer}");
        match self.config.moe_layers.iter().position(|&moe| usize::from(moe) == layer) {
            None => Ok(FeedForward::Dense(self.mlp(&format!("{below}.mlp"), GATED, self.config.dense_width)?)),
            Some(index) => Ok(FeedForward::Moe(Box::new(self.moe(&below, LayerIdx::new(index as u16))?))),
        }
    }

    /// Returns the element types shared by all experts, and checks every expert's tensors.
    pub(super) fn expert_types(&self) -> Result<ExpertTypes, ModelError> {
        let mut types = ExpertTypes { gate_up: PanelType::Bf16, down: PanelType::Bf16 };
        for layer in self.moe_layers() {
            for expert in (0..self.config.num_experts as u16).map(ExpertId::new) {
                let [gate, up, down] = self.expert_tensors(layer, expert)?;
                // A single expert that is not bf16 makes all of them f32, because experts can replace each other only
                // if their sizes are equal.
                if PanelType::of(&[gate, up]) == PanelType::F32 {
                    types.gate_up = PanelType::F32;
                }
                if PanelType::of(&[down]) == PanelType::F32 {
                    types.down = PanelType::F32;
                }
            }
        }
        Ok(types)
    }

    /// Loads the experts that the placement assigns to this rank in all layers, whole or as slices.
    pub(super) fn experts(
        &self,
        at: Place,
        placement: &ExpertPlacement,
        room: SwitchRoom<'_>,
    ) -> Result<Experts, ModelError> {
        let mut experts = Experts::new(self.config, at, placement, self.expert_types()?, room)?;
        for layer in self.moe_layers() {
            experts.load(layer, |expert| self.expert_tensors(layer, expert))?;
        }
        experts.settle();
        Ok(experts)
    }

    pub(super) fn moe_layers(&self) -> impl Iterator<Item = LayerIdx> + use<'a, P> {
        (0..self.config.num_moe_layers()).map(|layer| LayerIdx::new(layer as u16))
    }

    /// Gate, up, down.
    pub(super) fn expert_tensors(&self, layer: LayerIdx, expert: ExpertId) -> Result<[TensorData<'a>; 3], ModelError> {
        Ok(self.expert_places(layer, expert)?.map(|place| self.checkpoint.data(place)))
    }

    /// Locates an expert's gate, up and down tensors.
    pub(super) fn expert_places(&self, layer: LayerIdx, expert: ExpertId) -> Result<[TensorPlace; 3], ModelError> {
        let names = self.config.architecture.moe_names();
        let prefix = format!("model.layers.{}.{}.experts.{expert}", self.config.moe_layers[layer.index()], names.block);
        self.mlp_places(&prefix, names.projections, self.config.expert_width)
    }

    /// Loads the parts of an MoE layer that every rank stores: all but the routed experts.
    fn moe(&self, below: &str, layer: LayerIdx) -> Result<Moe<P::Matrix>, ModelError> {
        let ModelConfig { hidden, num_experts, .. } = *self.config;
        let names = self.config.architecture.moe_names();
        let block = format!("{below}.{}", names.block);
        let router = self.weight(&block, "gate", [num_experts, hidden])?;
        let correction = match self.config.router.scoring {
            Scoring::Softmax => None,
            Scoring::CorrectedSigmoid => {
                Some(self.vector(&format!("{block}.gate.e_score_correction_bias"), num_experts)?)
            }
        };
        let prefix = format!("{block}.{}", names.shared);
        let shared = self.config.shared.map(|shared| {
            let mlp = self.mlp(&prefix, GATED, shared.width)?;
            let gate = match shared.gated {
                false => None,
                true => Some(self.checkpoint.tensor(&format!("{prefix}_gate.weight"), &[1, hidden])?),
            };
            Ok(Shared { mlp, gate: gate.map(|gate| self.packer.pack_whole(&[gate], hidden)).transpose()? })
        });
        Ok(Moe { layer, router: self.packer.pack_whole(&[router], hidden)?, correction, shared: shared.transpose()? })
    }

    fn mlp(&self, prefix: &str, names: [&str; 3], width: usize) -> Result<Mlp<P::Matrix>, ModelError> {
        let [gate, up, down] = self.mlp_places(prefix, names, width)?.map(|place| self.checkpoint.data(place));
        let gate_up = self.packer.pack_whole(&[gate, up], self.config.hidden)?;
        Ok(Mlp { gate_up, down: self.packer.pack_whole(&[down], width)? })
    }

    /// Gate, up, down.
    fn mlp_places(
        &self,
        prefix: &str,
        [gate, up, down]: [&str; 3],
        width: usize,
    ) -> Result<[TensorPlace; 3], ModelError> {
        let hidden = self.config.hidden;
        let place = |part: &str, shape: [usize; 2]| self.checkpoint.place(&format!("{prefix}.{part}.weight"), &shape);
        Ok([place(gate, [width, hidden])?, place(up, [width, hidden])?, place(down, [hidden, width])?])
    }

    fn weight(&self, prefix: &str, part: &str, shape: [usize; 2]) -> Result<TensorData<'a>, ModelError> {
        self.checkpoint.tensor(&format!("{prefix}.{part}.weight"), &shape)
    }

    fn vector(&self, name: &str, width: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.checkpoint.tensor(name, &[width])?.to_vec())
    }
}
