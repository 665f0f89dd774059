//! A layer of attention tp after its heads: partial sums to the ranks that continue with them, and rows back (SRS and
//! SAG, section 3.4 of the paper). Between them a rank has only the rows that the plan gives it, and works as with
//! attention dp.

use std::mem::swap;

use semmoe_tables::LayerIdx;

use super::forward::{Forward, Scratch};
use super::rows::PlanInput;
use super::weights::{Block, FeedForward};
use crate::ep::{AllRows, Norm, OwnRows, StepPhase, UnitError};

/// Buffers of this module; those of the other rows wait here while a rank works on its own.
#[derive(Default)]
pub(super) struct SplitScratch {
    /// `[rows]`: the tokens of the step.
    pub(super) tokens: Vec<u32>,
    /// `[own rows, H]`, or `[rows, H]`
    residual: Vec<f32>,
    /// `[own rows]`, or `[rows]`
    phases: Vec<StepPhase>,
    /// `[rows, k]`
    experts: Vec<u16>,
}

impl Forward<'_> {
    /// From this rank's partial sums to the residual stream after the layer.
    pub(super) fn split_feed_forward(&mut self, block: &Block) -> Result<(), UnitError> {
        self.scatter(block)?;
        self.feed_forward_of_normed(block)?;
        self.gather(block)?;
        self.keep_routes(block);
        Ok(())
    }

    /// Leaves this rank's rows of the residual stream, with the attention's sums added, and their norm.
    fn scatter(&mut self, block: &Block) -> Result<(), UnitError> {
        let Some(plan) = self.rows.as_deref_mut() else { return Ok(()) };
        let (hidden, me) = (self.config.hidden, self.ep.attention_place());
        let Scratch { residual, normed, phases, split: own, .. } = &mut *self.scratch;
        let layer = moe_layer(block);
        let input = PlanInput { tokens: &own.tokens, routes: &self.out.routes, top_k: self.config.top_k };
        plan.split(layer, input);
        let split = plan.current();
        let elements = split.positions(me).len() * hidden;
        own.residual.resize(elements, 0.0);
        normed.resize(elements, 0.0);
        let (weight, epsilon) = (&block.post_norm, self.config.rms_norm_eps);
        let norm = Norm { residual, weight, epsilon, residual_out: &mut own.residual };
        self.ep.reduce_scatter(layer, hidden, split, Some(norm), normed)?;
        own.phases.clear();
        own.phases.extend(split.positions(me).map(|position| phases[split.token(position)]));
        if layer.is_some() {
            self.ep.counters.add_rows(plan.counts(me));
        }
        swap(residual, &mut own.residual);
        swap(phases, &mut own.phases);
        Ok(())
    }

    /// Brings back all rows, and the experts that they went to.
    fn gather(&mut self, block: &Block) -> Result<(), UnitError> {
        let Some(plan) = self.rows.as_deref_mut() else { return Ok(()) };
        let Scratch { residual, phases, experts, split: all, .. } = &mut *self.scratch;
        let (labels, width): (&[u16], usize) = match &block.feed_forward {
            FeedForward::Moe(_) => (experts, self.config.top_k),
            FeedForward::Dense(_) => (&[], 0),
        };
        all.experts.resize(all.tokens.len() * width, 0);
        let (hidden, bound) = (self.config.hidden, self.config.num_experts);
        let own = OwnRows { rows: residual, hidden, labels, width, bound };
        let to = AllRows { rows: &mut all.residual, labels: &mut all.experts };
        self.ep.allgather(moe_layer(block), own, plan.current(), to)?;
        swap(residual, &mut all.residual);
        swap(phases, &mut all.phases);
        swap(experts, &mut all.experts);
        Ok(())
    }
}

fn moe_layer(block: &Block) -> Option<LayerIdx> {
    match &block.feed_forward {
        FeedForward::Moe(moe) => Some(moe.layer),
        FeedForward::Dense(_) => None,
    }
}
