//! One MoE layer over all ranks: two collectives, whatever the batch.

use std::sync::Arc;
use std::time::Instant;

use semmoe_tables::{ExpertCopies, ExpertId, GroupId, LayerIdx, RankId};

use super::counters::{Counters, LayerTraffic, StepPhase};
use super::inbox::Inbox;
use super::sends::{ExpertLayout, Sends};
use super::timings::{TimedCollective, Timings};
use super::transport::{Transport, TransportError, Wake, Waker};
use super::wire;

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

/// The placement has another number of groups than the unit has ranks: group g is rank g.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the placement has {groups} groups, the unit has {world} ranks")]
pub struct WorldMismatch {
    /// Groups of the placement.
    pub groups: usize,
    /// Ranks of the unit.
    pub world: usize,
}

/// Where the experts of one layer are.
struct LayerHosts {
    /// `[N]`: the rank whose copy of each expert this rank's tokens use; empty where every rank has a slice of each.
    rank_of: Vec<u16>,
    /// `[N]`: this rank's slot of each expert, [`NOT_HERE`] for the others'.
    slot_of: Vec<u16>,
    /// How many experts this rank has.
    slots: usize,
}

/// In place of a slot: the expert is another rank's.
pub(super) const NOT_HERE: u16 = u16::MAX;

/// This rank's part in the unit: its transport, where every expert lies, and what it counts.
pub struct ExpertParallel {
    transport: Box<dyn Transport>,
    layers: Vec<LayerHosts>,
    counters: Arc<Counters>,
    sends: Sends,
    timings: Timings,
    inbox: Inbox,
    outgoing: Vec<Vec<u8>>,
    incoming: Vec<Vec<u8>>,
    /// `[R, H]`: what the ranks returned for the rows sent.
    partials: Vec<f32>,
}

impl ExpertParallel {
    /// Joins a placement to a transport; group g of the placement is rank g. Where it has several copies of an expert, this
    /// rank's tokens use the one that [`ExpertCopies`] names.
    ///
    /// # Errors
    /// A placement for another number of ranks.
    pub fn new(
        transport: Box<dyn Transport>,
        placement: impl Into<ExpertCopies>,
        counters: Arc<Counters>,
    ) -> Result<Self, WorldMismatch> {
        Self::with_layout(transport, placement, ExpertLayout::Ep, counters)
    }

    /// The same with experts in either layout; of the placement, tensor-parallel experts only use the shape.
    ///
    /// # Errors
    /// As [`ExpertParallel::new`].
    pub fn with_layout(
        transport: Box<dyn Transport>,
        placement: impl Into<ExpertCopies>,
        layout: ExpertLayout,
        counters: Arc<Counters>,
    ) -> Result<Self, WorldMismatch> {
        let placement = placement.into();
        let (groups, world) = (usize::from(placement.groups()), transport.world());
        if groups != world {
            return Err(WorldMismatch { groups, world });
        }
        let layers = (0..placement.layers())
            .map(|layer| match layout {
                ExpertLayout::Ep => LayerHosts::new(&placement, LayerIdx::new(layer as u16), transport.rank()),
                ExpertLayout::Tp => LayerHosts::everywhere(placement.experts()),
            })
            .collect();
        Ok(Self {
            transport,
            timings: Timings::new(placement.layers()),
            layers,
            counters,
            sends: Sends::new(layout, world),
            inbox: Inbox::default(),
            outgoing: vec![Vec::new(); world],
            incoming: vec![Vec::new(); world],
            partials: Vec::new(),
        })
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> RankId {
        self.transport.rank()
    }

    /// Ranks in the unit.
    #[must_use]
    pub fn world(&self) -> usize {
        self.transport.world()
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

    /// Sleeps until this rank or another has something to do; see [`Transport::wait`].
    ///
    /// # Errors
    /// As [`Transport::wait`].
    pub fn wait(&mut self) -> Result<Wake, TransportError> {
        self.transport.wait()
    }

    /// Ends this rank's [`ExpertParallel::wait`] from another thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.transport.waker()
    }

    /// One collective: `fill` writes what goes to another rank, behind nothing. The exchange is timed as `of`; what belongs to
    /// no MoE layer is part of the step only.
    pub(super) fn all_to_all(
        &mut self,
        of: Option<(LayerIdx, TimedCollective)>,
        mut fill: impl FnMut(usize, &mut Vec<u8>),
    ) -> Result<&[Vec<u8>], TransportError> {
        let me = self.rank().index();
        for (rank, message) in self.outgoing.iter_mut().enumerate() {
            message.clear();
            if rank != me {
                fill(rank, message);
            }
        }
        match of {
            Some((layer, collective)) => self.timed_all_to_all(layer, collective)?,
            None => self.transport.all_to_all(&self.outgoing, &mut self.incoming)?,
        }
        Ok(&self.incoming)
    }

    /// Counts tokens that a step has taken through the model.
    pub(crate) fn count_tokens(&self, phase: StepPhase, tokens: usize) {
        self.counters.add_tokens(phase, tokens as u64);
    }

    /// The MoE sum of this rank's tokens: `out[t] = sum of weight x expert(x[t])` over the token's experts, wherever they
    /// are; `out` is `[n, H]`, overwritten. Every rank calls this equally often with the same layer, n = 0 included.
    ///
    /// The sum is taken per rank over its experts (or slices of them) in ascending id, then over ranks in order, so that it depends on the
    /// placement but never on what else is in the batch.
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
    ) -> Result<(), TransportError> {
        let began = Instant::now();
        let me = self.rank().index();
        let hidden = batch.hidden;
        let hosts = &self.layers[layer.index()];
        self.sends.build(&batch, &hosts.rank_of, self.outgoing.len());
        self.count(layer, &batch);

        for (rank, message) in self.outgoing.iter_mut().enumerate() {
            message.clear();
            if rank != me {
                wire::encode_dispatch(self.sends.rank(rank), batch.x, hidden, message);
            }
        }
        self.timed_all_to_all(layer, TimedCollective::Dispatch)?;

        let hosts = &self.layers[layer.index()];
        self.inbox.clear(hidden);
        for rank in 0..self.incoming.len() {
            if rank == me {
                let rows = self.sends.rank(me);
                self.inbox.push_own(rows, batch.x, &hosts.slot_of);
            } else {
                let message = &self.incoming[rank];
                self.inbox
                    .push_message(message, &hosts.slot_of)
                    .map_err(|detail| TransportError::protocol(RankId::new(rank as u16), detail))?;
            }
        }
        self.inbox.apply(layer, hosts.slots, experts);
        self.combine(layer, hidden, out)?;
        self.timings.add_moe(layer, began.elapsed());
        Ok(())
    }

    fn timed_all_to_all(&mut self, layer: LayerIdx, of: TimedCollective) -> Result<(), TransportError> {
        let began = Instant::now();
        self.transport.all_to_all(&self.outgoing, &mut self.incoming)?;
        self.timings.add(layer, of, began.elapsed());
        Ok(())
    }

    /// Second half: every rank's sums go home.
    fn combine(&mut self, layer: LayerIdx, hidden: usize, out: &mut [f32]) -> Result<(), TransportError> {
        let me = self.rank().index();
        for (rank, message) in self.outgoing.iter_mut().enumerate() {
            message.clear();
            if rank != me {
                wire::encode_rows(self.inbox.sums(rank), message);
            }
        }
        self.timed_all_to_all(layer, TimedCollective::Combine)?;
        self.partials.resize(self.sends.rows() * hidden, 0.0);
        for (rank, message) in self.incoming.iter().enumerate() {
            let rows = self.sends.row_range(rank);
            let partials = &mut self.partials[rows.start * hidden..rows.end * hidden];
            if rank == me {
                partials.copy_from_slice(self.inbox.sums(me));
            } else {
                wire::decode_rows(message, partials)
                    .map_err(|detail| TransportError::protocol(RankId::new(rank as u16), detail))?;
            }
        }
        self.sends.combine(&self.partials, hidden, out);
        Ok(())
    }

    /// Counts what becomes of this rank's tokens, there and back. Where every rank has a slice of every expert, each pair is
    /// local, and the bytes are those of gathering rows and scattering sums.
    fn count(&self, layer: LayerIdx, batch: &RoutedBatch<'_>) {
        let mut traffic = LayerTraffic::default();
        for rank in 0..self.world() {
            let (rows, is_local) = (self.sends.rank(rank), rank == self.rank().index());
            for (token, pairs) in rows.tokens.iter().zip(rows.pairs) {
                let of = traffic.of_mut(batch.phases[*token as usize]);
                if is_local || self.sends.is_by_expert() {
                    of.activations.add(is_local, u64::from(*pairs));
                }
                of.bytes.add(is_local, wire::row_bytes(usize::from(*pairs), batch.hidden));
            }
            // A message's header goes with its first row.
            if let Some(first) = rows.tokens.first() {
                traffic.of_mut(batch.phases[*first as usize]).bytes.add(is_local, wire::HEADER_BYTES as u64);
            }
        }
        self.counters.add(layer, &traffic);
    }
}

impl LayerHosts {
    /// Every rank has a slice of each: the slot of an expert is its id.
    fn everywhere(experts: u16) -> Self {
        Self { rank_of: Vec::new(), slot_of: (0..experts).collect(), slots: experts.into() }
    }

    fn new(copies: &ExpertCopies, layer: LayerIdx, rank: RankId) -> Self {
        let mut slots = 0;
        let mut slot_of = Vec::new();
        for expert in 0..copies.experts() {
            if copies.holds(GroupId::new(rank.get()), layer, ExpertId::new(expert)) {
                slot_of.push(slots);
                slots += 1;
            } else {
                slot_of.push(NOT_HERE);
            }
        }
        Self { rank_of: copies.used_at(rank.index(), layer).to_vec(), slot_of, slots: slots.into() }
    }
}
