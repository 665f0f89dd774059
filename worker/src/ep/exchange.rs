//! One rank's side of the unit: its MoE layers and its attention tp collectives, counted and timed.

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
use super::layout::{ExpertLayout, SwitchableRows};
use super::placement::ExpertPlacement;
use super::stages::StageLog;
use super::timings::{StepBatch, TimedCollective, Timings};
use super::wire::WireRows;

/// One layer's experts on this rank; the model implements their computation.
pub trait LocalExperts: Sync {
    /// Returns how many threads split the rows of a layer with this many (row, expert) pairs; at least 1.
    fn threads(&self, pairs: usize) -> usize;

    /// Waits until the experts are in memory; called once per layer, after the rows have arrived.
    ///
    /// # Errors
    /// The experts can never be loaded, so the rank cannot continue.
    fn ready(&self) -> Result<(), ExpertsLost> {
        Ok(())
    }

    /// Applies one expert to `x` `[m, H]` and overwrites `out` `[m, H]` with the unweighted result. `slot` indexes this
    /// rank's experts in ascending id order. Each row's result must not depend on the other rows. `work` is the
    /// thread's scratch buffer, with arbitrary length and contents.
    fn apply(&self, slot: usize, x: &[f32], out: &mut [f32], work: &mut Vec<f32>);
}

/// The reason that a rank's experts can never be loaded.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ExpertsLost(#[source] pub Arc<dyn std::error::Error + Send + Sync>);

/// A batch of n of this rank's tokens, with their routes.
#[derive(Clone, Copy, Debug)]
pub struct RoutedBatch<'a> {
    /// `[n, H]`
    pub x: &'a [f32],
    /// `[n, k]`: logical expert ids, each below N.
    pub experts: &'a [u16],
    /// `[n, k]`
    pub weights: &'a [f32],
    /// `[n]`: the phase under which each token is counted.
    pub phases: &'a [StepPhase],
    /// k
    pub top_k: usize,
    /// H
    pub hidden: usize,
}

/// The placement's number of groups is neither the unit's number of ranks nor, in a hybrid layout, that of its nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the placement has {groups} groups, but the unit has {world} ranks and expert layout {layout}")]
pub struct WorldMismatch {
    /// Groups of the placement.
    pub groups: usize,
    /// Ranks of the unit.
    pub world: usize,
    /// Layout of the experts.
    pub layout: ExpertLayout,
}

/// The name of the stage between dispatch and combine.
const EXPERTS: &str = "experts";

/// One rank's side of the unit: its collectives, the location of every expert, and its counters.
pub struct ExpertParallel {
    pub(super) unit: WireRows,
    /// Collectives of each layout that has its own and that the unit can switch to.
    targets: Vec<(ExpertLayout, WireRows)>,
    /// Index of the current layout in `targets`, if it is one of them.
    target: Option<usize>,
    pub(super) placement: ExpertPlacement,
    #[cfg(feature = "gpu")]
    placements: u64,
    layers: Vec<LayerHosts>,
    /// `[W]`: whether each rank, including this one, is on this rank's node. Hybrid experts use the layout's nodes
    /// instead.
    pub(super) near: Vec<bool>,
    /// The ranks of this rank's attention tp group.
    attention_group: Range<usize>,
    /// Stage times of each MoE layer. With hybrid experts, only the stage between dispatch and combine is logged here,
    /// because the exchange logs its own stages ([`ExpertLayout::join`]).
    pub(crate) stages: Option<StageLog>,
    /// Overrides the router's choice, for measurements.
    pub(crate) forced: Option<ForcedRate>,
    /// This rank's counts since startup.
    pub(crate) counters: Counters,
    pub(super) plan: DispatchPlan,
    timings: Timings,
    inbox: Inbox,
    outgoing: Vec<Vec<u8>>,
    incoming: Vec<Vec<u8>>,
}

/// Returns the collectives of the current layout.
fn stepping<'a>(
    unit: &'a mut WireRows,
    targets: &'a mut [(ExpertLayout, WireRows)],
    target: Option<usize>,
) -> &'a mut WireRows {
    match target {
        None => unit,
        Some(at) => &mut targets[at].1,
    }
}

impl ExpertParallel {
    /// Combines a placement with a link that sends rows as messages; placement group g is rank g. If an expert has
    /// several replicas, this rank's tokens use the one that [`ExpertCopies`] selects.
    ///
    /// # Errors
    /// The placement's number of groups differs from the number of ranks.
    pub fn new(link: Box<dyn Lockstep>, placement: impl Into<ExpertCopies>) -> Result<Self, WorldMismatch> {
        let memory = PrivateMemory::new(link.rank());
        Self::over(WireRows::f32(Box::new(RowCollectives::new(link, memory))), placement, ExpertLayout::Ep)
    }

    /// Combines a placement with a unit's collectives, which must match the expert layout ([`ExpertLayout::join`]).
    /// Tensor-parallel experts use only the placement's shape.
    ///
    /// # Errors
    /// The placement's number of groups differs from the number of ranks, or of nodes in a hybrid layout.
    pub fn over(
        unit: impl Into<SwitchableRows>,
        placement: impl Into<ExpertCopies>,
        layout: ExpertLayout,
    ) -> Result<Self, WorldMismatch> {
        let SwitchableRows { unit, targets } = unit.into();
        let placement = ExpertPlacement { layout, replicas: placement.into() };
        let (groups, world) = (usize::from(placement.replicas.groups()), unit.world());
        let hosts = layout.hosts(world);
        if ![hosts, world].contains(&groups) || layout.world(hosts) != world {
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
            targets,
            target: None,
            placement,
            #[cfg(feature = "gpu")]
            placements: 1,
            plan: DispatchPlan::default(),
            inbox: Inbox::default(),
            outgoing: vec![Vec::new(); world],
            incoming: vec![Vec::new(); world],
        };
        joined.set_collectives();
        Ok(joined)
    }

    /// Counts bytes sent to these ranks as traffic within this rank's node; by default, every rank is its own node.
    /// Hybrid experts use the layout's nodes.
    #[must_use]
    pub fn with_neighbours(mut self, ranks: impl IntoIterator<Item = usize>) -> Self {
        ranks.into_iter().for_each(|rank| self.near[rank] = true);
        self
    }

    /// Splits attention tp into `groups` groups ([`ExpertLayout::join_grouped`]); `groups` must divide the number of
    /// ranks.
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

    /// The ranks that share rows under attention tp: all ranks, or one of several groups.
    pub(crate) fn attention_group(&self) -> Range<usize> {
        self.attention_group.clone()
    }

    /// The ranks that step together: all ranks, or this rank's independent group.
    pub(crate) fn step_ranks(&self) -> Range<usize> {
        if self.is_in_groups() { self.attention_group() } else { 0..self.world() }
    }

    /// Returns whether groups of ranks step independently.
    pub(super) fn is_in_groups(&self) -> bool {
        self.placement.layout.groups().is_some()
    }

    /// Returns whether the unit can switch to, and from, a layout that has collectives of its own.
    pub(crate) fn is_target(&self, layout: ExpertLayout) -> bool {
        self.targets.iter().any(|(target, _)| *target == layout)
    }

    /// Returns the collectives of the current layout.
    fn rows(&mut self) -> &mut WireRows {
        stepping(&mut self.unit, &mut self.targets, self.target)
    }

    /// Selects the collectives of the current layout, in which each group steps independently or all ranks together.
    fn set_collectives(&mut self) {
        let layout = self.placement.layout;
        self.target = self.targets.iter().position(|(target, _)| *target == layout);
        if let Some(groups) = layout.groups() {
            let (rank, ranks) = (self.unit.rank(), usize::from(groups.ranks));
            let first = rank - rank % ranks;
            self.attention_group = first..first + ranks;
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

    /// Replaces the experts' layout and placement; the model and the ranks must stay the same.
    pub(crate) fn set_placement(&mut self, placement: ExpertPlacement) {
        debug_assert_eq!(placement.replicas.layers(), self.layers.len());
        self.layers = LayerHosts::of_placement(&placement, self.rank());
        #[cfg(feature = "gpu")]
        {
            self.placements += 1;
        }
        if self.is_in_groups() {
            self.attention_group = 0..self.world();
        }
        self.placement = placement;
        self.set_collectives();
    }

    /// Sends each other rank its message and returns the received messages by rank; this rank's slot is meaningless.
    /// Use this only outside of steps; its bytes are not counted.
    ///
    /// # Errors
    /// A rank failed.
    pub(crate) fn exchange(&mut self, outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, UnitError> {
        let mut incoming = vec![Vec::new(); outgoing.len()];
        self.unit.all_to_all(&outgoing, &mut incoming)?;
        Ok(incoming)
    }

    /// Performs an [`ExpertParallel::exchange`] among some of the ranks, including this one; messages are indexed by
    /// position in `ranks`.
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

    /// This rank's link to the unit, for messages outside of steps, which are not counted.
    pub(crate) fn link(&mut self) -> &mut dyn Lockstep {
        &mut *self.unit
    }

    /// This rank's counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// This rank's timings.
    pub fn timings(&self) -> &Timings {
        &self.timings
    }

    /// Records a step's batch and duration.
    pub(crate) fn count_step(&mut self, batch: &StepBatch, began: Instant) {
        self.timings.add_step(self.placement.layout, batch, began.elapsed());
    }

    /// Sleeps until this rank or another one has work; see [`Lockstep::wait`].
    ///
    /// # Errors
    /// A rank failed, see [`Lockstep::wait`].
    pub fn wait(&mut self) -> Result<Wake, UnitError> {
        self.unit.wait()
    }

    /// Returns a handle that ends this rank's [`ExpertParallel::wait`] from another thread.
    pub fn waker(&self) -> Waker {
        self.unit.waker()
    }

    /// Sends one message to every other rank that steps with this one and returns their messages, indexed as in
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
        stepping(&mut self.unit, &mut self.targets, self.target).all_to_all(&self.outgoing, &mut self.incoming)?;
        Ok(&self.incoming)
    }

    /// Completes the routes of all rows, `[n, width]`, of which each rank has those of its own rows. The split must not
    /// change the rows' order.
    ///
    /// # Errors
    /// A rank failed, or its message does not have the size of its rows' routes or names an expert of `experts` or
    /// more.
    pub(crate) fn gather_routes(
        &mut self,
        split: RowSplit<'_>,
        width: usize,
        experts: usize,
        routes: &mut [u16],
    ) -> Result<(), UnitError> {
        let me = self.attention_place();
        let part = |rank| {
            let positions = split.positions(rank);
            positions.start * width..positions.end * width
        };
        let messages = self.allgather_bytes(bytemuck::cast_slice(&routes[part(me)]))?;
        for (rank, message) in messages.iter().enumerate().filter(|(rank, _)| *rank != me) {
            let (found, part) = (message.len(), &mut routes[part(rank)]);
            if found != size_of_val(part) {
                let expected = size_of_val(part);
                return Err(UnitError::protocol(rank, format!("{found} bytes of routes instead of {expected}")));
            }
            bytemuck::cast_slice_mut(part).copy_from_slice(message);
            if let Some(expert) = part.iter().find(|&&expert| usize::from(expert) >= experts) {
                return Err(UnitError::protocol(
                    rank,
                    format!("a route to expert {expert}, but there are {experts} experts"),
                ));
            }
        }
        Ok(())
    }

    /// Returns the buffer for this rank's `[n, H]` partial sums, to be filled before
    /// [`ExpertParallel::reduce_scatter`].
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

    /// Runs [`Collectives::reduce_scatter`](semmoe_kernels::collectives::Collectives::reduce_scatter) and adds its time
    /// to `layer`, which is `None` outside of MoE layers.
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

    /// Runs [`Collectives::allgather`](semmoe_kernels::collectives::Collectives::allgather) and adds its time to
    /// `layer`, which is `None` outside of MoE layers.
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

    /// Computes the MoE output of this rank's tokens, `out[t] = sum of weight x expert(x[t])` over the token's experts
    /// on all ranks, and overwrites `out` `[n, H]` with it. Every rank must make the same calls, layer by layer, even
    /// with n = 0.
    ///
    /// Each rank sums over its experts (or expert slices) in ascending id order; these sums are then added in rank
    /// order. The result depends on the placement but never on the rest of the batch.
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
        stepping(&mut self.unit, &mut self.targets, self.target).dispatch(x, hidden, &self.plan)?;
        self.end(layer, TimedCollective::Dispatch, dispatch);

        experts.ready().map_err(|error| UnitError::lost(self.unit.rank(), error.to_string()))?;
        self.log(|stages| stages.begin(EXPERTS, 0));
        let hosts = &self.layers[layer.index()];
        let received = stepping(&mut self.unit, &mut self.targets, self.target).received();
        self.inbox.apply(received, hidden, hosts, experts).map_err(|wrong| {
            let from = self.placement.layout.source(self.unit.rank(), wrong.from);
            UnitError::protocol(from, wrong.to_string())
        })?;

        self.log(|stages| stages.end(EXPERTS, 0));

        let combine = self.begin(TimedCollective::Combine);
        stepping(&mut self.unit, &mut self.targets, self.target).combine(&self.plan, out)?;
        self.end(layer, TimedCollective::Combine, combine);
        self.timings.add_moe(layer, began.elapsed());
        Ok(())
    }

    /// Replaces the experts chosen by the router if a local rate is forced; `keys` contains a [`ForcedRate::key`] per
    /// token.
    pub(crate) fn force(&self, layer: LayerIdx, keys: &[u64], experts: &mut [u16]) {
        if let Some(forced) = self.forced {
            forced.redraw(layer, &self.layers[layer.index()], keys, experts);
        }
    }

    /// Plans and counts a layer's dispatch; does not read the batch's rows.
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

    /// Number of placements so far, counting the current one.
    #[cfg(feature = "gpu")]
    pub(crate) fn placements(&self) -> u64 {
        self.placements
    }

    /// Adds up the rows of a step over all ranks, which all call this.
    ///
    /// # Errors
    /// A rank failed.
    #[cfg(feature = "gpu")]
    pub(crate) fn total_rows(&mut self, own: usize) -> Result<usize, UnitError> {
        let me = self.unit.rank();
        let messages = self.allgather_bytes(&(own as u32).to_le_bytes())?;
        let others = messages.iter().enumerate().filter(|(rank, _)| *rank != me);
        others.into_iter().try_fold(own, |sum, (rank, message)| match message.as_slice().try_into() {
            Ok(rows) => Ok(sum + u32::from_le_bytes(rows) as usize),
            Err(_) => Err(UnitError::protocol(rank, format!("a number of rows in {} bytes", message.len()))),
        })
    }

    /// The locations of a layer's experts.
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

    /// Adds the time since `began` to the layer's timings. Outside of MoE layers, a collective counts only towards the
    /// step.
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
