//! Pages move when attention changes between dp and tp, as [`semmoe_kernels::reshard::kv`] plans it: to pages that
//! nothing uses yet, beside the old ones, which are kept until all ranks have agreed.
//!
//! 1. dp to tp: ranks send each other what their pools hold, without bytes. With tp they hold the same.
//! 2. Each plans all moves, checks its own room, and all vote on the plan's digest. Nothing has moved.
//! 3. Bytes travel in rounds of bounded size, each piece with its checksum. A page's routes travel with it; with tp
//!    every rank has them.
//! 4. All vote on the result.

use std::collections::HashMap;
use std::sync::Arc;

use semmoe_kernels::reshard::PieceHash;
use semmoe_kernels::reshard::kv::{Balance, KvMove, KvPlan, KvPool as PlanPool, KvShape};
use semmoe_tables::Attention;

use super::CacheShape;
use super::cache::KvCache;
use super::describe::{Described, Named, decode, encode};
use super::page::Page;
use super::pages::{PageId, Pages};
use super::pool::{KvPool, State};
use super::store::Store;
use crate::ep::{ExpertParallel, UnitError};
use crate::memory::available_bytes;
use crate::model::agree::{Obstacle, ROUND_BYTES, tell_all, vote};

/// A sequence whose pages move.
#[derive(Debug)]
pub struct MovingSequence<'a> {
    /// Unique in the unit.
    pub id: u64,
    /// Its pages.
    pub kv: &'a KvCache,
    /// `[ranks]`: how much each rank is preferred for it where attention becomes dp; empty where none is.
    pub shares: Vec<f32>,
}

/// The phase of a change of attention in which a rank may object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvPhase {
    /// Before anything is sent.
    Planning,
    /// Before a round of pages.
    Moving {
        /// Rounds before it.
        round: usize,
    },
    /// All pages are there.
    Checking,
}

/// Why a rank refuses to continue, if it does.
pub type KvObjection<'a> = &'a mut dyn FnMut(KvPhase) -> Option<String>;

/// The change of a rank's pool.
pub(in crate::model) struct KvChange<'a> {
    pub(in crate::model) pool: &'a KvPool,
    /// All that hold pages of it.
    pub(in crate::model) sequences: &'a [MovingSequence<'a>],
    /// Of whole pages, for all ranks.
    pub(in crate::model) whole: KvShape,
    pub(in crate::model) to: Attention,
    /// Of this rank's new pages.
    pub(in crate::model) shape: CacheShape,
    /// Pages of the new pool.
    pub(in crate::model) capacity: usize,
    /// Experts of a token, in all layers.
    pub(in crate::model) route_width: usize,
}

/// A pool that is filled and not used yet.
#[derive(Debug)]
pub struct StagedKv {
    /// The pool.
    pub pool: KvPool,
    /// This rank's sequences by id, in the order in which they were admitted.
    pub sequences: Vec<(u64, KvCache)>,
    /// By sequence: the rank that has it, 0 where all have.
    pub homes: Vec<(u64, u16)>,
    /// The digest of everything that is the same on all ranks.
    pub digest: u64,
}

impl KvChange<'_> {
    /// Moves the pages, together with all ranks; the inner error is the first rank's objection, after which nothing has
    /// changed.
    pub(in crate::model) fn stage(
        &self,
        ep: &mut ExpertParallel,
        objection: KvObjection<'_>,
    ) -> Result<Result<StagedKv, String>, UnitError> {
        let state = self.pool.state();
        let described = state.pages.describe(self.sequences.iter().map(|MovingSequence { id, kv, shares }| Named {
            id: *id,
            chain: kv.chain(),
            shares,
        }));
        let plan = self.plan(&described, ep, objection)?;
        let plan = plan.and_then(|plan| self.check_room(&plan, ep.rank().index()).map(|()| plan));
        if let Some(cause) = vote(ep, plan.as_ref().map(KvPlan::digest))? {
            return Ok(Err(cause));
        }
        let Ok(plan) = plan else { unreachable!("all ranks have agreed") };
        let mut transfer = Transfer::new(self, &plan, &state, &described, ep);
        let moved = transfer.run(ep, objection)?;
        let digest = moved.map(|()| transfer.digest());
        if let Some(cause) = vote(ep, digest.as_ref().map(|digest| *digest))? {
            return Ok(Err(cause));
        }
        let memory = transfer.memory;
        Ok(Ok(self.assemble(&plan, memory, &state.pages, ep, digest.unwrap_or_default())))
    }

    /// The plan of the new pools, the same on all ranks.
    fn plan(
        &self,
        described: &Described,
        ep: &mut ExpertParallel,
        objection: KvObjection<'_>,
    ) -> Result<Result<KvPlan, Obstacle>, UnitError> {
        let own = objection(KvPhase::Planning).map_or(Ok(()), Err);
        match self.to {
            Attention::Tp => {
                let own = own.and_then(|()| encode(&described.pool));
                let failed = own.as_ref().err().cloned();
                let told = tell_all(ep, own.unwrap_or_default())?;
                if let Some(cause) = failed {
                    return Ok(Err(Obstacle::Own(cause)));
                }
                let mut pools: Vec<PlanPool> = Vec::new();
                for (rank, message) in told.iter().enumerate() {
                    match decode(message) {
                        Ok(pool) => pools.push(pool),
                        Err(_) if message.is_empty() => return Ok(Err(Obstacle::Peer(rank))),
                        Err(cause) => return Ok(Err(Obstacle::Own(format!("rank {rank} has {cause}")))),
                    }
                }
                let plan = KvPlan::gather(self.whole, &pools, self.capacity);
                Ok(plan.map_err(|error| Obstacle::Own(error.to_string())))
            }
            Attention::Dp => {
                if let Err(cause) = own {
                    return Ok(Err(Obstacle::Own(cause)));
                }
                let pool = &described.pool;
                let promised: usize = pool.sequences.iter().map(|sequence| sequence.promised).sum();
                let even = (pool.pages.len() - pool.idle.len() + promised) / ep.world();
                let longest = pool.sequences.iter().map(|sequence| sequence.pages.len() + sequence.promised).max();
                let full = even + even.div_ceil(4) + longest.unwrap_or_default();
                // Where a sequence was, or where T has it, counts until a rank has a quarter more than an even part and
                // one sequence. Only where that leaves no room are ranks kept close to each other.
                let at_home = Balance { capacity: self.capacity.min(full), slack: usize::MAX };
                let close = Balance { capacity: self.capacity, slack: even.div_ceil(4) };
                let plan =
                    KvPlan::scatter(self.whole, pool, at_home).or_else(|_| KvPlan::scatter(self.whole, pool, close));
                Ok(plan.map_err(|error| Obstacle::Own(error.to_string())))
            }
        }
    }

    /// Whether this machine has memory for the new pages, beside the old ones.
    fn check_room(&self, plan: &KvPlan, rank: usize) -> Result<(), Obstacle> {
        let pages = plan.pool(rank).sources.len();
        let needed = (pages * self.shape.page_bytes()
            + 2 * self.whole.ranks() * ROUND_BYTES.min(pages * self.shape.page_bytes())) as u64;
        match available_bytes().filter(|available| *available < needed) {
            None => Ok(()),
            Some(available) => Err(Obstacle::Own(format!(
                "{pages} pages of keys and values need {needed} bytes while they move, and {available} are available"
            ))),
        }
    }

    /// The new pool and this rank's sequences in it.
    fn assemble(&self, plan: &KvPlan, memory: Vec<Page>, before: &Pages, ep: &ExpertParallel, digest: u64) -> StagedKv {
        let planned = &plan.pool(ep.rank().index()).pool;
        let (pages, chains) = Pages::planned(planned, self.capacity, before);
        let (mut store, mut own) = (Store::default(), HashMap::new());
        for (id, (page, of)) in (0..).zip(memory.into_iter().zip(&planned.pages)) {
            match of.sealed {
                true => drop(store.share(id, page)),
                false => drop(own.insert(id, page)),
            }
        }
        let pool = KvPool::of(self.shape, pages, store);
        let cache = |chain| KvCache::new(pool.clone(), chain, |id| own.remove(&id));
        let caches: Vec<KvCache> = chains.into_iter().map(cache).collect();
        let sequences = planned.sequences.iter().map(|sequence| sequence.id).zip(caches).collect();
        let ranks = if self.to == Attention::Tp { 1 } else { ep.world() };
        let homes = (0..ranks)
            .flat_map(|rank| plan.pool(rank).pool.sequences.iter().map(move |sequence| (sequence.id, rank as u16)));
        StagedKv { sequences, homes: homes.collect(), digest, pool }
    }
}

/// One rank's part in the moves of a plan.
struct Transfer<'a> {
    change: &'a KvChange<'a>,
    plan: &'a KvPlan,
    /// Pages of the old pool, as it was described.
    sources: Vec<Source<'a>>,
    /// By receiving rank.
    moves: Vec<Vec<KvMove>>,
    /// The new pages.
    memory: Vec<Page>,
    me: usize,
}

/// An old page.
enum Source<'a> {
    Held(&'a Page),
    Idle(Arc<Page>),
}

impl Source<'_> {
    fn page(&self) -> &Page {
        match self {
            Self::Held(page) => page,
            Self::Idle(page) => page,
        }
    }
}

impl<'a> Transfer<'a> {
    fn new(
        change: &'a KvChange<'a>,
        plan: &'a KvPlan,
        state: &State,
        described: &Described,
        ep: &ExpertParallel,
    ) -> Self {
        let held: HashMap<PageId, &'a Page> = change.sequences.iter().flat_map(|sequence| sequence.kv.held()).collect();
        let source = |id: &PageId| match held.get(id) {
            Some(page) => Source::Held(page),
            None => Source::Idle(state.store.shared(*id)),
        };
        let sources = described.ids.iter().map(source).collect();
        let moves = (0..ep.world()).map(|rank| {
            let mut moves = Vec::new();
            plan.moves(rank, &mut moves);
            moves
        });
        let (mut store, me) = (Store::default(), ep.rank().index());
        let pages = plan.pool(me).sources.len() as PageId;
        let memory = (0..pages).filter_map(|id| store.page(&change.shape, id)).collect();
        Self { change, plan, sources, moves: moves.collect(), memory, me }
    }

    /// Fills the new pages. A rank that objects takes part with empty messages.
    fn run(&mut self, ep: &mut ExpertParallel, objection: KvObjection<'_>) -> Result<Result<(), Obstacle>, UnitError> {
        self.copy_own();
        let largest = self.moves.iter().flatten().map(|piece| piece.rows * piece.bytes).max().unwrap_or(1);
        let size = (ROUND_BYTES / largest.max(1)).max(1);
        let mut state = Ok(());
        for round in 0..self.rounds(size) {
            if let (true, Some(cause)) = (state.is_ok(), objection(KvPhase::Moving { round })) {
                state = Err(Obstacle::Own(cause));
            }
            let outgoing = (0..ep.world()).map(|to| match (&state, to == self.me) {
                (Ok(()), false) => self.message(to, round, size),
                _ => Vec::new(),
            });
            let outgoing = outgoing.collect();
            for (from, message) in ep.exchange(outgoing)?.into_iter().enumerate() {
                if state.is_ok() && from != self.me {
                    state = self.take(from, &message, round, size);
                }
            }
        }
        if let (true, Some(cause)) = (state.is_ok(), objection(KvPhase::Checking)) {
            state = Err(Obstacle::Own(cause));
        }
        Ok(state)
    }

    /// Rounds of so many pieces that the two ranks with the most between them need.
    fn rounds(&self, size: usize) -> usize {
        let ranks = self.moves.len();
        let mut between = vec![0_usize; ranks * ranks];
        for (to, moves) in self.moves.iter().enumerate() {
            moves
                .iter()
                .filter(|piece| piece.from.rank != to)
                .for_each(|piece| between[piece.from.rank * ranks + to] += 1);
        }
        between.into_iter().max().unwrap_or(0).div_ceil(size)
    }

    /// Fills the new pages from the old ones on this rank.
    fn copy_own(&mut self) {
        let to_tp = self.change.to == Attention::Tp;
        for (page, source) in self.memory.iter_mut().zip(&self.plan.pool(self.me).sources) {
            if !to_tp || source.rank == self.me {
                let routes = self.sources[source.page as usize].page().routes();
                page.push_routes(routes, self.change.route_width);
            }
        }
        for piece in self.moves[self.me].iter().filter(|piece| piece.from.rank == self.me) {
            let from = self.sources[piece.from.page as usize].page().bytes();
            let to = self.memory[piece.page as usize].bytes_mut();
            for row in 0..piece.rows {
                to[piece.to_offset + row * piece.to_stride..][..piece.bytes]
                    .copy_from_slice(&from[piece.from_offset + row * piece.from_stride..][..piece.bytes]);
            }
        }
    }

    /// The pieces of one round between two ranks.
    fn pieces(&self, from: usize, to: usize, round: usize, size: usize) -> impl Iterator<Item = KvMove> + use<> {
        let pieces = self.moves[to].iter().filter(|piece| piece.from.rank == from).copied();
        let pieces: Vec<KvMove> = pieces.skip(round * size).take(size).collect();
        pieces.into_iter()
    }

    fn message(&self, to: usize, round: usize, size: usize) -> Vec<u8> {
        let mut message = Vec::new();
        for piece in self.pieces(self.me, to, round, size) {
            let (page, begin) = (self.sources[piece.from.page as usize].page(), message.len());
            for row in 0..piece.rows {
                message.extend_from_slice(&page.bytes()[piece.from_offset + row * piece.from_stride..][..piece.bytes]);
            }
            if self.change.to == Attention::Tp {
                page.routes().iter().for_each(|route| message.extend_from_slice(&route.to_le_bytes()));
            }
            let checksum = hash(&message[begin..]);
            message.extend_from_slice(&checksum.to_le_bytes());
        }
        message
    }

    fn take(&mut self, from: usize, mut message: &[u8], round: usize, size: usize) -> Result<(), Obstacle> {
        let broken =
            |page: u32, what: &str| Obstacle::Own(format!("page {page} of keys and values from rank {from} {what}"));
        for piece in self.pieces(from, self.me, round, size) {
            if message.is_empty() {
                return Err(Obstacle::Peer(from));
            }
            let tokens = self.plan.pool(self.me).pool.pages[piece.page as usize].tokens.len();
            let routes = if self.change.to == Attention::Tp { tokens * self.change.route_width } else { 0 };
            let data = piece.rows * piece.bytes;
            let Some((body, rest)) = message.split_at_checked(data + 2 * routes) else {
                return Err(broken(piece.page, "is cut short"));
            };
            let Some((checksum, rest)) = rest.split_first_chunk() else {
                return Err(broken(piece.page, "has no checksum"));
            };
            if hash(body) != u64::from_le_bytes(*checksum) {
                return Err(broken(piece.page, "has another checksum than it was sent with"));
            }
            let (data, body) = body.split_at(data);
            let page = &mut self.memory[piece.page as usize];
            for (row, bytes) in data.chunks_exact(piece.bytes).enumerate() {
                page.bytes_mut()[piece.to_offset + row * piece.to_stride..][..piece.bytes].copy_from_slice(bytes);
            }
            let routes: Vec<u16> = body.as_chunks().0.iter().map(|route| u16::from_le_bytes(*route)).collect();
            page.push_routes(&routes, self.change.route_width);
            message = rest;
        }
        match message {
            [] => Ok(()),
            _ => Err(Obstacle::Own(format!("rank {from} sent {} bytes of pages too many", message.len()))),
        }
    }

    /// Of the plan and, where all ranks are to have the same pool, of what is the same in it: routes, and latent
    /// vectors.
    fn digest(&self) -> u64 {
        let mut digest = PieceHash::default();
        digest.update(&self.plan.digest().to_le_bytes());
        if self.change.to == Attention::Tp {
            let alike = self.change.whole.heads_of(0) == self.change.whole.heads_of(self.moves.len() - 1);
            for page in &self.memory {
                digest.update(bytemuck::cast_slice(page.routes()));
                if alike {
                    digest.update(page.bytes());
                }
            }
        }
        digest.finish()
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hash = PieceHash::default();
    hash.update(bytes);
    hash.finish()
}
