//! Commands and events that wait at rank 0 while the ranks move: each rank is in either the old layout or the new one,
//! and only that rank knows which.
//!
//! Commands about sequences wait until all ranks have finished, and are then sent to the sequences' new ranks. Events
//! from a rank that has finished also wait, because they may arrive before the last events from the sequence's previous
//! rank.

use std::collections::{HashMap, HashSet};
use std::sync::MutexGuard;

use semmoe_tables::RankId;

use super::hub::{State, Unit};
use super::switch::Switch;
use crate::control::message::ToRank;
use crate::engine::SequenceEvent;

/// Events of sequences, in order.
pub(super) type Events = Vec<(u64, SequenceEvent)>;

/// Commands and events held back during a switch.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    /// Commands about sequences.
    pub(super) orders: Vec<ToRank>,
    events: Vec<(RankId, Events)>,
    /// Ranks that have finished moving; their later messages belong to the layout that they ended in.
    pub(super) ended: HashSet<RankId>,
    /// The new replica of each sequence.
    pub(super) replicas: HashMap<u64, RankId>,
}

impl Deferred {
    /// Defers events, or returns them if they belong to the old layout.
    pub(super) fn filter(&mut self, rank: RankId, events: Events) -> Option<Events> {
        if !self.ended.contains(&rank) {
            return Some(events);
        }
        self.events.push((rank, events));
        None
    }
}

impl Unit {
    /// Ends the move once all ranks are in the current layout: records the sequences' new ranks and forwards deferred
    /// commands and events.
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
    /// Returns the deferred commands and events while ranks are moving.
    pub(super) fn deferred(&mut self) -> Option<&mut Deferred> {
        self.switch.as_mut().and_then(Switch::deferred)
    }

    /// Sends a command about one of the replica's sequences, or defers it while ranks are moving.
    pub(super) fn order(&mut self, rank: RankId, order: ToRank) {
        match self.deferred() {
            Some(deferred) => deferred.orders.push(order),
            None => self.send(self.leader(rank), order),
        }
    }

    /// If the layout has changed, records the sequences' new ranks as reported. Sequences that are not on any rank yet
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
