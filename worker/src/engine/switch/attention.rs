//! A rank's part in an attention switch between dp, tp and groups of tp: its sequences continue in the new layout, on
//! this rank or another one.
//!
//! Under dp, each rank has its own sequences; under tp, the ranks of a group share all of the group's sequences. So
//! between two steps, every rank sends the others the state that only it has: under dp its running and waiting
//! sequences, under tp the sequences whose tokens it samples (and, from a group's first rank, the waiting ones). Then
//! all ranks of a span ([`KvSpan`]) have the same list, and pages move ([`crate::model::Model::prepare_attention`]).
//! The engine changes nothing until all ranks have agreed.
//!
//! With lazy moves, pages follow after the switch: before each step, the pages of the next sequences arrive, and these
//! sequences resume. A sequence that is cancelled before its pages arrive is removed with them on arrival.

use std::collections::{HashMap, HashSet};

use semmoe_tables::{Attention, Score, TokenId};
use serde::{Deserialize, Serialize};

use crate::engine::inbox::Inbox;
use crate::engine::queue::{Due, WaitingQueue};
use crate::engine::request::{SequenceEvent, SequenceRequest};
use crate::engine::run::Engine;
use crate::engine::sequence::{Carried, Sequence};
use crate::ep::UnitError;
use crate::model::{
    AttentionShape, AttentionSwitch, KvArrival, KvCache, KvPhase, KvSpan, MovingSequence, PreparedKv, Refusal,
    SwitchFault, allgather_messages,
};

/// The sequences that a rank sends to the others and, after the exchange, those of all ranks: running ones by age,
/// waiting ones by due time.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Known {
    running: Vec<Carried>,
    waiting: Vec<SequenceRequest>,
}

/// The state that the engine adopts if all ranks agree.
pub(super) struct PreparedAttention {
    /// The moved KV cache, and the groups of all sequences, including waiting ones.
    pub(super) kv: PreparedKv,
    /// Whether this rank reports the new groups.
    pub(super) leads: bool,
    /// All sequences that will run on this rank, by id.
    carried: HashMap<u64, Carried>,
    step_bytes: u64,
    waiting: WaitingQueue,
}

/// Sequences whose pages arrive after the switch.
pub(in crate::engine) struct Arriving {
    kv: KvArrival,
    /// This rank's sequences that have not been cancelled, by id.
    pub(in crate::engine) carried: HashMap<u64, Carried>,
    /// Maximum number of bytes that a rank receives before a step; a single sequence may exceed it.
    step_bytes: u64,
}

impl Engine {
    /// Prepares the switch to another attention layout, together with all ranks. If `step_bytes` is set, pages move
    /// after the switch, at most that many bytes before each step ([`Engine::arrive`]).
    pub(super) fn prepare_attention(
        &mut self,
        to: AttentionShape,
        step_bytes: Option<u64>,
        objection: &dyn Fn(&Inbox) -> Option<String>,
    ) -> Result<PreparedAttention, SwitchFault> {
        // Complete the page moves of an earlier switch first.
        self.arriving.iter_mut().for_each(|arriving| arriving.step_bytes = u64::MAX);
        self.arrive()?;
        let span = KvSpan::new(self.model.attention_shape().ranks, to.ranks, self.ep.rank().index());
        let known = self.gather_known(&span)?;
        let moving = self.running.iter().map(|Sequence { carried, kv, .. }| MovingSequence {
            id: carried.request.id,
            kv,
            shares: self.shares(&carried.request, &span),
        });
        let sequences: Vec<MovingSequence<'_>> = moving.collect();
        let (capacity, lazily) = (self.pages(to), step_bytes.is_some());
        let switch = AttentionSwitch { pool: &self.pool, sequences: &sequences, capacity, lazily };
        let mut objects = |_: KvPhase| objection(&self.inbox);
        let kv = self.model.prepare_attention(to, &switch, &mut self.ep, &mut objects)?;
        Ok(self.prepared(&span, known, kv, step_bytes.unwrap_or_default()))
    }

    fn prepared(&self, span: &KvSpan, known: Known, mut kv: PreparedKv, step_bytes: u64) -> PreparedAttention {
        let me = self.ep.rank().index();
        let here = |group: u16| usize::from(group) == me / span.after;
        let own: HashSet<u64> = kv.groups.iter().filter(|(_, group)| here(*group)).map(|(id, _)| *id).collect();
        let mut waiting = WaitingQueue::default();
        let (first, groups) = (span.first_group() as u16, span.groups());
        let mut loads = vec![0_usize; groups];
        kv.groups.iter().for_each(|&(_, group)| loads[usize::from(group - first)] += 1);
        let even = (kv.groups.len() + known.waiting.len()).div_ceil(4 * groups);
        for request in known.waiting {
            let group = place(&loads, &self.shares(&request, span), even);
            loads[usize::from(group)] += 1;
            kv.groups.push((request.id, first + group));
            if here(first + group) {
                waiting.push(request);
            }
        }
        let running = known.running.into_iter().map(|carried| (carried.request.id, carried));
        let carried = running.filter(|(id, _)| own.contains(id)).collect();
        PreparedAttention { kv, leads: me == span.ranks.start, carried, step_bytes, waiting }
    }

    /// Returns the number of KV cache pages per rank for an attention shape.
    pub(super) fn pages(&self, of: AttentionShape) -> usize {
        let pages = self.limits.kv_pages;
        let dp = pages.of(Attention::Dp);
        match of.attention == Attention::Tp && of.ranks < self.ep.world() && dp > 0 {
            // The cache has the same number of bytes as under dp.
            true => self.model.pages_of(of, dp).unwrap_or(0),
            false => pages.of(of.attention),
        }
    }

    /// Replaces the engine's state with the prepared one.
    pub(super) fn commit_attention(&mut self, prepared: PreparedAttention) {
        self.model.commit_attention();
        // Report statistics that were requested while commands were queued.
        for ticket in std::mem::take(&mut self.together).tickets {
            self.report_stats(ticket);
        }
        let PreparedAttention { kv, mut carried, step_bytes, waiting, .. } = prepared;
        let old = std::mem::take(&mut self.running).into_iter().map(|sequence| sequence.kv).collect();
        (self.pool, self.waiting, self.admitted) = (kv.pool, waiting, 0);
        self.resume(kv.sequences, &mut carried);
        self.arriving = kv.arrival.filter(|arrival| !arrival.is_over()).map(|mut kv| {
            kv.old = old;
            Arriving { kv, carried, step_bytes }
        });
    }

    /// Receives the pages of the next sequences, which then resume. All ranks call this together before a step.
    pub(in crate::engine) fn arrive(&mut self) -> Result<(), UnitError> {
        let Some(mut arriving) = self.arriving.take() else { return Ok(()) };
        let came = arriving.kv.advance(arriving.step_bytes, &mut self.ep)?;
        self.resume(came, &mut arriving.carried);
        self.arriving = Some(arriving).filter(|arriving| !arriving.kv.is_over());
        Ok(())
    }

    /// Resumes sequences, except those that have been cancelled.
    fn resume(&mut self, came: Vec<(u64, KvCache)>, carried: &mut HashMap<u64, Carried>) {
        for (id, kv) in came {
            let Some(carried) = carried.remove(&id) else { continue };
            let group = self.ep.attention_group();
            match carried.resume(kv, group.start + self.admitted % group.len(), &self.tokenizer) {
                Ok(sequence) => self.running.push(sequence),
                Err(error) => self.events.push((id, SequenceEvent::Failed { message: error.to_string() })),
            }
            self.admitted = self.admitted.wrapping_add(1);
        }
    }

    /// Exchanges sequences with the other ranks and returns those in the span.
    fn gather_known(&mut self, span: &KvSpan) -> Result<Known, SwitchFault> {
        let me = self.ep.rank().index();
        let all = self.model.attention() == Attention::Dp;
        let own = self.running.iter().filter(|sequence| all || sequence.owner == me);
        let own = own.map(|sequence| sequence.carried.clone());
        let waiting = self.waiting.iter().filter(|_| self.is_leader()).cloned();
        let known = Known { running: own.collect(), waiting: waiting.collect() };
        // If serialisation fails, the message is empty and every rank, including this one, fails to parse it, so all
        // ranks agree.
        let messages = allgather_messages(&mut self.ep, serde_json::to_vec(&known).unwrap_or_default())?;
        let mut known = Known::default();
        for (rank, message) in messages.iter().enumerate() {
            let mut received: Known =
                serde_json::from_slice(message).map_err(|source| Refusal::Sequences { rank, source })?;
            if !span.ranks.contains(&rank) {
                continue;
            }
            if span.merges() {
                let running = received.running.iter_mut().map(|carried| &mut carried.request);
                let is_home = |home: &u16| usize::from(*home) / span.before == rank / span.before;
                running
                    .chain(&mut received.waiting)
                    .for_each(|request| request.home = request.home.filter(is_home).or(Some(rank as u16)));
            }
            known.running.append(&mut received.running);
            known.waiting.append(&mut received.waiting);
        }
        known.running.sort_by_key(|carried| carried.request.id);
        known.waiting.sort_by_key(Due::of);
        Ok(known)
    }

    /// Returns a sequence's preference for each group of the span: for the group of its previous or pinned rank, or
    /// else as T predicts; empty if neither is known.
    fn shares(&self, request: &SequenceRequest, span: &KvSpan) -> Vec<f32> {
        let world = self.ep.world();
        if let Some(home) = request.home.map(usize::from).filter(|home| span.ranks.contains(home)) {
            let first = span.ranks.clone().step_by(span.after);
            return first.map(|first| f32::from(u8::from((first..first + span.after).contains(&home)))).collect();
        }
        let Some(tables) = self.affinity.as_ref().filter(|tables| usize::from(tables.dp_ranks()) == world) else {
            return Vec::new();
        };
        let rows = request.tokens.iter().filter_map(|&token| tables.token_row(TokenId::new(token)));
        let shares = Score::of_rows(world, rows).share().unwrap_or_default();
        let of_span = shares.get(span.ranks.clone()).unwrap_or_default();
        of_span.chunks(span.after).map(|group| group.iter().sum::<f64>() as f32).collect()
    }
}

/// Returns the preferred group among those whose load exceeds the least loaded one's by at most `slack`.
fn place(loads: &[usize], shares: &[f32], slack: usize) -> u16 {
    let least = loads.iter().copied().min().unwrap_or(0);
    let near = (0_u16..).zip(loads).filter(|(_, load)| **load <= least + slack);
    let share = |rank: u16| shares.get(usize::from(rank)).copied().unwrap_or_default();
    // Ties go to the first group.
    let best = near.min_by(|(a, x), (b, y)| share(*b).total_cmp(&share(*a)).then(x.cmp(y)));
    best.map_or(0, |(rank, _)| rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_request_goes_to_its_preferred_group_unless_that_is_too_full() {
        assert_eq!(place(&[3, 3], &[0.2, 0.8], 0), 1);
        assert_eq!(place(&[3, 4], &[0.2, 0.8], 0), 0);
        assert_eq!(place(&[3, 4], &[0.2, 0.8], 1), 1);
        assert_eq!(place(&[4, 3, 3], &[], 1), 1, "the least loaded, then the lowest");
    }
}
