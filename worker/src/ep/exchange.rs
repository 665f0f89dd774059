//! One MoE layer over all ranks: two collectives, whatever the batch.

use std::sync::Arc;

use semmoe_kernels::{DispatchPlan, combine};
use semmoe_tables::{ExpertId, LayerIdx, Placement, RankId};

use super::counters::{ByPlace, Counters, StepPhase};
use super::inbox::Inbox;
use super::transport::{Transport, TransportError, Wake, Waker};
use super::wire;

/// The experts of this rank, as the model computes them.
pub trait LocalExperts {
    /// Applies one expert, `slot` counting this rank's experts of the layer in ascending id: `x` `[m, H]` to `out` `[m, H]`
    /// (overwritten, not weighted). Each row's result must not depend on the other rows.
    fn apply(&mut self, layer: LayerIdx, slot: usize, x: &[f32], out: &mut [f32]);
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
    /// `[N]`: the rank of each expert.
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
    plan: DispatchPlan,
    inbox: Inbox,
    outgoing: Vec<Vec<u8>>,
    incoming: Vec<Vec<u8>>,
    /// `[R, H]`: what the ranks returned for the rows of the plan.
    partials: Vec<f32>,
}

impl ExpertParallel {
    /// Joins a placement to a transport; group g of the placement is rank g.
    ///
    /// # Errors
    /// A placement for another number of ranks.
    pub fn new(
        transport: Box<dyn Transport>,
        placement: &Placement,
        counters: Arc<Counters>,
    ) -> Result<Self, WorldMismatch> {
        let (groups, world) = (usize::from(placement.groups()), transport.world());
        if groups != world {
            return Err(WorldMismatch { groups, world });
        }
        let layers = (0..placement.layers())
            .map(|layer| LayerHosts::new(placement, LayerIdx::new(layer as u16), transport.rank()))
            .collect();
        Ok(Self {
            transport,
            layers,
            counters,
            plan: DispatchPlan::default(),
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

    /// Counts tokens that a step has taken through the model.
    pub(crate) fn count_tokens(&self, phase: StepPhase, tokens: usize) {
        self.counters.add_tokens(phase, tokens as u64);
    }

    /// The MoE sum of this rank's tokens: `out[t] = sum of weight x expert(x[t])` over the token's experts, wherever they
    /// are; `out` is `[n, H]`, overwritten. Every rank calls this equally often with the same layer, n = 0 included.
    ///
    /// The sum is taken per rank over its experts in ascending id, then over ranks in order, so that it depends on the
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
        experts: &mut dyn LocalExperts,
        out: &mut [f32],
    ) -> Result<(), TransportError> {
        let me = self.rank().index();
        let hidden = batch.hidden;
        let hosts = &self.layers[layer.index()];
        self.plan
            .build(batch.experts, batch.weights, batch.top_k, &hosts.rank_of, self.outgoing.len())
            .expect("the router chooses among the placement's experts");
        self.count_activations(layer);

        for (rank, message) in self.outgoing.iter_mut().enumerate() {
            message.clear();
            if rank != me {
                wire::encode_dispatch(self.plan.rank(rank), batch.x, hidden, message);
            }
        }
        self.count_bytes(wire::dispatch_bytes(self.plan.rank(me), hidden));
        self.transport.all_to_all(&self.outgoing, &mut self.incoming)?;

        self.inbox.clear(hidden);
        for rank in 0..self.incoming.len() {
            if rank == me {
                let rows = self.plan.rank(me);
                self.inbox.push_own(rows, batch.x, &hosts.slot_of);
            } else {
                let message = &self.incoming[rank];
                self.inbox
                    .push_message(message, &hosts.slot_of)
                    .map_err(|detail| TransportError::protocol(RankId::new(rank as u16), detail))?;
            }
        }
        self.inbox.apply(layer, hosts.slots, experts);
        self.combine(hidden, out)
    }

    /// Second half: every rank's sums go home.
    fn combine(&mut self, hidden: usize, out: &mut [f32]) -> Result<(), TransportError> {
        let me = self.rank().index();
        for (rank, message) in self.outgoing.iter_mut().enumerate() {
            message.clear();
            if rank != me {
                wire::encode_rows(self.inbox.sums(rank), message);
            }
        }
        self.count_bytes(size_of_val(self.inbox.sums(me)));
        self.transport.all_to_all(&self.outgoing, &mut self.incoming)?;
        self.partials.resize(self.plan.rows() * hidden, 0.0);
        for (rank, message) in self.incoming.iter().enumerate() {
            let rows = self.plan.row_range(rank);
            let partials = &mut self.partials[rows.start * hidden..rows.end * hidden];
            if rank == me {
                partials.copy_from_slice(self.inbox.sums(me));
            } else {
                wire::decode_rows(message, partials)
                    .map_err(|detail| TransportError::protocol(RankId::new(rank as u16), detail))?;
            }
        }
        combine(&self.plan, &self.partials, hidden, out).expect("the plan's own rows fit it");
        Ok(())
    }

    fn count_activations(&self, layer: LayerIdx) {
        let total = (0..self.world()).map(|rank| self.plan.rank(rank).experts.len() as u64).sum::<u64>();
        let local = self.plan.rank(self.rank().index()).experts.len() as u64;
        self.counters.add_activations(layer, ByPlace { local, remote: total - local });
    }

    /// Counts what is about to be sent, and the bytes that the own slot would have had.
    fn count_bytes(&self, own: usize) {
        let remote = self.outgoing.iter().map(|message| message.len() as u64).sum();
        self.counters.add_bytes(ByPlace { local: own as u64, remote });
    }
}

impl LayerHosts {
    fn new(placement: &Placement, layer: LayerIdx, rank: RankId) -> Self {
        let mut slots = 0;
        let (mut rank_of, mut slot_of) = (Vec::new(), Vec::new());
        for expert in 0..placement.experts() {
            let group = placement.group_of(layer, ExpertId::new(expert)).get();
            rank_of.push(group);
            if group == rank.get() {
                slot_of.push(slots);
                slots += 1;
            } else {
                slot_of.push(NOT_HERE);
            }
        }
        let slots = usize::from(slots);
        Self { rank_of, slot_of, slots }
    }
}
