//! Orders and events that wait at rank 0 while the ranks move: each rank is in the old layout or in the new one, and
//! only the rank itself knows which.
//!
//! Orders about sequences wait until all ranks have finished, and then go to the sequences' new ranks. Events of a rank
//! that has finished wait, too: they may arrive before the last events of the sequence's previous rank.

use std::collections::{HashMap, HashSet};
use std::sync::MutexGuard;

use semmoe_tables::RankId;

use super::hub::{State, Unit};
use super::switch::Switch;
use crate::control::message::ToRank;
use crate::engine::SequenceEvent;

/// Events of sequences, in order.
pub(super) type Events = Vec<(u64, SequenceEvent)>;

/// Orders and events held back during a switch.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    /// Orders about sequences.
    pub(super) orders: Vec<ToRank>,
    events: Vec<(RankId, Events)>,
    /// Ranks that have finished their part: their later messages belong to the layout that they finished in.
    pub(super) ended: HashSet<RankId>,
    /// The new replicas of sequences.
    pub(super) replicas: HashMap<u64, RankId>,
}

impl Deferred {
    /// Holds events back, or returns them if they belong to the old layout.
    pub(super) fn filter(&mut self, rank: RankId, events: Events) -> Option<Events> {
        if !self.ended.contains(&rank) {
            return Some(events);
        }
        self.events.push((rank, events));
        None
    }
}

impl Unit {
    /// Ends the move once all ranks are in the layout in force: records the sequences' new ranks, and forwards waiting
    /// orders and events.
    pub(super) fn release(&self, mut state: MutexGuard<'_, State>, deferred: Deferred) {
        state.relocate(&deferred.replicas);
        let ended: usize = deferred.events.into_iter().map(|(rank, events)| state.take_events(rank, events)).sum();
        for order in deferred.orders {
            let id = match &order {
                ToRank::Submit(request) => request.id,
                ToRank::Cancel { id } => *id,
                _ => {
                    state.broadcast(&order);
                    continue;
                }
            };
            if let Some(replica) = state.sequences.get(&id).map(|entry| entry.rank) {
                state.send(state.leader(replica), order);
            }
        }
        self.note_ended(ended);
    }
}

impl State {
    /// The waiting orders and events, while ranks move.
    pub(super) fn deferred(&mut self) -> Option<&mut Deferred> {
        self.switch.as_mut().and_then(Switch::deferred)
    }

    /// Sends an order about a sequence of the replica; it waits while ranks move.
    pub(super) fn order(&mut self, rank: RankId, order: ToRank) {
        match self.deferred() {
            Some(deferred) => deferred.orders.push(order),
            None => self.send(self.leader(rank), order),
        }
    }

    /// Records the sequences' new ranks, as reported, if the layout has changed; sequences that are not on any rank yet
    /// are placed like new ones.
    fn relocate(&mut self, moved: &HashMap<u64, RankId>) {
        let replicas = usize::from(self.replicas());
        if self.in_flight.len() == replicas && moved.is_empty() {
            return;
        }
        let mut sequences = std::mem::take(&mut self.sequences);
        self.in_flight = vec![0; replicas];
        for (id, entry) in &mut sequences {
            entry.rank = moved.get(id).copied().unwrap_or_else(|| self.rank_for(entry.pinned));
            self.in_flight[entry.rank.index()] += 1;
        }
        self.sequences = sequences;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Finish;

    #[test]
    fn events_wait_from_when_their_rank_has_ended() {
        let mut deferred = Deferred::default();
        let events = || vec![(7, SequenceEvent::Finished { finish: Finish::Abort, routes: None })];
        assert_eq!(deferred.filter(RankId::new(1), events()), Some(events()));
        deferred.ended.insert(RankId::new(1));
        assert_eq!(deferred.filter(RankId::new(1), events()), None);
        assert_eq!(deferred.filter(RankId::new(0), events()), Some(events()), "it may still tell of the old layout");
        deferred.replicas.insert(7, RankId::new(2));
        assert_eq!(deferred.replicas[&7], RankId::new(2));
        assert_eq!(deferred.events, [(RankId::new(1), events())]);
    }
}
