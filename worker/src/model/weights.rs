//! The weights that one rank keeps of a checkpoint. One block serves all architectures: differences are variants of a
//! field. L is a weight matrix: packed into panels for the CPU, row-major on a GPU.

use std::ops::Range;

use semmoe_tables::LayerIdx;

use super::ModelError;
use super::attention::Attention;
use super::checkpoint::{TensorData, TensorKind, bf16_to_f32};
use super::compute::{Arena, Linear, PanelType};
use super::mlp::{Mlp, Shared};

/// All weights of a rank except its routed experts; E is the embedding table.
pub(super) struct Weights<L = Linear, E = Embedding> {
    pub(super) embedding: E,
    pub(super) blocks: Vec<Block<L>>,
    pub(super) final_norm: Vec<f32>,
    pub(super) output: L,
}

impl<L, E> Weights<L, E> {
    /// A layer's experts, if it has any.
    pub(super) fn moe(&self, layer: usize) -> Option<&Moe<L>> {
        match &self.blocks[layer].feed_forward {
            FeedForward::Moe(moe) => Some(moe),
            FeedForward::Dense(_) => None,
        }
    }
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

/// Brings a checkpoint's weight matrices into a backend's memory and format.
pub(super) trait Packer {
    type Matrix;
    /// The embedding table.
    type Table;

    /// The embedding table, `[V, H]`.
    ///
    /// # Errors
    /// Too little memory.
    fn table(&self, data: TensorData<'_>, hidden: usize) -> Result<Self::Table, ModelError>;

    /// A range of the inputs of weights that share them, stacked vertically; each is row-major `[any, inputs]`.
    /// Optionally with a bias `[outputs]`.
    ///
    /// # Errors
    /// Too little memory.
    fn pack(
        &self,
        parts: &[TensorData<'_>],
        inputs: usize,
        kept: Range<usize>,
        bias: Option<Vec<f32>>,
    ) -> Result<Self::Matrix, ModelError>;

    /// The transpose of one weight, which is row-major `[inputs, any]`.
    ///
    /// # Errors
    /// Too little memory.
    fn pack_transposed(&self, part: TensorData<'_>, inputs: usize) -> Result<Self::Matrix, ModelError>;

    /// All of the inputs.
    ///
    /// # Errors
    /// Too little memory.
    fn pack_whole(&self, parts: &[TensorData<'_>], inputs: usize) -> Result<Self::Matrix, ModelError> {
        self.pack(parts, inputs, 0..inputs, None)
    }
}

/// Packs into panels for the CPU.
pub(super) struct Panels;

impl Packer for Panels {
    type Matrix = Linear;
    type Table = Embedding;

    fn table(&self, data: TensorData<'_>, _hidden: usize) -> Result<Embedding, ModelError> {
        Ok(Embedding::new(data))
    }

    fn pack(
        &self,
        parts: &[TensorData<'_>],
        inputs: usize,
        kept: Range<usize>,
        bias: Option<Vec<f32>>,
    ) -> Result<Linear, ModelError> {
        let packed = Linear::pack_columns(PanelType::Bf16, parts, inputs, kept);
        Ok(match bias {
            Some(bias) => packed.with_bias(bias),
            None => packed,
        })
    }

    fn pack_transposed(&self, part: TensorData<'_>, inputs: usize) -> Result<Linear, ModelError> {
        Ok(Linear::pack_transposed(part, inputs))
    }
}

/// One transformer layer.
pub(super) struct Block<L = Linear> {
    pub(super) input_norm: Vec<f32>,
    pub(super) heads: HeadWeights<L>,
    pub(super) post_norm: Vec<f32>,
    pub(super) feed_forward: FeedForward<L>,
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

/// The attention of a layer, with all heads or some.
pub(super) struct HeadWeights<L = Linear> {
    pub(super) attention: Attention<L>,
    /// The projection of the heads' output.
    pub(super) out: L,
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
pub(super) enum FeedForward<L = Linear> {
    Dense(Mlp<L>),
    Moe(Box<Moe<L>>),
}

/// An MoE layer without its routed experts.
pub(super) struct Moe<L = Linear> {
    pub(super) layer: LayerIdx,
    /// `[N, H]`
    pub(super) router: L,
    /// `[N]`: added to the router's scores only for the choice.
    pub(super) correction: Option<Vec<f32>>,
    /// Every rank has it, for its own tokens.
    pub(super) shared: Option<Shared<L>>,
}

/// The embedding table.
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
