//! Runs a step on the CPU, entirely in f32, with packed weights.

use std::mem::swap;
use std::sync::Arc;

use super::attention::{AttentionScratch, AttentionStep};
use super::backend::{ComputeBackend, LayerStep, RowLists, WantedRows};
use super::checkpoint::Checkpoint;
use super::compute::{add, rms_norm};
use super::expert::{Place, SwitchRoom};
use super::layout::{ExpertRoom, HeadSlices};
use super::load::Loader;
use super::mlp::MlpScratch;
use super::probe::Probe;
use super::rope::RotaryTable;
use super::router::{Choice, RouterScratch};
use super::step::{ItemResult, StepOutput};
use super::streamed::{RankExperts, StreamedExperts};
use super::weights::{FeedForward, HeadWeights, Panels, Weights, settle};
use super::{ModelConfig, ModelError};
use crate::ep::{AllRows, ExpertPlacement, Norm, OwnRows, RoutedBatch, UnitError};

/// A rank's weights and activations in host memory.
pub(super) struct CpuBackend {
    config: Arc<ModelConfig>,
    weights: Weights,
    /// Head weights for the other attention layouts that the rank can switch to, each `[layers]`.
    others: Vec<Vec<HeadWeights>>,
    pub(super) experts: RankExperts,
    pub(super) peers: Peers,
    angles: RotaryTable,
    scratch: Scratch,
}

/// Ranks whose memory this rank can map to exchange experts.
#[derive(Debug)]
pub(super) enum Peers {
    /// Ranks on this host; their buffers will be mapped at the first switch.
    OnHost(Vec<usize>),
    /// The buffers are mapped, and the checksums of all experts are known.
    Mapped,
}

/// A step's buffers, reused by the next step.
#[derive(Default)]
struct Scratch {
    /// `[rows, H]`: the residual stream; between SRS and SAG, only this rank's rows.
    residual: Vec<f32>,
    /// `[rows, H]` or `[own rows, H]`: the second of the residual stream's two buffers.
    other_residual: Vec<f32>,
    /// `[rows, H]`
    normed: Vec<f32>,
    /// `[rows, H]`: a sublayer's output before it is added to the residual stream.
    added: Vec<f32>,
    /// `[rows, heads x value width]`
    attended: Vec<f32>,
    /// `[rows, N]`
    router_logits: Vec<f32>,
    attention: AttentionScratch,
    router: RouterScratch,
    mlp: MlpScratch,
}

impl CpuBackend {
    pub(super) fn load(
        checkpoint: &Checkpoint,
        config: &Arc<ModelConfig>,
        at: Place,
        slices: &HeadSlices,
        placement: &ExpertPlacement,
        room: ExpertRoom,
        groups: &[usize],
    ) -> Result<Self, ModelError> {
        let loader = |heads| Loader { checkpoint, config, heads, packer: &Panels };
        let mut weights = loader(slices.start).load()?;
        weights.settle();
        let others = slices.other.iter().chain(&slices.in_groups).map(|&heads| {
            let mut layers = loader(heads).load_heads()?;
            settle(layers.iter_mut().flat_map(HeadWeights::linears).collect());
            Ok(layers)
        });
        let others = others.collect::<Result<_, ModelError>>()?;
        let loader = loader(slices.start);
        let experts = match room.memory {
            None => {
                let room = SwitchRoom { slots: room.slots, groups, hybrid: room.hybrid };
                RankExperts::Resident(Box::new(loader.experts(at, placement, room)?))
            }
            Some(limit) => RankExperts::Streamed(StreamedExperts::new(&loader, at, placement, limit)?),
        };
        let angles = RotaryTable::new(config.rope_dim(), &config.rope);
        let (peers, scratch) = (Peers::OnHost(Vec::new()), Scratch::default());
        Ok(Self { config: Arc::clone(config), weights, others, experts, peers, angles, scratch })
    }

    /// Swaps the current head weights with those of another attention layout.
    pub(super) fn exchange_heads(&mut self, other: usize) {
        for (block, weights) in self.weights.blocks.iter_mut().zip(&mut self.others[other]) {
            swap(&mut block.heads, weights);
        }
    }

    /// Reduces the attention output over all ranks, adds it to this rank's rows of the residual stream and normalises
    /// them.
    fn scatter(&mut self, step: &mut LayerStep<'_, '_>) -> Result<(), UnitError> {
        let elements = step.own_positions().len() * self.config.hidden;
        let Scratch { residual, other_residual: own, normed, .. } = &mut self.scratch;
        own.resize(elements, 0.0);
        normed.resize(elements, 0.0);
        let (weight, epsilon) = (&self.weights.blocks[step.layer].post_norm, self.config.rms_norm_eps);
        let norm = Norm { residual, weight, epsilon, residual_out: own };
        if let Some(split) = step.split {
            step.ep.reduce_scatter(step.moe, self.config.hidden, split, Some(norm), normed)?;
        }
        swap(residual, own);
        Ok(())
    }
}

impl ComputeBackend for CpuBackend {
    fn embed(&mut self, tokens: &[u32]) -> Result<(), UnitError> {
        let (residual, hidden) = (&mut self.scratch.residual, self.config.hidden);
        residual.resize(tokens.len() * hidden, 0.0);
        for (token, row) in tokens.iter().zip(residual.chunks_exact_mut(hidden)) {
            self.weights.embedding.read(*token, row);
        }
        Ok(())
    }

    fn attention(&mut self, step: &mut LayerStep<'_, '_>) -> Result<(), UnitError> {
        let block = &self.weights.blocks[step.layer];
        let Scratch { residual, normed, added, attended, attention, .. } = &mut self.scratch;
        step.probe.residual(step.layer, residual);
        normed.resize(residual.len(), 0.0);
        added.resize(residual.len(), 0.0);
        rms_norm(residual, &block.input_norm, self.config.rms_norm_eps, normed);
        let (rows, angles) = (step.rows(), &mut self.angles);
        for item in &*step.items {
            angles.grow(item.kv.len() + item.tokens.len());
        }
        let (layer, items, offsets) = (step.layer, &mut *step.items, step.offsets);
        block.heads.attention.run(
            &mut AttentionStep { layer, angles, normed, rows, items, offsets },
            attended,
            attention,
        );
        if step.split.is_some() {
            block.heads.out.apply(attended, step.ep.part(residual.len())?);
            return self.scatter(step);
        }
        block.heads.out.apply(attended, added);
        add(added, residual);
        rms_norm(residual, &block.post_norm, self.config.rms_norm_eps, normed);
        Ok(())
    }

    fn route(&mut self, step: &mut LayerStep<'_, '_>, lists: &mut RowLists) -> Result<(), UnitError> {
        let Some(moe) = self.weights.moe(step.layer) else { return Ok(()) };
        let Scratch { normed, router_logits, router, .. } = &mut self.scratch;
        let (num_experts, top_k) = (self.config.num_experts, self.config.top_k);
        let choice = Choice { router: &self.config.router, num_experts, top_k, correction: moe.correction.as_deref() };
        let rows = normed.len() / self.config.hidden;
        let (experts, weights) = lists.resize(rows, top_k);
        router_logits.resize(rows * num_experts, 0.0);
        moe.router.apply(normed, router_logits);
        step.probe.router_logits(moe.layer, router_logits);
        choice.route(router_logits, experts, weights, router);
        step.probe.routes(moe.layer, experts, weights);
        Ok(())
    }

    fn experts(&mut self, step: &mut LayerStep<'_, '_>, lists: &RowLists) -> Result<(), UnitError> {
        let Some(layer) = step.moe else { return Ok(()) };
        let Scratch { normed, added, .. } = &mut self.scratch;
        let RowLists { phases, experts, weights, .. } = lists;
        let (top_k, hidden) = (self.config.top_k, self.config.hidden);
        added.resize(normed.len(), 0.0);
        let batch = RoutedBatch { x: normed, experts, weights, phases, top_k, hidden };
        self.experts.with_layer(layer, |experts| step.ep.moe(layer, batch, experts, added))
    }

    fn feed_forward(&mut self, step: &mut LayerStep<'_, '_>, lists: &mut RowLists) -> Result<(), UnitError> {
        let Scratch { residual, other_residual, normed, added, mlp, .. } = &mut self.scratch;
        let width = match &self.weights.blocks[step.layer].feed_forward {
            FeedForward::Dense(dense) => {
                added.resize(normed.len(), 0.0);
                dense.apply(normed, added, &mut mlp.work);
                0
            }
            FeedForward::Moe(moe) => {
                moe.shared.iter().for_each(|shared| shared.add_to(normed, added, mlp));
                self.config.top_k
            }
        };
        add(added, residual);
        let Some(split) = step.split else { return Ok(()) };
        let (hidden, bound, all) = (self.config.hidden, self.config.num_experts, step.rows());
        other_residual.resize(all * hidden, 0.0);
        let (labels, gathered) = lists.labels(all, width);
        let own = OwnRows { rows: residual, hidden, labels, width, bound };
        step.ep.allgather(step.moe, own, split, AllRows { rows: other_residual, labels: gathered })?;
        swap(residual, other_residual);
        lists.keep_gathered();
        Ok(())
    }

    fn head(&mut self, wanted: &WantedRows, out: &mut StepOutput, probe: &mut dyn Probe) -> Result<(), UnitError> {
        let hidden = self.config.hidden;
        let Scratch { residual, normed, added, .. } = &mut self.scratch;
        probe.residual(self.weights.blocks.len(), residual);
        added.clear();
        for row in &wanted.rows {
            added.extend_from_slice(&residual[*row as usize * hidden..][..hidden]);
        }
        normed.resize(added.len(), 0.0);
        rms_norm(added, &self.weights.final_norm, self.config.rms_norm_eps, normed);
        probe.final_norm(normed);
        out.logits.resize(wanted.rows.len() * self.config.vocab_size, 0.0);
        self.weights.output.apply(normed, &mut out.logits);
        for (row, item) in wanted.items.iter().enumerate() {
            out.results[item.at] = ItemResult::Logits(row);
        }
        Ok(())
    }
}
