//! Runs one step through all layers.

use std::ops::Range;

use semmoe_tables::LayerIdx;

use super::backend::{ComputeBackend, LayerStep, RowLists, WantedItem, WantedRows};
use super::probe::Probe;
use super::rows::{PlanInput, RowPlan};
use super::step::{ItemResult, StepItem, StepOutput, Wants};
use super::{ModelConfig, StepError};
use crate::ep::{ExpertParallel, ForcedRate, RoutedBatch, StepPhase, UnitError};

/// A step's buffers, reused by the next step.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[rows]`: the tokens of all items, concatenated.
    tokens: Vec<u32>,
    /// `[rows]`: their phases.
    phases: Vec<StepPhase>,
    /// `[rows]`: the keys for forced routing if a local rate is forced, otherwise empty.
    keys: Vec<u64>,
    lists: RowLists,
    wanted: WantedRows,
}

/// The borrowed state of one step.
pub(super) struct Forward<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) backend: &'a mut dyn ComputeBackend,
    pub(super) scratch: &'a mut Scratch,
    pub(super) out: &'a mut StepOutput,
    pub(super) ep: &'a mut ExpertParallel,
    /// With attention tp, plans which rows this rank continues with after attention, which itself runs on all rows.
    pub(super) rows: Option<&'a mut RowPlan>,
    pub(super) probe: &'a mut dyn Probe,
}

impl Forward<'_> {
    pub(super) fn run(&mut self, items: &mut [StepItem<'_>]) -> Result<(), StepError> {
        self.lay_out(items);
        self.backend.embed(&self.scratch.tokens)?;
        for layer in 0..self.config.num_layers {
            self.layer(layer, items)?;
        }
        self.want_rows(items);
        self.out.vocab_size = self.config.vocab_size;
        self.backend.head(&self.scratch.wanted, self.out, self.probe)?;
        if self.scratch.lists.are_kept {
            let own = self.gather_kept()?;
            self.count_kept(own);
        }
        Ok(())
    }

    /// Gathers the expert selections of all rows after a step in which the backend kept them until the results. Returns
    /// this rank's rows.
    fn gather_kept(&mut self) -> Result<Range<usize>, UnitError> {
        let Some(split) = self.rows.as_deref().map(RowPlan::current) else { return Ok(0..self.scratch.phases.len()) };
        self.ep.gather_routes(split, self.out.route_width, self.config.num_experts, &mut self.out.routes)?;
        Ok(split.positions(self.ep.attention_place()))
    }

    /// Counts the token-expert pairs of this rank's rows in all layers.
    fn count_kept(&mut self, own: Range<usize>) {
        let (top_k, width) = (self.config.top_k, self.out.route_width);
        let Scratch { phases, lists: RowLists { experts, weights, .. }, .. } = &mut *self.scratch;
        let (phases, routes) = (&phases[own.clone()], &self.out.routes[own.start * width..own.end * width]);
        weights.clear();
        weights.resize(phases.len() * top_k, 0.0);
        for first in (0..width).step_by(top_k) {
            experts.clear();
            experts.extend(routes.chunks_exact(width).flat_map(|row| &row[first..first + top_k]));
            let batch = RoutedBatch { x: &[], experts, weights, phases, top_k, hidden: self.config.hidden };
            self.ep.plan_layer(LayerIdx::new((first / top_k) as u16), &batch);
        }
    }

    /// Concatenates the items' rows.
    fn lay_out(&mut self, items: &[StepItem<'_>]) {
        let (Scratch { tokens, phases, keys, .. }, out) = (&mut *self.scratch, &mut *self.out);
        tokens.clear();
        phases.clear();
        keys.clear();
        out.offsets.clear();
        out.offsets.push(0);
        for item in items {
            tokens.extend_from_slice(item.tokens);
            phases.resize(tokens.len(), item.phase);
            if self.ep.forced.is_some() {
                keys.extend((item.kv.len()..).zip(item.tokens).map(|(at, token)| ForcedRate::key(*token, at)));
            }
            out.offsets.push(tokens.len());
        }
        out.route_width = self.config.num_moe_layers() * self.config.top_k;
        out.routes.resize(tokens.len() * out.route_width, 0);
    }

    /// Runs one layer. With attention tp, the rank holds only its own rows from the end of attention to the next layer,
    /// and processes them as with attention dp.
    fn layer(&mut self, layer: usize, items: &mut [StepItem<'_>]) -> Result<(), StepError> {
        let Scratch { tokens, phases, keys, lists, .. } = &mut *self.scratch;
        let moe = self.config.moe_layer(layer);
        let split = self.rows.as_deref_mut().map(|plan| {
            plan.split(moe, PlanInput { tokens, routes: &self.out.routes, top_k: self.config.top_k });
            &*plan
        });
        let (plan, me) = (split, self.ep.attention_place());
        let split = plan.map(RowPlan::current);
        let (offsets, ep, probe) = (&self.out.offsets[..], &mut *self.ep, &mut *self.probe);
        let splits_by_choices = plan.is_some_and(RowPlan::reads_routes);
        let mut step = LayerStep { layer, moe, items, offsets, split, splits_by_choices, ep, probe };
        self.backend.attention(&mut step)?;
        lists.phases.clear();
        match split {
            None => lists.phases.extend_from_slice(phases),
            Some(split) => lists.phases.extend(split.positions(me).map(|position| phases[split.token(position)])),
        }
        if let (Some(plan), Some(_)) = (plan, moe) {
            step.ep.counters.add_rows(plan.counts(me));
        }
        if let Some(moe) = moe {
            self.backend.route(&mut step, lists)?;
            step.ep.force(moe, keys, &mut lists.experts);
            self.backend.experts(&mut step, lists)?;
        }
        self.backend.feed_forward(&mut step, lists)?;
        if let Some(moe) = moe {
            let top_k = self.config.top_k;
            let routes = self.out.routes.chunks_exact_mut(self.out.route_width);
            for (chosen, row) in lists.experts.chunks_exact(top_k).zip(routes) {
                row[moe.index() * top_k..][..top_k].copy_from_slice(chosen);
            }
        }
        Ok(())
    }

    /// Collects the last row of each item that requests output.
    fn want_rows(&mut self, items: &[StepItem<'_>]) {
        let wanted = &mut self.scratch.wanted;
        wanted.rows.clear();
        wanted.items.clear();
        for (at, (item, end)) in items.iter().zip(&self.out.offsets[1..]).enumerate() {
            if item.wants != Wants::Nothing {
                wanted.rows.push((end - 1) as u32);
                wanted.items.push(WantedItem { at, wants: item.wants });
            }
        }
        self.out.results.clear();
        self.out.results.resize(items.len(), ItemResult::None);
    }
}
