//! Memory for a step's rows, all of which is allocated when the model is loaded.

use semmoe_kernels::Element;
use semmoe_kernels_cuda::compute::{CandidateAsk, CandidateRow};
use semmoe_kernels_cuda::{Buffer, GpuError};

use super::attention::{AttentionBuffers, grouped};
use super::experts::DevicePairs;
use super::matrix::DeviceMatrix;
use super::memory::Layout;
use super::rows::RowPlaces;
use super::{GpuSettings, SharedAccelerator};
use crate::model::ModelConfig;
use crate::model::weights::{FeedForward, HeadWeights, Weights};

/// Memory for a step's activations and lists.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    pub(super) tokens: Buffer,
    pub(super) places: Buffer,
    pub(super) residual: Buffer,
    pub(super) other_residual: Buffer,
    pub(super) normed: Buffer,
    pub(super) added: Buffer,
    pub(super) qkv: Buffer,
    pub(super) attended: Buffer,
    pub(super) attention: AttentionBuffers,
    pub(super) router_logits: Buffer,
    pub(super) routed: Buffer,
    /// `[MoE layers, rows, k]`
    pub(super) kept: Buffer,
    pub(super) pairs: Buffer,
    /// `[pairs or rows, width]`
    pub(super) product: Buffer,
    /// `[pairs, H]`
    pub(super) results: Buffer,
    pub(super) shared: Buffer,
    pub(super) gates: Buffer,
    pub(super) wanted: Buffer,
    pub(super) logits: Buffer,
    pub(super) best: Buffer,
    pub(super) asks: Buffer,
    pub(super) found: Buffer,
}

/// Row widths in elements, each the maximum over all layers.
#[derive(Clone, Copy, Default)]
pub(super) struct Widths {
    hidden: usize,
    vocab: usize,
    experts: usize,
    top_k: usize,
    moe_layers: usize,
    max_positions: usize,
    /// Width of the query, key and value projection.
    qkv: usize,
    /// Total width of all heads.
    heads: usize,
    /// Intermediate width of a dense layer or a shared expert.
    dense: usize,
    /// Intermediate width of a whole expert.
    expert: usize,
}

impl Widths {
    pub(super) fn of(
        config: &ModelConfig,
        weights: &Weights<DeviceMatrix, Buffer>,
        other: &Option<Vec<HeadWeights<DeviceMatrix>>>,
    ) -> Self {
        let mut widths = Self {
            hidden: config.hidden,
            vocab: config.vocab_size,
            experts: config.num_experts,
            top_k: config.top_k,
            moe_layers: config.num_moe_layers(),
            max_positions: config.max_positions,
            expert: config.expert_width,
            ..Self::default()
        };
        for heads in weights.blocks.iter().map(|block| &block.heads).chain(other.iter().flatten()) {
            if let Ok(grouped) = grouped(&heads.attention) {
                widths.qkv = widths.qkv.max(grouped.qkv.outputs);
                widths.heads = widths.heads.max(heads.out.inputs);
            }
        }
        for block in &weights.blocks {
            let dense = match &block.feed_forward {
                FeedForward::Dense(mlp) => mlp.down.inputs,
                FeedForward::Moe(moe) => moe.shared.as_ref().map_or(0, |shared| shared.mlp.down.inputs),
            };
            widths.dense = widths.dense.max(dense);
        }
        widths
    }
}

impl Buffers {
    /// Allocates buffers for steps in a unit with `ranks` ranks, and `scratch` bytes for attention.
    pub(super) fn new<T: Element>(
        widths: Widths,
        settings: &GpuSettings,
        ranks: usize,
        scratch: u64,
        gpu: &SharedAccelerator,
    ) -> Result<Self, GpuError> {
        let Widths { hidden, vocab, experts, top_k, moe_layers, max_positions, qkv, heads, dense, expert } = widths;
        let (rows, wanted) = (settings.step_tokens, settings.running);
        let (received, pairs) = (ranks * rows, ranks * rows * top_k);
        let mut layout = Layout::default();
        layout.add::<u32>(rows);
        layout.add::<u32>(RowPlaces::max_words(rows, wanted, max_positions));
        [hidden; 4].into_iter().for_each(|width| layout.add::<T>(rows * width));
        [qkv, heads, heads].into_iter().for_each(|width| layout.add::<T>(rows * width));
        layout.add::<u8>(scratch as usize);
        layout.add::<f32>(rows * experts);
        layout.add::<u32>(rows * top_k * 2);
        layout.add::<u16>(moe_layers * rows * top_k);
        layout.add::<u32>(DevicePairs::max_words(pairs, received, experts));
        layout.add::<T>((pairs * expert).max(rows * dense));
        layout.add::<T>(pairs * hidden);
        layout.add::<T>(rows * hidden);
        layout.add::<f32>(rows);
        layout.add::<u32>(wanted);
        layout.add::<f32>(wanted * vocab);
        layout.add::<u32>(wanted);
        layout.add::<CandidateAsk>(wanted);
        layout.add::<CandidateRow>(wanted);
        let mut pieces = layout.allocate(gpu)?;
        let mut next = || pieces.next().unwrap_or_default();
        Ok(Self {
            tokens: next(),
            places: next(),
            residual: next(),
            other_residual: next(),
            normed: next(),
            added: next(),
            qkv: next(),
            attended: next(),
            attention: AttentionBuffers { queries: next(), scratch: next() },
            router_logits: next(),
            routed: next(),
            kept: next(),
            pairs: next(),
            product: next(),
            results: next(),
            shared: next(),
            gates: next(),
            wanted: next(),
            logits: next(),
            best: next(),
            asks: next(),
            found: next(),
        })
    }
}
