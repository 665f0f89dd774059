//! A checkpoint's weights as stored by one rank. A single block type covers all architectures, which differ in the
//! variants of its fields. L is a weight matrix: packed into panels on the CPU, row-major on a GPU.

use std::ops::Range;

use semmoe_tables::LayerIdx;

use super::ModelError;
use super::attention::Attention;
use super::checkpoint::{TensorData, TensorKind, bf16_to_f32};
use super::compute::{Arena, Linear, PanelType};
use super::mlp::{Mlp, Shared};

/// All of a rank's weights except its routed experts; E is the type of the embedding table.
pub(super) struct Weights<L = Linear, E = Embedding> {
    pub(super) embedding: E,
    pub(super) blocks: Vec<Block<L>>,
    pub(super) final_norm: Vec<f32>,
    pub(super) output: L,
}

impl<L, E> Weights<L, E> {
    /// Returns a layer's MoE weights, or `None` for a dense layer.
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

/// Moves packed weights into one arena, in the given order.
pub(super) fn settle(linears: Vec<&mut Linear>) {
    let mut arena = Arena::new(linears.iter().map(|linear| linear.arena_bytes()).sum());
    linears.into_iter().for_each(|linear| linear.settle(&mut arena));
}

/// Converts a checkpoint's weight matrices to a backend's format and stores them in its memory.
pub(super) trait Packer {
    type Matrix;
    /// The embedding table.
    type Table;

    /// Converts the embedding table, `[V, H]`.
    ///
    /// # Errors
    /// Fails if there is not enough memory.
    fn table(&self, data: TensorData<'_>, hidden: usize) -> Result<Self::Table, ModelError>;

    /// Packs the `kept` input columns of one or more weights with a common input, stacked vertically. Each weight is
    /// row-major `[any, inputs]`; the optional bias is `[outputs]`.
    ///
    /// # Errors
    /// Fails if there is not enough memory.
    fn pack(
        &self,
        parts: &[TensorData<'_>],
        inputs: usize,
        kept: Range<usize>,
        bias: Option<Vec<f32>>,
    ) -> Result<Self::Matrix, ModelError>;

    /// Packs the transpose of a row-major weight `[inputs, any]`.
    ///
    /// # Errors
    /// Fails if there is not enough memory.
    fn pack_transposed(&self, part: TensorData<'_>, inputs: usize) -> Result<Self::Matrix, ModelError>;

    /// Packs weights with all of their inputs and without a bias.
    ///
    /// # Errors
    /// Fails if there is not enough memory.
    fn pack_whole(&self, parts: &[TensorData<'_>], inputs: usize) -> Result<Self::Matrix, ModelError> {
        self.pack(parts, inputs, 0..inputs, None)
    }
}

/// Packs weights into panels for the CPU.
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

/// A layer's attention weights, for all heads or some.
pub(super) struct HeadWeights<L = Linear> {
    pub(super) attention: Attention<L>,
    /// The output projection.
    pub(super) out: L,
}

impl HeadWeights {
    /// Returns all packed weights in order of use.
    pub(super) fn linears(&mut self) -> Vec<&mut Linear> {
        let mut linears = self.attention.linears();
        linears.push(&mut self.out);
        linears
    }
}

/// The part of a layer that follows attention.
pub(super) enum FeedForward<L = Linear> {
    Dense(Mlp<L>),
    Moe(Box<Moe<L>>),
}

/// An MoE layer without its routed experts.
pub(super) struct Moe<L = Linear> {
    pub(super) layer: LayerIdx,
    /// `[N, H]`
    pub(super) router: L,
    /// `[N]`: a bias on the router's scores that affects selection but not weights.
    pub(super) correction: Option<Vec<f32>>,
    /// The shared expert, which every rank applies to its own tokens.
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

    /// Copies one token's row into `out`, which must be as wide as the row.
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
