//! One step through all layers.

use super::attention::{AttentionScratch, AttentionStep};
use super::compute::{add, rms_norm};
use super::mlp::MlpScratch;
use super::probe::Probe;
use super::rope::RotaryTable;
use super::router::{Choice, RouterScratch};
use super::rows::RowPlan;
use super::split::SplitScratch;
use super::step::{StepItem, StepOutput};
use super::streamed::RankExperts;
use super::weights::{Block, FeedForward, Moe, Weights};
use super::{ModelConfig, StepError};
use crate::ep::{ExpertParallel, RoutedBatch, StepPhase, UnitError};

/// Buffers of a step, reused by the next one; rows are those of all items, one after the other.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[rows, H]`: the residual stream.
    pub(super) residual: Vec<f32>,
    /// `[rows, H]`
    pub(super) normed: Vec<f32>,
    /// `[rows, H]`: the output of a part of a layer, which is added to the residual stream.
    pub(super) added: Vec<f32>,
    /// `[rows, heads x value width]`
    attended: Vec<f32>,
    /// `[rows, N]`
    router_logits: Vec<f32>,
    /// `[rows]`
    pub(super) phases: Vec<StepPhase>,
    /// `[rows, k]`
    pub(super) experts: Vec<u16>,
    weights: Vec<f32>,
    attention: AttentionScratch,
    router: RouterScratch,
    mlp: MlpScratch,
    pub(super) split: SplitScratch,
}

/// Everything that one step uses.
pub(super) struct Forward<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) weights: &'a Weights,
    pub(super) experts: &'a RankExperts,
    pub(super) angles: &'a RotaryTable,
    pub(super) scratch: &'a mut Scratch,
    pub(super) out: &'a mut StepOutput,
    pub(super) ep: &'a mut ExpertParallel,
    /// The rows that this rank continues with after attention: with attention tp, where all ranks have the same rows.
    pub(super) rows: Option<&'a mut RowPlan>,
    pub(super) probe: &'a mut dyn Probe,
}

impl Forward<'_> {
    pub(super) fn run(&mut self, items: &mut [StepItem<'_>]) -> Result<(), StepError> {
        self.embed(items);
        let weights = self.weights;
        for (layer, block) in weights.blocks.iter().enumerate() {
            self.probe.residual(layer, &self.scratch.residual);
            self.attention(layer, block, items)?;
            match self.rows.is_some() {
                true => self.split_feed_forward(block)?,
                false => {
                    add(&self.scratch.added, &mut self.scratch.residual);
                    self.feed_forward(block)?;
                    self.keep_routes(block);
                }
            }
        }
        self.probe.residual(weights.blocks.len(), &self.scratch.residual);
        self.output(items);
        Ok(())
    }

    fn rows(&self) -> usize {
        self.out.offsets.last().copied().unwrap_or(0)
    }

    /// Lays out the step's rows and looks their tokens up.
    fn embed(&mut self, items: &[StepItem<'_>]) {
        let hidden = self.config.hidden;
        self.out.offsets.clear();
        self.out.offsets.push(0);
        self.scratch.phases.clear();
        let mut rows = 0;
        for item in items {
            rows += item.tokens.len();
            self.scratch.phases.resize(rows, item.phase);
            self.out.offsets.push(rows);
        }
        self.out.route_width = self.config.num_moe_layers() * self.config.top_k;
        self.out.routes.resize(rows * self.out.route_width, 0);
        let residual = &mut self.scratch.residual;
        residual.resize(rows * hidden, 0.0);
        let tokens = items.iter().flat_map(|item| item.tokens);
        self.scratch.split.tokens.clear();
        self.scratch.split.tokens.extend(tokens.clone());
        for (token, row) in tokens.zip(residual.chunks_exact_mut(hidden)) {
            self.weights.embedding.read(*token, row);
        }
    }

    /// From `residual` to `added`, or with attention tp from this rank's heads to its part of the sums.
    fn attention(&mut self, layer: usize, block: &Block, items: &mut [StepItem<'_>]) -> Result<(), UnitError> {
        let rows = self.rows();
        let Scratch { residual, normed, added, attended, attention, .. } = &mut *self.scratch;
        normed.resize(residual.len(), 0.0);
        added.resize(residual.len(), 0.0);
        rms_norm(residual, &block.input_norm, self.config.rms_norm_eps, normed);
        let (angles, offsets) = (self.angles, &self.out.offsets);
        let mut step = AttentionStep { layer, angles, normed, rows, items, offsets };
        block.heads.attention.run(&mut step, attended, attention);
        let sums = match self.rows {
            Some(_) => self.ep.part(residual.len())?,
            None => added,
        };
        block.heads.out.apply(attended, sums);
        Ok(())
    }

    /// The feed-forward half of a layer, on the rows of `residual`.
    fn feed_forward(&mut self, block: &Block) -> Result<(), UnitError> {
        let Scratch { residual, normed, .. } = &mut *self.scratch;
        normed.resize(residual.len(), 0.0);
        rms_norm(residual, &block.post_norm, self.config.rms_norm_eps, normed);
        self.feed_forward_of_normed(block)
    }

    /// The same, of rows that are normed already.
    pub(super) fn feed_forward_of_normed(&mut self, block: &Block) -> Result<(), UnitError> {
        let Scratch { residual, normed, added, mlp, .. } = &mut *self.scratch;
        added.resize(residual.len(), 0.0);
        match &block.feed_forward {
            FeedForward::Dense(dense) => dense.apply(normed, added, &mut mlp.work),
            FeedForward::Moe(moe) => self.moe(moe)?,
        }
        add(&self.scratch.added, &mut self.scratch.residual);
        Ok(())
    }

    /// The sum of the routed experts, and of the shared one, from `normed` to `added`.
    fn moe(&mut self, moe: &Moe) -> Result<(), UnitError> {
        let (num_experts, top_k) = (self.config.num_experts, self.config.top_k);
        let Scratch { residual, normed, added, router_logits, phases, experts, weights, router, mlp, .. } =
            &mut *self.scratch;
        let rows = residual.len() / self.config.hidden;
        router_logits.resize(rows * num_experts, 0.0);
        experts.resize(rows * top_k, 0);
        weights.resize(rows * top_k, 0.0);
        moe.router.apply(normed, router_logits);
        self.probe.router_logits(moe.layer, router_logits);
        let correction = moe.correction.as_deref();
        let choice = Choice { router: &self.config.router, num_experts, top_k, correction };
        choice.route(router_logits, experts, weights, router);
        self.probe.routes(moe.layer, experts, weights);
        let batch = RoutedBatch { x: normed, experts, weights, phases, top_k, hidden: self.config.hidden };
        let ep = &mut *self.ep;
        self.experts.with_layer(moe.layer, |experts| ep.moe(moe.layer, batch, experts, added))?;
        if let Some(shared) = &moe.shared {
            shared.add_to(normed, added, mlp);
        }
        Ok(())
    }

    /// Keeps the experts that an MoE layer chose for all rows.
    pub(super) fn keep_routes(&mut self, block: &Block) {
        let FeedForward::Moe(moe) = &block.feed_forward else { return };
        let top_k = self.config.top_k;
        let routes = self.out.routes.chunks_exact_mut(self.out.route_width);
        for (chosen, row) in self.scratch.experts.chunks_exact(top_k).zip(routes) {
            row[moe.layer.index() * top_k..][..top_k].copy_from_slice(chosen);
        }
    }

    /// Logits of the last row of each item that wants them.
    fn output(&mut self, items: &[StepItem<'_>]) {
        let hidden = self.config.hidden;
        let Scratch { residual, normed, added, .. } = &mut *self.scratch;
        let out = &mut *self.out;
        added.clear();
        out.logit_rows.clear();
        for (item, end) in items.iter().zip(&out.offsets[1..]) {
            let row = item.want_logits.then(|| {
                added.extend_from_slice(&residual[(end - 1) * hidden..end * hidden]);
                added.len() / hidden - 1
            });
            out.logit_rows.push(row);
        }
        normed.resize(added.len(), 0.0);
        rms_norm(added, &self.weights.final_norm, self.config.rms_norm_eps, normed);
        self.probe.final_norm(normed);
        out.vocab_size = self.config.vocab_size;
        out.logits.resize(added.len() / hidden * self.config.vocab_size, 0.0);
        self.weights.output.apply(normed, &mut out.logits);
    }
}
