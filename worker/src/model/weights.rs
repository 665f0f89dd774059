//! The weights that one rank keeps of a checkpoint. One block serves all architectures: differences are variants of a
//! field.

use semmoe_tables::LayerIdx;

use super::attention::Attention;
use super::checkpoint::{TensorData, TensorKind, bf16_to_f32};
use super::compute::{Arena, Linear};
use super::mlp::{Mlp, Shared};

/// All weights that one rank keeps but its routed experts.
pub(super) struct Weights {
    pub(super) embedding: Embedding,
    pub(super) blocks: Vec<Block>,
    pub(super) final_norm: Vec<f32>,
    pub(super) output: Linear,
}

impl Weights {
    /// Moves all packed weights into one arena, in the order in which a step reads them.
    pub(super) fn settle(&mut self) {
        let mut linears: Vec<&mut Linear> = self.blocks.iter_mut().flat_map(Block::linears).collect();
        linears.push(&mut self.output);
        settle(linears);
    }
}

/// Moves packed weights into one arena, in this order.
pub(super) fn settle(linears: Vec<&mut Linear>) {
    let mut arena = Arena::new(linears.iter().map(|linear| linear.arena_bytes()).sum());
    linears.into_iter().for_each(|linear| linear.settle(&mut arena));
}

/// One transformer layer.
pub(super) struct Block {
    pub(super) input_norm: Vec<f32>,
    pub(super) heads: HeadWeights,
    pub(super) post_norm: Vec<f32>,
    pub(super) feed_forward: FeedForward,
}

impl Block {
    fn linears(&mut self) -> Vec<&mut Linear> {
        let mut linears = self.heads.linears();
        match &mut self.feed_forward {
            FeedForward::Dense(mlp) => linears.extend(mlp.linears()),
            FeedForward::Moe(moe) => {
                let moe = &mut **moe;
                linears.push(&mut moe.router);
                if let Some(shared) = &mut moe.shared {
                    linears.extend(shared.mlp.linears());
                    linears.extend(&mut shared.gate);
                }
            }
        }
        linears
    }
}

/// The attention of a layer, of all heads or of some.
pub(super) struct HeadWeights {
    pub(super) attention: Attention,
    /// The projection of the heads' output.
    pub(super) out: Linear,
}

impl HeadWeights {
    /// All packed weights, in the order in which they are used.
    pub(super) fn linears(&mut self) -> Vec<&mut Linear> {
        let mut linears = self.attention.linears();
        linears.push(&mut self.out);
        linears
    }
}

/// The part of a layer after its attention.
pub(super) enum FeedForward {
    Dense(Mlp),
    Moe(Box<Moe>),
}

/// An MoE layer without its routed experts.
pub(super) struct Moe {
    pub(super) layer: LayerIdx,
    /// `[N, H]`
    pub(super) router: Linear,
    /// `[N]`: added to the router's scores for the choice alone.
    pub(super) correction: Option<Vec<f32>>,
    /// Every rank has it, for its own tokens.
    pub(super) shared: Option<Shared>,
}

/// The rows of the vocabulary.
pub(super) enum Embedding {
    Bf16(Vec<u16>),
    F32(Vec<f32>),
}

impl Embedding {
    pub(super) fn new(data: TensorData<'_>) -> Self {
        match data.kind {
            TensorKind::Bf16 => Self::Bf16(data.bytes.as_chunks().0.iter().map(|v| u16::from_le_bytes(*v)).collect()),
            TensorKind::F16 | TensorKind::F32 => Self::F32(data.to_vec()),
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
