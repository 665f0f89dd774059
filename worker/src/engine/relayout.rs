//! A rank's part in a switch of attention between dp and tp: its sequences continue in the other layout, on this rank
//! or another.
//!
//! With dp each rank has its own sequences; with tp all ranks have all of them. So between two steps every rank sends
//! the others the state that only it has: with dp its running and waiting sequences, with tp those whose tokens it
//! chooses (and rank 0 the waiting ones). Then all have the same list, and pages move
//! ([`crate::model::Model::stage_attention`]). The engine does not change before all ranks have agreed.
//!
//! With lazy moves, pages follow after the switch: before each step those of the next sequences, which run from then
//! on. A sequence that is cancelled earlier is removed together with its pages once they have arrived.

use std::collections::{HashMap, HashSet, VecDeque};

use semmoe_tables::{Attention, Score, TokenId};
use serde::{Deserialize, Serialize};

use super::inbox::Inbox;
use super::request::{SequenceEvent, SequenceRequest};
use super::run::Engine;
use super::sequence::{Carried, Sequence};
use crate::ep::UnitError;
use crate::model::{AttentionChange, KvArrival, KvCache, KvPhase, MovingSequence, StagedKv, allgather_messages};

/// The sequences that a rank sends the others; then those of all ranks, oldest first.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Known {
    running: Vec<Carried>,
    waiting: Vec<SequenceRequest>,
}

/// The state with which the engine continues if all ranks agree.
pub(super) struct Staged {
    /// Its homes include the waiting sequences.
    pub(super) kv: StagedKv,
    /// All sequences that run here, by id.
    carried: HashMap<u64, Carried>,
    step_bytes: u64,
    waiting: VecDeque<SequenceRequest>,
}

/// Sequences whose pages arrive after the switch.
pub(super) struct Arriving {
    kv: KvArrival,
    /// Sequences of this rank that were not cancelled, by id.
    pub(super) carried: HashMap<u64, Carried>,
    /// Limit on the bytes that a rank receives before a step; a single sequence may exceed it.
    step_bytes: u64,
}

impl Engine {
    /// Prepares the switch to the other attention, together with all ranks. The inner error is why it is impossible,
    /// and is identical on all ranks. With `step_bytes` pages move afterwards, at most that many before each step
    /// ([`Engine::arrive`]).
    pub(super) fn stage_attention(
        &mut self,
        step_bytes: Option<u64>,
        objection: &dyn Fn(&Inbox) -> Option<String>,
    ) -> Result<Result<Staged, String>, UnitError> {
        // Sequences still arriving from an earlier switch arrive now.
        self.arriving.iter_mut().for_each(|arriving| arriving.step_bytes = u64::MAX);
        self.arrive()?;
        let to = self.model.other_attention().expect("a prepared change of attention");
        let known = match self.gather_known(to)? {
            Ok(known) => known,
            Err(cause) => return Ok(Err(cause)),
        };
        let moving = self.running.iter().map(|Sequence { carried, kv, .. }| MovingSequence {
            id: carried.request.id,
            kv,
            shares: self.shares(&carried.request),
        });
        let sequences: Vec<MovingSequence<'_>> = moving.collect();
        let (capacity, lazily) = (self.limits.kv_pages.of(to), step_bytes.is_some());
        let change = AttentionChange { pool: &self.pool, sequences: &sequences, capacity, lazily };
        let mut objects = |_: KvPhase| objection(&self.inbox);
        let staged = self.model.stage_attention(&change, &mut self.ep, &mut objects)?;
        Ok(staged.map(|staged| self.staged(to, known, staged, step_bytes.unwrap_or_default())))
    }

    fn staged(&self, to: Attention, known: Known, mut kv: StagedKv, step_bytes: u64) -> Staged {
        let me = self.ep.rank().get();
        let here = |rank: u16| to == Attention::Tp || rank == me;
        let own: HashSet<u64> = kv.homes.iter().filter(|(_, rank)| here(*rank)).map(|(id, _)| *id).collect();
        let mut waiting = VecDeque::new();
        let mut loads = vec![0_usize; self.ep.world()];
        kv.homes.iter().for_each(|&(_, rank)| loads[usize::from(rank)] += 1);
        let even = (kv.homes.len() + known.waiting.len()).div_ceil(4 * self.ep.world());
        for request in known.waiting {
            let rank = if to == Attention::Tp { 0 } else { place(&loads, &self.shares(&request), even) };
            loads[usize::from(rank)] += 1;
            kv.homes.push((request.id, rank));
            if here(rank) {
                waiting.push_back(request);
            }
        }
        let running = known.running.into_iter().map(|carried| (carried.request.id, carried));
        let carried = running.filter(|(id, _)| own.contains(id)).collect();
        Staged { kv, carried, step_bytes, waiting }
    }

    /// Continues with the staged state.
    pub(super) fn install_attention(&mut self, staged: Staged) {
        self.model.install_attention();
        // Reports counts that were requested while orders were waiting.
        for ticket in std::mem::take(&mut self.together).tickets {
            self.report_stats(ticket);
        }
        let Staged { kv, mut carried, step_bytes, waiting } = staged;
        let old = std::mem::take(&mut self.running).into_iter().map(|sequence| sequence.kv).collect();
        (self.pool, self.waiting, self.admitted) = (kv.pool, waiting, 0);
        self.resume(kv.sequences, &mut carried);
        self.arriving = kv.arrival.filter(|arrival| !arrival.is_over()).map(|mut kv| {
            kv.old = old;
            Arriving { kv, carried, step_bytes }
        });
    }

    /// Runs before a step, together with all ranks: receives the pages of the next sequences, which run from now on.
    pub(super) fn arrive(&mut self) -> Result<(), UnitError> {
        let Some(mut arriving) = self.arriving.take() else { return Ok(()) };
        let came = arriving.kv.advance(arriving.step_bytes, &mut self.ep)?;
        self.resume(came, &mut arriving.carried);
        self.arriving = Some(arriving).filter(|arriving| !arriving.kv.is_over());
        Ok(())
    }

    /// Resumes the sequences, except those that were cancelled meanwhile.
    fn resume(&mut self, came: Vec<(u64, KvCache)>, carried: &mut HashMap<u64, Carried>) {
        for (id, kv) in came {
            let Some(carried) = carried.remove(&id) else { continue };
            match carried.resume(kv, self.admitted % self.ep.world(), &self.tokenizer) {
                Ok(sequence) => self.running.push(sequence),
                Err(error) => self.events.push((id, SequenceEvent::Failed { message: error.to_string() })),
            }
            self.admitted = self.admitted.wrapping_add(1);
        }
    }

    /// Exchanges sequences with the other ranks.
    fn gather_known(&mut self, to: Attention) -> Result<Result<Known, String>, UnitError> {
        let me = self.ep.rank().index();
        let all = self.model.attention() == Attention::Dp;
        let own = self.running.iter().filter(|sequence| all || sequence.owner == me);
        let own = own.map(|sequence| sequence.carried.clone());
        let waiting = self.waiting.iter().filter(|_| all || me == 0).cloned();
        let known = Known { running: own.collect(), waiting: waiting.collect() };
        // If serialisation fails, the message is empty and every rank, including this one, fails to read it: all agree.
        let messages = allgather_messages(&mut self.ep, serde_json::to_vec(&known).unwrap_or_default())?;
        let mut known = Known::default();
        for (rank, message) in messages.iter().enumerate() {
            let mut received: Known = match serde_json::from_slice(message) {
                Ok(received) => received,
                Err(error) => return Ok(Err(format!("rank {rank} cannot describe its sequences: {error}"))),
            };
            if to == Attention::Tp {
                let running = received.running.iter_mut().map(|carried| &mut carried.request);
                running.chain(&mut received.waiting).for_each(|request| request.home = Some(rank as u16));
            }
            known.running.append(&mut received.running);
            known.waiting.append(&mut received.waiting);
        }
        known.running.sort_by_key(|carried| carried.request.id);
        known.waiting.sort_by_key(|request| request.id);
        Ok(Ok(known))
    }

    /// How much each rank is preferred for a sequence: its previous or pinned rank, or by T; empty if neither is known.
    fn shares(&self, request: &SequenceRequest) -> Vec<f32> {
        let world = self.ep.world();
        if let Some(home) = request.home.map(usize::from).filter(|home| *home < world) {
            return (0..world).map(|rank| f32::from(u8::from(rank == home))).collect();
        }
        let Some(tables) = self.affinity.as_ref().filter(|tables| usize::from(tables.dp_ranks()) == world) else {
            return Vec::new();
        };
        let rows = request.tokens.iter().filter_map(|&token| tables.token_row(TokenId::new(token)));
        let shares = Score::of_rows(world, rows).share().unwrap_or_default();
        shares.into_iter().map(|share| share as f32).collect()
    }
}

/// The preferred rank among those with at most `slack` more load than the least loaded one.
fn place(loads: &[usize], shares: &[f32], slack: usize) -> u16 {
    let least = loads.iter().copied().min().unwrap_or(0);
    let near = (0_u16..).zip(loads).filter(|(_, load)| **load <= least + slack);
    let share = |rank: u16| shares.get(usize::from(rank)).copied().unwrap_or_default();
    // The first of equal ones.
    let best = near.min_by(|(a, x), (b, y)| share(*b).total_cmp(&share(*a)).then(x.cmp(y)));
    best.map_or(0, |(rank, _)| rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_request_goes_where_it_is_at_home_unless_that_is_too_full() {
        assert_eq!(place(&[3, 3], &[0.2, 0.8], 0), 1);
        assert_eq!(place(&[3, 4], &[0.2, 0.8], 0), 0);
        assert_eq!(place(&[3, 4], &[0.2, 0.8], 1), 1);
        assert_eq!(place(&[4, 3, 3], &[], 1), 1, "the least loaded, then the lowest");
    }
}
