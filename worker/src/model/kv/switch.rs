//! Moves pages when attention switches between dp, tp and tp in groups, as planned by [`semmoe_kernels::reshard::kv`].
//! Pages are copied to unused ones; the old pages are kept until all ranks have agreed. Pages never leave a [`KvSpan`].
//!
//! 1. For a switch to larger groups, ranks exchange descriptions of their pools, without page contents. All ranks in a
//!    group have the same pool.
//! 2. Each rank plans all moves and checks its own free memory, and all ranks vote on the plan's digest. Nothing has
//!    moved yet.
//! 3. Page contents are sent, and all ranks vote on the result, either before the switch takes effect or, lazily,
//!    afterwards ([`KvArrival`]).

use std::ops::Range;

use semmoe_kernels::reshard::kv::{Balance, KvError, KvMove, KvPlan, KvPool as PlanPool, KvShape};

use super::CacheShape;
use super::arrival::KvArrival;
use super::cache::KvCache;
use super::describe::{Described, Named, decode, encode};
use super::pages::Pages;
use super::pool::KvPool;
use super::store::Store;
use super::transfer::{KvObjection, KvPhase, PlannedMoves};
use crate::ep::ExpertParallel;
use crate::memory::available_bytes;
use crate::model::switch::{Obstacle, ROUND_BYTES, SwitchFault, allgather_messages, vote_of_spans};

/// The ranks among which pages move in a switch. This is the larger of a rank's groups before and after the switch; it
/// consists of whole groups of the smaller kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct KvSpan {
    /// In the unit.
    pub(crate) ranks: Range<usize>,
    /// Group size in ranks before the switch. Either this divides `after`, the size after the switch, or vice versa.
    pub(crate) before: usize,
    pub(crate) after: usize,
}

impl KvSpan {
    /// Returns the span that contains a rank.
    pub(crate) fn new(before: usize, after: usize, rank: usize) -> Self {
        let width = before.max(after);
        let first = rank - rank % width;
        Self { ranks: first..first + width, before, after }
    }

    /// Whether the switch merges smaller groups into a larger one.
    pub(crate) fn merges(&self) -> bool {
        self.after > self.before
    }

    /// Index within the unit of the span's first group after the switch.
    pub(crate) fn first_group(&self) -> usize {
        self.ranks.start / self.after
    }

    /// Number of groups in the span after the switch.
    pub(crate) fn groups(&self) -> usize {
        self.ranks.len() / self.after
    }
}

/// A sequence whose pages move.
#[derive(Debug)]
pub struct MovingSequence<'a> {
    /// Unique within the unit.
    pub id: u64,
    /// The sequence's pages.
    pub kv: &'a KvCache,
    /// `[groups]`: the sequence's preference for each of the span's smaller groups (for each rank, with dp); empty if
    /// there is none.
    pub shares: Vec<f32>,
}

/// A pool whose sequences will continue with another attention layout.
#[derive(Debug)]
pub struct AttentionSwitch<'a> {
    /// The pool in use.
    pub pool: &'a KvPool,
    /// All sequences that hold pages of the pool.
    pub sequences: &'a [MovingSequence<'a>],
    /// Capacity of the new pool in pages.
    pub capacity: usize,
    /// Whether pages move after the switch ([`KvArrival`]). If so, only pages that sequences hold are moved; the others
    /// are dropped, because they would keep the old pool's memory allocated until a request needed them.
    pub lazily: bool,
}

/// An attention switch as it applies to one rank's pool.
pub(in crate::model) struct KvSwitch<'a> {
    pub(in crate::model) switch: &'a AttentionSwitch<'a>,
    /// Shape of whole pages, across all ranks.
    pub(in crate::model) whole: KvShape,
    pub(in crate::model) span: KvSpan,
    /// Shape of this rank's pages after the switch.
    pub(in crate::model) shape: CacheShape,
    /// Number of experts per token, over all layers.
    pub(in crate::model) route_width: usize,
    /// Whether keys and values are stored on a GPU, so that pages in host memory contain none.
    pub(in crate::model) elsewhere: bool,
}

/// Moves of pages whose keys and values are stored on a GPU.
#[derive(Debug)]
#[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "CPU pages contain all keys and values"))]
pub(in crate::model) struct PageMoves {
    /// Ids of the old pages, indexed by the page numbers used in the moves.
    pub(in crate::model) ids: Vec<u32>,
    /// Moves, indexed by receiving rank.
    pub(in crate::model) by_rank: Vec<Vec<KvMove>>,
    /// Number of this rank's new pages.
    pub(in crate::model) new_pages: usize,
    /// Digest of the plan.
    pub(in crate::model) digest: u64,
}

/// A pool that has been or will be filled but is not in use yet.
#[derive(Debug)]
pub struct PreparedKv {
    /// The pool.
    pub pool: KvPool,
    /// This rank's sequences whose pages have already moved, by ascending id.
    pub sequences: Vec<(u64, KvCache)>,
    /// The outstanding pages, if they move lazily.
    pub arrival: Option<KvArrival>,
    /// Each of the span's sequences with the group of the unit (with dp, the rank) that it is assigned to.
    pub groups: Vec<(u64, u16)>,
    /// Digest of all data that must be equal on all ranks of the span.
    pub digest: u64,
    /// Outstanding moves of keys and values that are stored on a GPU.
    #[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "CPU pages contain all keys and values"))]
    pub(in crate::model) moves: Option<PageMoves>,
}

impl KvSwitch<'_> {
    /// Moves the pages, together with all ranks. If the ranks refuse, nothing has changed.
    pub(in crate::model) fn prepare(
        &self,
        ep: &mut ExpertParallel,
        objection: KvObjection<'_>,
    ) -> Result<PreparedKv, SwitchFault> {
        let AttentionSwitch { pool, sequences, lazily, .. } = *self.switch;
        let state = pool.state();
        let named =
            sequences.iter().map(|MovingSequence { id, kv, shares }| Named { id: *id, chain: kv.chain(), shares });
        let described = state.pages.describe(named, !lazily);
        let mut own = objection(KvPhase::Planning).map_or(Ok(Vec::new()), |cause| Err(Obstacle::Own(cause)));
        let mut messages = Vec::new();
        if self.span.merges() {
            own = own.and_then(|_| encode(&described.pool).map_err(undescribed));
            messages = allgather_messages(ep, own.as_ref().cloned().unwrap_or_default())?;
        }
        let me = ep.rank().index() - self.span.ranks.start;
        let plan = own.and_then(|_| self.plan(&described, &messages));
        let plan = plan.and_then(|plan| self.check_room(&plan, me).map(|()| plan));
        if let Some(refusal) = vote_of_spans(ep, self.span.ranks.len(), plan.as_ref().map(KvPlan::digest))? {
            return Err(refusal.into());
        }
        let Ok(plan) = plan else { unreachable!("all ranks have agreed") };
        let digest = plan.digest();
        let of_rank = |rank| {
            let mut moves = Vec::new();
            plan.moves(rank, &mut moves);
            moves
        };
        let moves = self.elsewhere.then(|| PageMoves {
            ids: described.ids.clone(),
            by_rank: (0..self.span.ranks.len()).map(of_rank).collect(),
            new_pages: plan.pool(me).sources.len(),
            digest,
        });
        let mut arrival = self.arrival(plan, described, &state.pages, me);
        let (pool, groups) = (arrival.pool.clone(), arrival.groups());
        if lazily {
            return Ok(PreparedKv { pool, sequences: Vec::new(), arrival: Some(arrival), groups, digest, moves });
        }
        let idle: Vec<_> = state.pages.idle.values().map(|&id| (id, state.store.shared(id))).collect();
        let held = sequences.iter().flat_map(|sequence| sequence.kv.held());
        let all = held.chain(idle.iter().map(|(id, page)| (*id, &**page)));
        let digest = arrival.move_all(all, ep, objection)?;
        Ok(PreparedKv { pool, sequences: arrival.into_sequences(), arrival: None, groups, digest, moves })
    }

    /// Plans the new pools; the plan is identical on all ranks. If groups merge, `messages` contains the pool
    /// descriptions of all ranks.
    fn plan(&self, described: &Described, messages: &[Vec<u8>]) -> Result<KvPlan, Obstacle> {
        let planned = match self.span.merges() {
            true => {
                // All ranks of a group have the same pool, so the first rank's description is enough.
                let firsts = self.span.ranks.clone().step_by(self.span.before);
                let pools = firsts.map(|rank| described_by(rank, &messages[rank])).collect::<Result<Vec<_>, _>>()?;
                KvPlan::merge(self.whole, self.span.before, &pools, self.switch.capacity)
            }
            false => self.split(&described.pool),
        };
        planned.map_err(|error| Obstacle::Own(error.to_string()))
    }

    /// Divides a group's pool among smaller groups.
    fn split(&self, pool: &PlanPool) -> Result<KvPlan, KvError> {
        let promised: usize = pool.sequences.iter().map(|sequence| sequence.promised).sum();
        let even = (pool.pages.len() - pool.idle.len() + promised) / self.span.groups();
        let longest = pool.sequences.iter().map(|sequence| sequence.pages.len() + sequence.promised).max();
        let full = even + even.div_ceil(4) + longest.unwrap_or_default();
        // Sequences go to their previous rank, or to the one that T prefers, until that rank exceeds an even part by a
        // quarter plus one sequence. Only if this does not fit into the pools are the ranks balanced more closely.
        let capacity = self.switch.capacity;
        let preferred = Balance { capacity, full, slack: usize::MAX };
        let close = Balance { capacity, full: capacity, slack: even.div_ceil(4) };
        let split = |balance| KvPlan::split(self.whole, self.span.after, pool, balance);
        split(preferred).or_else(|_| split(close))
    }

    /// Checks that this machine has enough memory to hold the new pages in addition to the old ones.
    fn check_room(&self, plan: &KvPlan, rank: usize) -> Result<(), Obstacle> {
        let pages = plan.pool(rank).sources.len();
        let needed = (pages * self.shape.page_bytes()
            + 2 * self.whole.ranks() * ROUND_BYTES.min(pages * self.shape.page_bytes())) as u64;
        match available_bytes().filter(|available| *available < needed) {
            None => Ok(()),
            Some(available) => Err(Obstacle::Own(format!(
                "{pages} KV cache pages need {needed} bytes while they move, but only {available} are available"
            ))),
        }
    }

    /// Creates the new pool before any of its pages arrive.
    fn arrival(&self, plan: KvPlan, described: Described, before: &Pages, me: usize) -> KvArrival {
        let (pages, chains) = Pages::planned(&plan.pool(me).pool, self.switch.capacity, before);
        let pool = KvPool::of(self.shape, pages, Store::default());
        let alike = self.whole.heads_of(0) == self.whole.heads_of(self.span.ranks.len() - 1);
        let span = self.span.clone();
        let planned = PlannedMoves { plan, span, route_width: self.route_width, alike, me, elsewhere: self.elsewhere };
        KvArrival::new(planned, pool, chains, described.ids)
    }
}

fn undescribed(error: serde_json::Error) -> Obstacle {
    Obstacle::Own(format!("it cannot describe its pages: {error}"))
}

/// Parses the pool description from a rank's message, which is empty if the rank failed to describe its pool.
fn described_by(rank: usize, message: &[u8]) -> Result<PlanPool, Obstacle> {
    decode(message).map_err(|error| match message {
        [] => Obstacle::Peer(rank),
        _ => Obstacle::Own(format!("rank {rank} sent an invalid description of its pages: {error}")),
    })
}
