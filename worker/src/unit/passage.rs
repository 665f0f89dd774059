//! Orders and events that wait at rank 0 while the ranks move: each rank is in the old layout or in the new one, and
//! only the rank itself knows which.
//!
//! Orders that concern sequences wait until all have ended, and then go to the ranks that the sequences are on. Events
//! of a rank that has ended wait, too: they may come before the last events of another rank, which had the sequence
//! before.

use std::collections::{HashMap, HashSet};
use std::sync::MutexGuard;

use semmoe_tables::RankId;

use super::hub::{State, Unit};
use super::switch::Switch;
use crate::control::message::ToRank;
use crate::engine::SequenceEvent;

/// Events of sequences, in order.
pub(super) type Events = Vec<(u64, SequenceEvent)>;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Passage {
    /// Orders that concern sequences.
    pub(super) orders: Vec<ToRank>,
    events: Vec<(RankId, Events)>,
    /// Ranks that have ended their part: their further messages are of the layout that they ended in.
    pub(super) ended: HashSet<RankId>,
    /// The new ranks of sequences.
    pub(super) homes: HashMap<u64, RankId>,
}

impl Passage {
    /// Holds events back, or gives them back if they are of the old layout.
    pub(super) fn filter(&mut self, rank: RankId, events: Events) -> Option<Events> {
        if !self.ended.contains(&rank) {
            return Some(events);
        }
        self.events.push((rank, events));
        None
    }
}

impl Unit {
    /// All ranks are in the layout in force: sequences are on their new ranks, and waiting orders and events proceed.
    pub(super) fn pass(&self, mut state: MutexGuard<'_, State>, passage: Passage) {
        state.relocate(&passage.homes);
        let ended: usize = passage.events.into_iter().map(|(rank, events)| state.take_events(rank, events)).sum();
        for order in passage.orders {
            let id = match &order {
                ToRank::Submit(request) => request.id,
                ToRank::Cancel { id } => *id,
                _ => {
                    state.broadcast(&order);
                    continue;
                }
            };
            if let Some(rank) = state.sequences.get(&id).map(|entry| entry.rank) {
                state.send(rank, order);
            }
        }
        self.note_ended(ended);
    }
}

impl State {
    /// The orders and events that wait, while ranks move.
    pub(super) fn passage(&mut self) -> Option<&mut Passage> {
        self.switch.as_mut().and_then(Switch::passage)
    }

    /// An order that concerns a sequence of the replica: it waits while ranks move.
    pub(super) fn order(&mut self, rank: RankId, order: ToRank) {
        match self.passage() {
            Some(passage) => passage.orders.push(order),
            None => self.send(self.speaker(rank), order),
        }
    }

    /// Sequences are on other ranks, as they report, where the layout has changed; those that no rank has yet go where
    /// new ones do.
    fn relocate(&mut self, homes: &HashMap<u64, RankId>) {
        let replicas = usize::from(self.replicas());
        if self.in_flight.len() == replicas && homes.is_empty() {
            return;
        }
        let mut sequences = std::mem::take(&mut self.sequences);
        self.in_flight = vec![0; replicas];
        for (id, entry) in &mut sequences {
            entry.rank = homes.get(id).copied().unwrap_or_else(|| self.rank_for(entry.pinned));
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
        let mut passage = Passage::default();
        let events = || vec![(7, SequenceEvent::Finished { finish: Finish::Abort, routes: None })];
        assert_eq!(passage.filter(RankId::new(1), events()), Some(events()));
        passage.ended.insert(RankId::new(1));
        assert_eq!(passage.filter(RankId::new(1), events()), None);
        assert_eq!(passage.filter(RankId::new(0), events()), Some(events()), "it may still tell of the old layout");
        passage.homes.insert(7, RankId::new(2));
        assert_eq!(passage.homes[&7], RankId::new(2));
        assert_eq!(passage.events, [(RankId::new(1), events())]);
    }
}
