//! The new pool of an attention switch while its pages are arriving. Its page table is complete, so every sequence has
//! its pages reserved, and a page can be shared as soon as it has arrived.
//!
//! Pages arrive either all at once, before the switch takes effect, or lazily afterwards, a few sequences at a time. In
//! a lazy switch, the old pages of all sequences are kept until the last pages have arrived. All ranks have the same
//! queue and advance it between the same two steps, so they need no further agreement.

use std::collections::{BTreeMap, HashMap, VecDeque};

use semmoe_kernels::reshard::PieceHash;
use semmoe_kernels::reshard::kv::{KvMove, KvSequence};

use super::cache::KvCache;
use super::page::Page;
use super::pages::{Chain, PageId};
use super::pool::{KvPool, State};
use super::transfer::{KvObjection, PlannedMoves, Transfer};
use crate::ep::{ExpertParallel, UnitError};
use crate::model::switch::{SwitchFault, vote_of_spans};

/// A new pool whose pages are arriving.
#[derive(Debug)]
pub struct KvArrival {
    planned: PlannedMoves,
    pub(super) pool: KvPool,
    /// This rank's sequences whose pages have not arrived yet.
    chains: HashMap<u64, Chain>,
    /// The sequences of all ranks, in order of arrival.
    queue: VecDeque<Next>,
    /// Outstanding moves by receiving rank and page.
    moves: Vec<BTreeMap<u32, Vec<KvMove>>>,
    /// Pages that have arrived and are private to one of this rank's sequences.
    own: HashMap<PageId, Page>,
    /// Page ids of the old pool, in the order of its description.
    ids: Vec<PageId>,
    /// This rank's sequences before the switch, whose pages [`KvArrival::advance`] reads.
    pub old: Vec<KvCache>,
    digest: PieceHash,
}

/// A sequence in the queue.
#[derive(Debug)]
struct Next {
    id: u64,
    /// The sequence's group in the span.
    group: usize,
    /// The sequence's pages in the new pool.
    pages: Vec<u32>,
}

impl KvArrival {
    /// Creates the arrival from `pool` and `chains` as planned for this rank; `ids` are the old pool's pages in the
    /// order of its description.
    pub(super) fn new(planned: PlannedMoves, pool: KvPool, chains: Vec<Chain>, ids: Vec<PageId>) -> Self {
        let PlannedMoves { plan, me, .. } = &planned;
        let own = &plan.pool(*me).pool.sequences;
        let chains = own.iter().map(|sequence| sequence.id).zip(chains).collect();
        let next = |group, KvSequence { id, pages, .. }: &KvSequence| Next { id: *id, group, pages: pages.clone() };
        let pools = plan.pools().iter().enumerate();
        let mut queue: Vec<Next> = pools
            .flat_map(|(group, planned)| planned.pool.sequences.iter().map(move |sequence| next(group, sequence)))
            .collect();
        queue.sort_by_key(|next| next.id);
        let moves = (0..planned.span.ranks.len()).map(|rank| {
            let mut all = Vec::new();
            plan.moves(rank, &mut all);
            if planned.elsewhere {
                all.iter_mut().for_each(|piece| piece.rows = 0);
            }
            let mut by_page: BTreeMap<u32, Vec<KvMove>> = BTreeMap::new();
            all.into_iter().for_each(|piece| by_page.entry(piece.page).or_default().push(piece));
            by_page
        });
        let moves = moves.collect();
        let mut digest = PieceHash::default();
        digest.update(&plan.digest().to_le_bytes());
        let (queue, own, old) = (queue.into(), HashMap::new(), Vec::new());
        Self { planned, pool, chains, queue, moves, own, ids, old, digest }
    }

    /// Returns the sequences of the span that have not arrived, each with its group in the unit (with dp, its rank).
    pub fn groups(&self) -> Vec<(u64, u16)> {
        let first = self.planned.span.first_group();
        self.queue.iter().map(|next| (next.id, (first + next.group) as u16)).collect()
    }

    /// Whether all sequences have arrived.
    pub fn is_over(&self) -> bool {
        self.queue.is_empty()
    }

    /// Moves the pages of the oldest sequences that have not arrived, together with all ranks and between two steps.
    /// Moves at least one sequence, and more as long as no rank receives more than `bytes`. Returns this rank's
    /// sequences among them.
    ///
    /// # Errors
    /// Fails if a rank was lost or sent pages that were not planned.
    pub fn advance(&mut self, bytes: u64, ep: &mut ExpertParallel) -> Result<Vec<(u64, KvCache)>, UnitError> {
        let (next, moves) = self.next(bytes);
        let old = std::mem::take(&mut self.old);
        self.fetch(moves, old.iter().flat_map(KvCache::held), ep, &mut |_| None).map_err(|fault| match fault {
            SwitchFault::Refused(refusal) => UnitError::lost(ep.rank().index(), refusal.to_string()),
            SwitchFault::Unit(error) => error,
        })?;
        self.old = old;
        Ok(self.arrived(next))
    }

    /// Moves all pages at once, together with all ranks; `held` contains the old pool's pages. Returns a digest of all
    /// data that must be equal on all ranks.
    pub(super) fn move_all<'a>(
        &mut self,
        held: impl Iterator<Item = (PageId, &'a Page)>,
        ep: &mut ExpertParallel,
        objection: KvObjection<'_>,
    ) -> Result<u64, SwitchFault> {
        let moves = self.moves.iter_mut().map(|by_page| std::mem::take(by_page).into_values().flatten().collect());
        let moves = moves.collect();
        self.fetch(moves, held, ep, objection)
    }

    /// Returns all sequences of this rank, once their pages have arrived.
    pub(super) fn into_sequences(mut self) -> Vec<(u64, KvCache)> {
        let all = std::mem::take(&mut self.queue).into_iter().map(|next| next.id).collect();
        self.arrived(all)
    }

    /// Removes the next sequences from the queue and returns them with their moves, indexed by receiving rank.
    fn next(&mut self, bytes: u64) -> (Vec<u64>, Vec<Vec<KvMove>>) {
        let span = self.moves.len();
        let limit = usize::try_from(bytes / self.pool.shape().page_bytes() as u64).unwrap_or(usize::MAX);
        let (mut ids, mut pages, mut moves) = (Vec::new(), vec![0; span], vec![Vec::new(); span]);
        while let Some(next) = self.queue.front() {
            let ranks = self.planned.plan.ranks_of(next.group);
            let to_come = |page: &&u32| self.moves[ranks.start].contains_key(*page);
            let new: Vec<u32> = next.pages.iter().filter(to_come).copied().collect();
            if !ids.is_empty() && pages[next.group] + new.len() > limit {
                break;
            }
            pages[next.group] += new.len();
            for rank in ranks {
                let taken = new.iter().filter_map(|page| self.moves[rank].remove(page));
                moves[rank].extend(taken.flatten());
            }
            ids.push(next.id);
            self.queue.pop_front();
        }
        (ids, moves)
    }

    /// Performs moves and lets all ranks vote on the result. Returns a digest of everything that has arrived so far.
    fn fetch<'a>(
        &mut self,
        moves: Vec<Vec<KvMove>>,
        held: impl Iterator<Item = (PageId, &'a Page)>,
        ep: &mut ExpertParallel,
        objection: KvObjection<'_>,
    ) -> Result<u64, SwitchFault> {
        let held: HashMap<PageId, &Page> = held.collect();
        let sources = self.ids.iter().map(|id| held[id]).collect();
        let mut memory = BTreeMap::new();
        let mut state = self.pool.state();
        for piece in &moves[self.planned.me] {
            if !memory.contains_key(&piece.page) {
                memory.extend(state.store.page(self.pool.shape(), piece.page).map(|page| (piece.page, page)));
            }
        }
        drop(state);
        let mut transfer = Transfer { planned: &self.planned, sources, moves, memory };
        let obstacle = transfer.run(ep, objection)?;
        let memory = transfer.memory;
        memory.values().for_each(|page| self.planned.add_to(&mut self.digest, page));
        let digest = self.digest.finish();
        let own = obstacle.as_ref().map_or(Ok(digest), Err);
        if let Some(refusal) = vote_of_spans(ep, self.planned.span.ranks.len(), own)? {
            return Err(refusal.into());
        }
        let planned = &self.planned.plan.pool(self.planned.me).pool.pages;
        let mut state = self.pool.state();
        let State { pages, store } = &mut *state;
        for (id, page) in memory {
            match planned[id as usize].sealed {
                true => {
                    pages.make_known(id);
                    store.share(id, page);
                }
                false => drop(self.own.insert(id, page)),
            }
        }
        Ok(digest)
    }

    /// Returns this rank's sequences among those that have arrived.
    fn arrived(&mut self, ids: Vec<u64>) -> Vec<(u64, KvCache)> {
        let cache = |id| {
            let chain = self.chains.remove(&id)?;
            Some((id, KvCache::new(self.pool.clone(), chain, |page| self.own.remove(&page))))
        };
        ids.into_iter().filter_map(cache).collect()
    }
}
