//! One rank's part of the unit: its MoE layers and attention tp's collectives, counted and timed.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use semmoe_kernels::collectives::{
    AllRows, Exchange, Lockstep, Norm, OwnRows, PrivateMemory, RowCollectives, UnitError, Wake, Waker, split_bytes,
};
use semmoe_kernels::{DispatchPlan, RowSplit};
use semmoe_tables::{ExpertCopies, LayerIdx, RankId};

use super::counters::{Collective, Counters, StepPhase};
use super::forced::ForcedRate;
use super::hosts::LayerHosts;
use super::inbox::Inbox;
use super::layout::{ExpertLayout, RankGroups, SwitchableRows};
use super::placement::ExpertPlacement;
use super::stages::StageLog;
use super::timings::{StepBatch, TimedCollective, Timings};
use super::wire::WireRows;

/// The experts of one layer on this rank, as the model computes them.
pub trait LocalExperts: Sync {
    /// The number of threads that share the rows of a layer with this many (row, expert) pairs; at least 1.
    fn threads(&self, pairs: usize) -> usize;

    /// Waits until the experts are in memory; called once, after the rows have arrived.
    ///
    /// # Errors
    /// The experts will never be in memory: the rank cannot continue.
    fn ready(&self) -> Result<(), ExpertsLost> {
        Ok(())
    }

    /// Applies one expert, where `slot` numbers this rank's experts in ascending id: `x` `[m, H]` to `out` `[m, H]`
    /// (overwritten, not weighted). Each row's result must not depend on the other rows. `work` is the thread's scratch
    /// buffer, of any length and content.
    fn apply(&self, slot: usize, x: &[f32], out: &mut [f32], work: &mut Vec<f32>);
}

/// Why a rank's experts will never be in its memory.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ExpertsLost(#[source] pub Arc<dyn std::error::Error + Send + Sync>);

/// Some of this rank's tokens (n), with their routes.
#[derive(Clone, Copy, Debug)]
pub struct RoutedBatch<'a> {
    /// `[n, H]`
    pub x: &'a [f32],
    /// `[n, k]`: logical expert ids, each below N.
    pub experts: &'a [u16],
    /// `[n, k]`
    pub weights: &'a [f32],
    /// `[n]`: the phase that each token is counted in.
    pub phases: &'a [StepPhase],
    /// k
    pub top_k: usize,
    /// H
    pub hidden: usize,
}

/// The placement's number of groups differs from the unit's ranks, or nodes in a hybrid layout: group g is rank or node
/// g.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the placement has {groups} groups, the unit has {world} ranks and experts {layout}")]
pub struct WorldMismatch {
    /// Groups of the placement.
    pub groups: usize,
    /// Ranks of the unit.
    pub world: usize,
    /// Layout of the experts.
    pub layout: ExpertLayout,
}

/// Name of the stage between dispatch and combine.
const EXPERTS: &str = "experts";

/// This rank's part of the unit: its collectives, the location of every expert, and its counters.
pub struct ExpertParallel {
    pub(super) unit: WireRows,
    /// This rank's group, in each grouping that the unit may be switched to.
    groups: Vec<(RankGroups, WireRows)>,
    /// The group that steps independently now, if any.
    pub(super) group: Option<usize>,
    pub(super) placement: ExpertPlacement,
    layers: Vec<LayerHosts>,
    /// `[W]`: whether each rank is on this rank's node, itself included; hybrid experts use the layout's nodes instead.
    pub(super) near: Vec<bool>,
    /// The ranks that share attention's rows.
    attention_group: Range<usize>,
    /// Times of the parts of each MoE layer; for hybrid experts only those between dispatch and combine, because the
    /// exchange logs its own stages ([`ExpertLayout::join`]).
    pub(crate) stages: Option<StageLog>,
    /// Overrides the router's choice, for measurements.
    pub(crate) forced: Option<ForcedRate>,
    /// This rank's counts since the start.
    pub(crate) counters: Counters,
    pub(super) plan: DispatchPlan,
    timings: Timings,
    inbox: Inbox,
    outgoing: Vec<Vec<u8>>,
    incoming: Vec<Vec<u8>>,
}

/// The collectives of the ranks that step together.
fn stepping<'a>(
    unit: &'a mut WireRows,
    groups: &'a mut [(RankGroups, WireRows)],
    group: Option<usize>,
) -> &'a mut WireRows {
    match group {
        None => unit,
        Some(at) => &mut groups[at].1,
    }
}

impl ExpertParallel {
    /// Joins a placement to a link that carries rows in messages; group g of the placement is rank g. If an expert has
    /// several replicas, this rank's tokens use the one that [`ExpertCopies`] names.
    ///
    /// # Errors
    /// A placement whose number of groups is not the number of ranks, or of nodes in a hybrid layout.
    pub fn new(link: Box<dyn Lockstep>, placement: impl Into<ExpertCopies>) -> Result<Self, WorldMismatch> {
        let memory = PrivateMemory::new(link.rank());
        Self::over(WireRows::f32(Box::new(RowCollectives::new(link, memory))), placement, ExpertLayout::Ep)
    }

    /// Joins a placement to the collectives of a unit, which must be those of its layout ([`ExpertLayout::join`]).
    /// Tensor-parallel experts use only the placement's shape.
    ///
    /// # Errors
    /// A placement whose number of groups is not the number of ranks, or of nodes in a hybrid layout.
    pub fn over(
        unit: impl Into<SwitchableRows>,
        placement: impl Into<ExpertCopies>,
        layout: ExpertLayout,
    ) -> Result<Self, WorldMismatch> {
        let SwitchableRows { unit, groups: switchable } = unit.into();
        let placement = ExpertPlacement { layout, replicas: placement.into() };
        let (groups, world) = (usize::from(placement.replicas.groups()), unit.world());
        if groups != layout.hosts(world) || layout.world(groups) != world {
            return Err(WorldMismatch { groups, world, layout });
        }
        let mut joined = Self {
            counters: Counters::new(placement.replicas.layers()),
            timings: Timings::new(placement.replicas.layers()),
            layers: LayerHosts::of_placement(&placement, RankId::new(unit.rank() as u16)),
            near: (0..world).map(|peer| peer == unit.rank()).collect(),
            attention_group: 0..world,
            stages: None,
            forced: None,
            unit,
            groups: switchable,
            group: None,
            placement,
            plan: DispatchPlan::default(),
            inbox: Inbox::default(),
            outgoing: vec![Vec::new(); world],
            incoming: vec![Vec::new(); world],
        };
        joined.regroup();
        Ok(joined)
    }

    /// Counts bytes sent to these ranks as traffic within its node; by default each rank is a node. Hybrid experts use
    /// the layout's nodes.
    #[must_use]
    pub fn with_neighbours(mut self, ranks: impl IntoIterator<Item = usize>) -> Self {
        ranks.into_iter().for_each(|rank| self.near[rank] = true);
        self
    }

    /// Divides attention tp into `groups` groups ([`ExpertLayout::join_grouped`]), which must divide the ranks.
    #[must_use]
    pub fn with_attention_groups(mut self, groups: usize) -> Self {
        let (rank, ranks) = (self.unit.rank(), self.world() / groups);
        let first = rank / ranks * ranks;
        self.attention_group = first..first + ranks;
        self
    }

    /// This rank.
    pub fn rank(&self) -> RankId {
        RankId::new(self.unit.rank() as u16)
    }

    /// Ranks in the unit.
    pub fn world(&self) -> usize {
        self.unit.world()
    }

    /// The ranks that have the same rows with attention tp: all, or one of several groups.
    pub(crate) fn attention_group(&self) -> Range<usize> {
        self.attention_group.clone()
    }

    /// The ranks that step together: all, or an independent group.
    pub(crate) fn step_ranks(&self) -> Range<usize> {
        if self.group.is_some() { self.attention_group() } else { 0..self.world() }
    }

    /// The groupings that the unit may be switched to.
    pub(crate) fn groupings(&self) -> impl Iterator<Item = RankGroups> {
        self.groups.iter().map(|(grouping, _)| *grouping)
    }

    /// The collectives of the ranks that step together.
    fn rows(&mut self) -> &mut WireRows {
        stepping(&mut self.unit, &mut self.groups, self.group)
    }

    /// Makes the ranks of the layout's groups step by themselves, or all ranks step together.
    fn regroup(&mut self) {
        let before = self.group;
        self.group = self.placement.layout.groups().and_then(|of| self.groupings().position(|grouping| grouping == of));
        if let Some(at) = self.group {
            let (grouping, rank) = (self.groups[at].0, self.unit.rank());
            let first = rank - rank % usize::from(grouping.ranks);
            self.attention_group = first..first + usize::from(grouping.ranks);
        } else if before.is_some() {
            self.attention_group = 0..self.world();
        }
        let ranks = self.step_ranks().len();
        self.outgoing.resize(ranks, Vec::new());
        self.incoming.resize(ranks, Vec::new());
    }

    /// This rank's index in its attention group.
    pub(crate) fn attention_place(&self) -> usize {
        self.unit.rank() - self.attention_group.start
    }

    /// The experts' current layout and placement.
    pub fn placement(&self) -> &ExpertPlacement {
        &self.placement
    }

    /// Replaces the experts' layout and placement, for the same model and ranks.
    pub(crate) fn set_placement(&mut self, placement: ExpertPlacement) {
        debug_assert_eq!(placement.replicas.layers(), self.layers.len());
        self.layers = LayerHosts::of_placement(&placement, self.rank());
        self.placement = placement;
        self.regroup();
    }

    /// Sends each other rank its message and returns theirs, by rank; this rank's slot is meaningless. For use outside
    /// of steps; not counted.
    ///
    /// # Errors
    /// A rank failed.
    pub(crate) fn exchange(&mut self, outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, UnitError> {
        let mut incoming = vec![Vec::new(); outgoing.len()];
        self.unit.all_to_all(&outgoing, &mut incoming)?;
        Ok(incoming)
    }

    /// An [`ExpertParallel::exchange`] among some ranks, including this one; messages are by index in `ranks`.
    ///
    /// # Errors
    /// A rank failed.
    pub(crate) fn exchange_among(
        &mut self,
        ranks: Range<usize>,
        outgoing: &[Vec<u8>],
    ) -> Result<Vec<Vec<u8>>, UnitError> {
        let mut incoming = vec![Vec::new(); outgoing.len()];
        let peers: Vec<usize> = ranks.collect();
        let exchange = Exchange { peers: &peers, outgoing, incoming: &mut incoming, arrived: &mut |_| () };
        self.unit.group_all_to_all(exchange)?;
        Ok(incoming)
    }

    /// This rank's link to the unit, for use outside of steps; nothing is counted.
    pub(crate) fn link(&mut self) -> &mut dyn Lockstep {
        &mut *self.unit
    }

    /// This rank's counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Times of this rank's parts.
    pub fn timings(&self) -> &Timings {
        &self.timings
    }

    /// Records the batch and the time of a step.
    pub(crate) fn count_step(&mut self, batch: &StepBatch, began: Instant) {
        self.timings.add_step(self.placement.layout, batch, began.elapsed());
    }

    /// Sleeps until this rank or another has something to do; see [`Lockstep::wait`].
    ///
    /// # Errors
    /// A rank failed, see [`Lockstep::wait`].
    pub fn wait(&mut self) -> Result<Wake, UnitError> {
        self.unit.wait()
    }

    /// Ends this rank's [`ExpertParallel::wait`] from another thread.
    pub fn waker(&self) -> Waker {
        self.unit.waker()
    }

    /// Sends the other ranks that step with this one the same message and returns theirs, by index in
    /// [`ExpertParallel::step_ranks`]; this rank's slot is meaningless.
    ///
    /// # Errors
    /// A rank failed.
    pub(crate) fn allgather_bytes(&mut self, message: &[u8]) -> Result<&[Vec<u8>], UnitError> {
        self.counters.add_collective(Collective::Sync, (self.outgoing.len() - 1) * message.len());
        for to in &mut self.outgoing {
            to.clear();
            to.extend_from_slice(message);
        }
        stepping(&mut self.unit, &mut self.groups, self.group).all_to_all(&self.outgoing, &mut self.incoming)?;
        Ok(&self.incoming)
    }

    /// The buffer for this rank's `[n, H]` partial sums before [`ExpertParallel::reduce_scatter`].
    ///
    /// # Errors
    /// See [`Collectives::part`](semmoe_kernels::collectives::Collectives::part).
    pub(crate) fn part(&mut self, len: usize) -> Result<&mut [f32], UnitError> {
        self.rows().part(len)
    }

    /// Counts the bytes that this rank sends in a reduce-scatter.
    pub(crate) fn count_scatter(&mut self, hidden: usize, split: RowSplit<'_>) {
        let bytes_to = |peer| split_bytes(self.unit.dtype, split.positions(peer).len(), hidden, 0);
        self.counters.add_collective(Collective::ReduceScatter, self.peers().map(bytes_to).sum());
    }

    /// Counts the bytes that this rank sends in an allgather of rows with `width` labels each.
    pub(crate) fn count_gather(&mut self, hidden: usize, width: usize, split: RowSplit<'_>) {
        let rows = split.positions(self.attention_place()).len();
        let bytes = split_bytes(self.unit.dtype, rows, hidden, rows * width);
        self.counters.add_collective(Collective::Allgather, self.peers().count() * bytes);
    }

    /// [`Collectives::reduce_scatter`](semmoe_kernels::collectives::Collectives::reduce_scatter); its time counts for
    /// `layer` if that has experts.
    pub(crate) fn reduce_scatter(
        &mut self,
        layer: Option<LayerIdx>,
        hidden: usize,
        split: RowSplit<'_>,
        norm: Option<Norm<'_, f32>>,
        out: &mut [f32],
    ) -> Result<(), UnitError> {
        self.count_scatter(hidden, split);
        let began = Instant::now();
        self.rows().reduce_scatter(hidden, split, norm, out)?;
        self.time(layer, TimedCollective::Scatter, began);
        Ok(())
    }

    /// [`Collectives::allgather`](semmoe_kernels::collectives::Collectives::allgather); its time counts for `layer` if
    /// that has experts.
    pub(crate) fn allgather(
        &mut self,
        layer: Option<LayerIdx>,
        own: OwnRows<'_, f32>,
        split: RowSplit<'_>,
        out: AllRows<'_, f32>,
    ) -> Result<(), UnitError> {
        self.count_gather(own.hidden, own.width, split);
        let began = Instant::now();
        self.rows().allgather(own, split, out)?;
        self.time(layer, TimedCollective::Gather, began);
        Ok(())
    }

    /// The MoE output of this rank's tokens: `out[t] = sum of weight x expert(x[t])` over the token's experts, wherever
    /// they are; `out` is `[n, H]`, overwritten. Every rank must make the same calls, layer by layer, even with n = 0.
    ///
    /// The sum is taken per rank over its experts (or slices of them) in ascending id, then over ranks in order. It
    /// depends on the placement but never on the rest of the batch.
    ///
    /// # Errors
    /// A rank failed; `out` is then unspecified and the unit cannot continue.
    ///
    /// # Panics
    /// If the batch does not match the placement, which the model's router rules out.
    pub fn moe(
        &mut self,
        layer: LayerIdx,
        batch: RoutedBatch<'_>,
        experts: &dyn LocalExperts,
        out: &mut [f32],
    ) -> Result<(), UnitError> {
        let began = Instant::now();
        self.plan_layer(layer, &batch);
        let RoutedBatch { x, hidden, .. } = batch;
        self.log(|stages| stages.begin_layer(layer, batch.phases.len()));
        let dispatch = self.begin(TimedCollective::Dispatch);
        stepping(&mut self.unit, &mut self.groups, self.group).dispatch(x, hidden, &self.plan)?;
        self.end(layer, TimedCollective::Dispatch, dispatch);

        experts.ready().map_err(|error| UnitError::lost(self.unit.rank(), error.to_string()))?;
        self.log(|stages| stages.begin(EXPERTS, 0));
        let hosts = &self.layers[layer.index()];
        let received = stepping(&mut self.unit, &mut self.groups, self.group).received();
        self.inbox.apply(received, hidden, hosts, experts).map_err(|wrong| {
            let from = self.placement.layout.source(self.unit.rank(), wrong.from);
            UnitError::protocol(from, wrong.to_string())
        })?;

        self.log(|stages| stages.end(EXPERTS, 0));

        let combine = self.begin(TimedCollective::Combine);
        stepping(&mut self.unit, &mut self.groups, self.group).combine(&self.plan, out)?;
        self.end(layer, TimedCollective::Combine, combine);
        self.timings.add_moe(layer, began.elapsed());
        Ok(())
    }

    /// Replaces the experts that the router chose if a local rate is forced; `keys` holds a [`ForcedRate::key`] per
    /// token.
    pub(crate) fn force(&self, layer: LayerIdx, keys: &[u64], experts: &mut [u16]) {
        if let Some(forced) = self.forced {
            forced.redraw(layer, &self.layers[layer.index()], keys, experts);
        }
    }

    /// Plans and counts the dispatch of a layer; does not read the batch's rows.
    ///
    /// # Panics
    /// If the batch does not match the placement.
    pub(crate) fn plan_layer(&mut self, layer: LayerIdx, batch: &RoutedBatch<'_>) {
        let RoutedBatch { experts: chosen, weights, top_k, .. } = *batch;
        let planned = match self.placement.layout {
            ExpertLayout::Ep | ExpertLayout::Hybrid(_) => {
                let parts = self.placement.layout.hosts(self.unit.world());
                self.plan.build(chosen, weights, top_k, &self.layers[layer.index()].rank_of, parts)
            }
            ExpertLayout::Tp | ExpertLayout::Groups(_) => {
                self.plan.build_everywhere(chosen, weights, top_k, self.step_ranks().len())
            }
        };
        planned.expect("the router chooses among the placement's experts");
        let (traffic, levels) = self.traffic(batch);
        self.counters.add(layer, &traffic, levels);
    }

    /// The last planned dispatch.
    #[cfg(feature = "gpu")]
    pub(crate) fn plan(&self) -> &DispatchPlan {
        &self.plan
    }

    /// Where the experts of a layer are.
    #[cfg(feature = "gpu")]
    pub(crate) fn hosts(&self, layer: LayerIdx) -> &LayerHosts {
        &self.layers[layer.index()]
    }

    fn log(&self, what: impl FnOnce(&StageLog)) {
        if let Some(stages) = &self.stages {
            what(stages);
        }
    }

    fn begin(&self, of: TimedCollective) -> Instant {
        if self.placement.layout.nodes().is_none() {
            self.log(|stages| stages.begin(of.name(), 0));
        }
        Instant::now()
    }

    fn end(&mut self, layer: LayerIdx, of: TimedCollective, began: Instant) {
        self.time(Some(layer), of, began);
        if self.placement.layout.nodes().is_none() {
            self.log(|stages| stages.end(of.name(), 0));
        }
    }

    /// Adds to the layer's time. A collective outside of MoE layers counts only as part of the step.
    fn time(&mut self, layer: Option<LayerIdx>, of: TimedCollective, began: Instant) {
        if let Some(layer) = layer {
            self.timings.add(layer, of, began.elapsed());
        }
    }

    /// Indices of the other ranks in this rank's attention group.
    fn peers(&self) -> impl Iterator<Item = usize> {
        let me = self.attention_place();
        (0..self.attention_group.len()).filter(move |&peer| peer != me)
    }
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
