//! One rank's part in the unit: its MoE layers and attention tp's collectives, counted and timed.

use std::sync::Arc;
use std::time::Instant;

use semmoe_kernels::collectives::{
    AllRows, DISPATCH_HEADER_BYTES, Lockstep, Norm, OwnRows, PrivateMemory, RowCollectives, UnitError, Wake, Waker,
    dispatch_row_bytes, split_bytes,
};
use semmoe_kernels::{DispatchPlan, RowSplit};
use semmoe_tables::{ExpertCopies, ExpertId, GroupId, LayerIdx, RankId};

use super::counters::{Collective, Counters, LayerTraffic, StepPhase};
use super::inbox::Inbox;
use super::layout::ExpertLayout;
use super::spread::ExpertSpread;
use super::timings::{TimedCollective, Timings};
use super::wire::WireRows;

/// The experts of this rank, as the model computes them.
pub trait LocalExperts: Sync {
    /// Among how many threads the rows of a layer are shared that have so many pairs of row and expert; at least 1.
    fn threads(&self, pairs: usize) -> usize;

    /// Applies one expert, `slot` counting this rank's experts of the layer in ascending id: `x` `[m, H]` to `out` `[m, H]`
    /// (overwritten, not weighted). Each row's result must not depend on the other rows. `work` is a buffer of the thread's, of
    /// any length and content.
    fn apply(&self, layer: LayerIdx, slot: usize, x: &[f32], out: &mut [f32], work: &mut Vec<f32>);
}

/// n tokens of this rank with their routes.
#[derive(Clone, Copy, Debug)]
pub struct RoutedBatch<'a> {
    /// `[n, H]`
    pub x: &'a [f32],
    /// `[n, k]`: logical expert ids, each below N.
    pub experts: &'a [u16],
    /// `[n, k]`
    pub weights: &'a [f32],
    /// `[n]`: as what each token is counted.
    pub phases: &'a [StepPhase],
    /// k
    pub top_k: usize,
    /// H
    pub hidden: usize,
}

/// The placement has another number of groups than the unit has ranks, or nodes in a hybrid layout: group g is rank or node g.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the placement has {groups} groups, the unit has {world} ranks and experts {layout}")]
pub struct WorldMismatch {
    /// Groups of the placement.
    pub groups: usize,
    /// Ranks of the unit.
    pub world: usize,
    /// How experts are divided.
    pub layout: ExpertLayout,
}

/// Where the experts of one layer are.
pub(super) struct LayerHosts {
    /// `[N]`: the rank, or node, whose copy of each expert this rank's tokens use; empty where every rank has a slice of each.
    rank_of: Vec<u16>,
    /// `[N]`: this rank's slot of each expert, [`NOT_HERE`] for the others'.
    pub(super) slot_of: Vec<u16>,
    /// How many experts this rank has.
    pub(super) slots: usize,
}

/// In place of a slot: the expert is another rank's.
pub(super) const NOT_HERE: u16 = u16::MAX;

/// This rank's part in the unit: its collectives, where every expert lies, and what it counts.
pub struct ExpertParallel {
    unit: WireRows,
    spread: ExpertSpread,
    layers: Vec<LayerHosts>,
    counters: Arc<Counters>,
    plan: DispatchPlan,
    timings: Timings,
    inbox: Inbox,
    outgoing: Vec<Vec<u8>>,
    incoming: Vec<Vec<u8>>,
}

impl ExpertParallel {
    /// Joins a placement to a link, over which rows travel in messages; group g of the placement is rank g. Where it has several
    /// copies of an expert, this rank's tokens use the one that [`ExpertCopies`] names.
    ///
    /// # Errors
    /// A placement for another number of ranks.
    pub fn new(
        link: Box<dyn Lockstep>,
        placement: impl Into<ExpertCopies>,
        counters: Arc<Counters>,
    ) -> Result<Self, WorldMismatch> {
        let memory = PrivateMemory::new(link.rank());
        Self::over(WireRows::f32(Box::new(RowCollectives::new(link, memory))), placement, ExpertLayout::Ep, counters)
    }

    /// Joins a placement to the collectives of a unit, which are those of its layout ([`ExpertLayout::join`]); of the placement,
    /// tensor-parallel experts only use the shape.
    ///
    /// # Errors
    /// As [`ExpertParallel::new`].
    pub fn over(
        unit: WireRows,
        placement: impl Into<ExpertCopies>,
        layout: ExpertLayout,
        counters: Arc<Counters>,
    ) -> Result<Self, WorldMismatch> {
        let spread = ExpertSpread { layout, copies: placement.into() };
        let (groups, world) = (usize::from(spread.copies.groups()), unit.world());
        if groups != layout.hosts(world) || layout.world(groups) != world {
            return Err(WorldMismatch { groups, world, layout });
        }
        Ok(Self {
            timings: Timings::new(spread.copies.layers()),
            layers: LayerHosts::of_spread(&spread, RankId::new(unit.rank() as u16)),
            unit,
            spread,
            counters,
            plan: DispatchPlan::default(),
            inbox: Inbox::default(),
            outgoing: vec![Vec::new(); world],
            incoming: vec![Vec::new(); world],
        })
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> RankId {
        RankId::new(self.unit.rank() as u16)
    }

    /// Ranks in the unit.
    #[must_use]
    pub fn world(&self) -> usize {
        self.unit.world()
    }

    /// Where the experts are.
    #[must_use]
    pub fn spread(&self) -> &ExpertSpread {
        &self.spread
    }

    /// From now on the experts are elsewhere: of the same model, on the same ranks.
    pub(crate) fn set_spread(&mut self, spread: ExpertSpread) {
        debug_assert_eq!(spread.copies.layers(), self.layers.len());
        self.layers = LayerHosts::of_spread(&spread, self.rank());
        self.spread = spread;
    }

    /// Sends each other rank its message and gives what they sent, by rank; the own slot is of no meaning. Outside of steps, and not
    /// counted.
    ///
    /// # Errors
    /// A rank failed.
    pub(crate) fn exchange(&mut self, outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, UnitError> {
        let mut incoming = vec![Vec::new(); outgoing.len()];
        self.unit.all_to_all(&outgoing, &mut incoming)?;
        Ok(incoming)
    }

    /// What this rank counts.
    #[must_use]
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// How long this rank's parts took.
    #[must_use]
    pub fn timings(&self) -> &Timings {
        &self.timings
    }

    /// Notes how long a step took.
    pub(crate) fn count_step(&mut self, began: Instant) {
        self.timings.add_step(began.elapsed());
    }

    /// Sleeps until this rank or another has something to do; see [`Lockstep::wait`].
    ///
    /// # Errors
    /// As [`Lockstep::wait`].
    pub fn wait(&mut self) -> Result<Wake, UnitError> {
        self.unit.wait()
    }

    /// Ends this rank's [`ExpertParallel::wait`] from another thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.unit.waker()
    }

    /// Counts tokens that a step has taken through the model.
    pub(crate) fn count_tokens(&self, phase: StepPhase, tokens: usize) {
        self.counters.add_tokens(phase, tokens as u64);
    }

    /// Sends every other rank the same message, and gives what each of them sent, by rank; the own slot is of no meaning.
    ///
    /// # Errors
    /// A rank failed.
    pub(crate) fn tell_all(&mut self, message: &[u8]) -> Result<&[Vec<u8>], UnitError> {
        self.count_collective(Collective::Sync, |_| message.len());
        for to in &mut self.outgoing {
            to.clear();
            to.extend_from_slice(message);
        }
        self.unit.all_to_all(&self.outgoing, &mut self.incoming)?;
        Ok(&self.incoming)
    }

    /// Where this rank writes its `[n, H]` partial sums before [`ExpertParallel::reduce_scatter`].
    ///
    /// # Errors
    /// As [`Collectives::part`](semmoe_kernels::collectives::Collectives::part).
    pub(crate) fn part(&mut self, len: usize) -> Result<&mut [f32], UnitError> {
        self.unit.part(len)
    }

    /// [`Collectives::reduce_scatter`](semmoe_kernels::collectives::Collectives::reduce_scatter); its time counts for `layer`, unless that has no experts.
    pub(crate) fn reduce_scatter(
        &mut self,
        layer: Option<LayerIdx>,
        hidden: usize,
        split: RowSplit<'_>,
        norm: Option<Norm<'_, f32>>,
        out: &mut [f32],
    ) -> Result<(), UnitError> {
        self.count_collective(Collective::ReduceScatter, |peer| {
            split_bytes(self.unit.dtype(), split.positions(peer).len(), hidden, 0)
        });
        let began = Instant::now();
        self.unit.reduce_scatter(hidden, split, norm, out)?;
        self.time(layer, TimedCollective::Scatter, began);
        Ok(())
    }

    /// [`Collectives::allgather`](semmoe_kernels::collectives::Collectives::allgather); its time counts as there.
    pub(crate) fn allgather(
        &mut self,
        layer: Option<LayerIdx>,
        own: OwnRows<'_, f32>,
        split: RowSplit<'_>,
        out: AllRows<'_, f32>,
    ) -> Result<(), UnitError> {
        let rows = split.positions(self.unit.rank()).len();
        self.count_collective(Collective::Allgather, |_| {
            split_bytes(self.unit.dtype(), rows, own.hidden, own.labels.len())
        });
        let began = Instant::now();
        self.unit.allgather(own, split, out)?;
        self.time(layer, TimedCollective::Gather, began);
        Ok(())
    }

    /// The MoE sum of this rank's tokens: `out[t] = sum of weight x expert(x[t])` over the token's experts, wherever they
    /// are; `out` is `[n, H]`, overwritten. Every rank calls this equally often with the same layer, n = 0 included.
    ///
    /// The sum is taken per rank over its experts (or slices of them) in ascending id, then over ranks in order, so that it
    /// depends on the placement but never on what else is in the batch.
    ///
    /// # Errors
    /// A rank failed; `out` is then unspecified and the unit cannot go on.
    ///
    /// # Panics
    /// If the batch does not fit the placement, which the model's router rules out.
    pub fn moe(
        &mut self,
        layer: LayerIdx,
        batch: RoutedBatch<'_>,
        experts: &dyn LocalExperts,
        out: &mut [f32],
    ) -> Result<(), UnitError> {
        let began = Instant::now();
        let hosts = &self.layers[layer.index()];
        let RoutedBatch { x, experts: chosen, weights, top_k, hidden, .. } = batch;
        let planned = match self.spread.layout {
            ExpertLayout::Ep | ExpertLayout::Hybrid(_) => {
                let parts = self.spread.layout.hosts(self.unit.world());
                self.plan.build(chosen, weights, top_k, &hosts.rank_of, parts)
            }
            ExpertLayout::Tp => self.plan.build_everywhere(chosen, weights, top_k, self.unit.world()),
        };
        planned.expect("the router chooses among the placement's experts");
        self.count(layer, &batch);

        let dispatch = Instant::now();
        self.unit.dispatch(x, hidden, &self.plan)?;
        self.time(Some(layer), TimedCollective::Dispatch, dispatch);

        let hosts = &self.layers[layer.index()];
        let received = self.unit.received();
        self.inbox.apply(layer, received, hidden, hosts, experts).map_err(|wrong| {
            let from = self.spread.layout.source(self.unit.rank(), wrong.from);
            UnitError::protocol(from, wrong.to_string())
        })?;

        let combine = Instant::now();
        self.unit.combine(&self.plan, out)?;
        self.time(Some(layer), TimedCollective::Combine, combine);
        self.timings.add_moe(layer, began.elapsed());
        Ok(())
    }

    /// What belongs to no MoE layer is part of the step only.
    fn time(&mut self, layer: Option<LayerIdx>, of: TimedCollective, began: Instant) {
        if let Some(layer) = layer {
            self.timings.add(layer, of, began.elapsed());
        }
    }

    /// Counts what this rank is about to send in one collective.
    fn count_collective(&self, collective: Collective, bytes_to: impl Fn(usize) -> usize) {
        let me = self.unit.rank();
        let bytes: usize = (0..self.world()).filter(|&peer| peer != me).map(bytes_to).sum();
        self.counters.add_collective(collective, bytes as u64);
    }

    /// Counts what becomes of this rank's tokens, there and back, in bytes of messages that carry the rows. Where every rank has a
    /// slice of every expert, each pair is local, and the bytes are those of gathering rows and scattering sums. In a hybrid layout
    /// remote is what crosses nodes.
    fn count(&self, layer: LayerIdx, batch: &RoutedBatch<'_>) {
        let mut traffic = LayerTraffic::default();
        for host in 0..self.plan.ranks() {
            let (rows, is_local) = (self.plan.rank(host), host == self.spread.layout.host(self.unit.rank()));
            for (token, pairs) in rows.tokens.iter().zip(rows.pairs) {
                let of = traffic.of_mut(batch.phases[*token as usize]);
                if is_local || self.spread.layout != ExpertLayout::Tp {
                    of.activations.add(is_local, u64::from(*pairs));
                }
                of.bytes.add(is_local, dispatch_row_bytes(self.unit.dtype(), usize::from(*pairs), batch.hidden) as u64);
            }
            // The headers of messages go with the first row.
            if let Some(first) = rows.tokens.first() {
                let headers = rows.tokens.len().min(self.spread.layout.messages()) * DISPATCH_HEADER_BYTES;
                traffic.of_mut(batch.phases[*first as usize]).bytes.add(is_local, headers as u64);
            }
        }
        self.counters.add(layer, &traffic);
    }
}

impl LayerHosts {
    /// Of every layer.
    fn of_spread(spread: &ExpertSpread, rank: RankId) -> Vec<Self> {
        let layers = (0..spread.copies.layers()).map(|layer| LayerIdx::new(layer as u16));
        layers
            .map(|layer| match spread.layout {
                ExpertLayout::Ep | ExpertLayout::Hybrid(_) => {
                    Self::new(&spread.copies, layer, GroupId::new(spread.layout.host(rank.index()) as u16))
                }
                ExpertLayout::Tp => Self::everywhere(spread.copies.experts()),
            })
            .collect()
    }

    /// Every rank has a slice of each: the slot of an expert is its id.
    fn everywhere(experts: u16) -> Self {
        Self { rank_of: Vec::new(), slot_of: (0..experts).collect(), slots: experts.into() }
    }

    fn new(copies: &ExpertCopies, layer: LayerIdx, host: GroupId) -> Self {
        let mut slots = 0;
        let mut slot_of = Vec::new();
        for expert in 0..copies.experts() {
            if copies.holds(host, layer, ExpertId::new(expert)) {
                slot_of.push(slots);
                slots += 1;
            } else {
                slot_of.push(NOT_HERE);
            }
        }
        Self { rank_of: copies.used_at(host.get().into(), layer).to_vec(), slot_of, slots: slots.into() }
    }
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
