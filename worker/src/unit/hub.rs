//! Commands to the ranks, events from the ranks, and the unit's state.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use semmoe_tables::{Attention, RankId};
use tokio::sync::{mpsc, oneshot, watch};

use super::deferred::Events;
use super::layout::UnitLayout;
use super::running::{Running, SubmitError};
use super::switch::{Switch, SwitchHistory};
use crate::control::link::LinkSender;
use crate::control::message::{FromRank, ToRank};
use crate::engine::{Inbox, RankStats, SequenceEvent, SequenceRequest, UnitLimits, due_us};
use crate::ep::SwitchTargets;
use crate::threads::lock;

/// Time limit for a rank to report its statistics between two steps.
const STATS_LIMIT: Duration = Duration::from_secs(5);

/// Rank 0's connection to a rank.
#[derive(Debug)]
pub(crate) enum Port {
    /// Its own engine.
    Local(Inbox),
    /// Another process.
    Remote(LinkSender<ToRank>),
}

impl Port {
    fn send(&self, order: ToRank) {
        match self {
            Self::Local(engine) => engine.send(order),
            Self::Remote(link) => link.send(order),
        }
    }
}

/// The first failure of the unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lost {
    /// The rank that failed first.
    pub(crate) rank: RankId,
    /// The cause, in one sentence that names the rank.
    pub(crate) cause: String,
}

/// State that other tasks wait for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitStatus {
    /// Number of ranks whose model is loaded.
    pub(crate) ready: usize,
    /// Number of ranks that have left their step loop.
    pub(crate) stopped: usize,
    /// Number of links to other ranks that have ended.
    pub(crate) closed: usize,
    /// Number of sequences whose last event has not arrived.
    pub(crate) in_flight: usize,
    /// Whether a rank's process was asked to stop.
    pub(crate) leaving: bool,
    /// The unit's first failure, which is set once.
    pub(crate) lost: Option<Lost>,
}

/// The unit as rank 0 sees it. Clones share the unit.
#[derive(Clone, Debug)]
pub(crate) struct Unit(Arc<Shared>);

impl Deref for Unit {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

/// Time limits of the unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// How long a rank may be busy with a step.
    pub(crate) step: Duration,
    /// How long a prepared switch waits for its commit.
    pub(crate) prepared: Duration,
}

/// The immutable part of a unit, and its state.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Ranks in the unit.
    pub(crate) world: u16,
    pub(crate) limits: UnitLimits,
    /// Due times are relative to this instant.
    began: Instant,
    pub(super) timeouts: Timeouts,
    /// Whether attention can switch, so that requests can be pinned in either layout.
    pub(crate) both_attentions: bool,
    /// The layouts that the unit can be switched to.
    pub(crate) targets: SwitchTargets,
    state: Mutex<State>,
    status: watch::Sender<UnitStatus>,
}

#[derive(Debug)]
pub(super) struct State {
    world: u16,
    /// Connections by rank; empty before the ranks have registered and after the links have closed.
    pub(super) ports: Vec<Port>,
    /// Number of groups with separate sequences under attention tp.
    attention_groups: u16,
    pub(super) layout: Arc<UnitLayout>,
    /// The switch in progress.
    pub(super) switch: Option<Switch>,
    pub(super) switches: SwitchHistory,
    pub(super) sequences: HashMap<u64, Entry>,
    /// By replica.
    pub(super) in_flight: Vec<usize>,
    next_id: u64,
    next_rank: u16,
    pub(super) draining: bool,
    tickets: HashMap<u64, (RankId, oneshot::Sender<RankStats>)>,
    /// Each rank's last report, used once a rank has stopped reporting.
    last_stats: Vec<RankStats>,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) rank: RankId,
    /// The requested rank.
    pub(super) pinned: Option<RankId>,
    /// `None` once the receiver is dropped.
    listener: Option<mpsc::UnboundedSender<SequenceEvent>>,
}

impl Unit {
    pub(crate) fn new(
        world: u16,
        attention_groups: u16,
        targets: SwitchTargets,
        layout: UnitLayout,
        limits: UnitLimits,
        timeouts: Timeouts,
    ) -> Self {
        let mut state = State {
            world,
            ports: Vec::new(),
            attention_groups,
            in_flight: Vec::new(),
            layout: Arc::new(layout),
            switch: None,
            switches: SwitchHistory::default(),
            sequences: HashMap::new(),
            next_id: 0,
            next_rank: 0,
            draining: false,
            tickets: HashMap::new(),
            last_stats: vec![RankStats::default(); usize::from(world)],
        };
        state.in_flight = vec![0; state.replicas().into()];
        let status = watch::Sender::new(UnitStatus::default());
        let both_attentions = limits.kv_pages.are_both();
        let state = Mutex::new(state);
        Self(Arc::new(Shared {
            world,
            limits,
            began: Instant::now(),
            timeouts,
            both_attentions,
            targets,
            state,
            status,
        }))
    }

    /// Sets the connections to the ranks, in rank order.
    pub(crate) fn connect(&self, ports: Vec<Port>) {
        self.state().ports = ports;
    }

    /// Number of replicas that run sequences. Under attention tp, all ranks (or the ranks of a group) form one replica,
    /// represented by its first rank.
    pub(crate) fn replicas(&self) -> u16 {
        self.state().replicas()
    }

    /// Selects the items of the ranks that represent a replica from a list indexed by rank.
    pub(crate) fn by_replica<T>(&self, by_rank: Vec<T>) -> impl Iterator<Item = T> {
        let state = self.state();
        by_rank.into_iter().step_by(state.stride().into()).take(state.replicas().into())
    }

    /// Number of ranks that a sequence can be pinned to, in any of the layouts that the unit can have.
    pub(crate) fn pins(&self) -> u16 {
        if self.both_attentions || !self.targets.groups.is_empty() { self.world } else { self.replicas() }
    }

    /// Subscribes to changes of the unit's status.
    pub(crate) fn status(&self) -> watch::Receiver<UnitStatus> {
        self.status.subscribe()
    }

    /// Returns the unit's first failure, if any.
    pub(crate) fn lost(&self) -> Option<Lost> {
        self.status.borrow().lost.clone()
    }

    /// Submits a sequence to `rank`, or to the next rank in round-robin order, and sets its id and due time. Under
    /// attention tp, the sequence moves to `rank` if attention switches to dp.
    pub(crate) fn submit(&self, rank: Option<RankId>, mut request: SequenceRequest) -> Result<Running, SubmitError> {
        let mut state = self.state();
        if let Some(lost) = self.lost() {
            return Err(SubmitError::Dead(lost));
        }
        if state.draining || state.ports.is_empty() {
            return Err(SubmitError::Stopping);
        }
        let pinned = rank;
        // A sequence pinned to a group has no single home rank.
        request.home = pinned.filter(|_| state.stride() == 1).map(RankId::get);
        let rank = state.rank_for(rank);
        let limit = self.limits.running + self.limits.waiting;
        if state.in_flight[rank.index()] >= limit {
            return Err(SubmitError::Full { rank, limit });
        }
        let id = state.take_id();
        request.id = id;
        request.due_us = due_us(self.began.elapsed(), request.priority, self.limits.priority_seconds);
        let (listener, events) = mpsc::unbounded_channel();
        state.sequences.insert(id, Entry { rank, pinned, listener: Some(listener) });
        state.in_flight[rank.index()] += 1;
        self.status.send_modify(|status| status.in_flight += 1);
        state.order(rank, ToRank::Submit(Box::new(request)));
        Ok(Running { id, rank, events, unit: self.clone(), ended: false })
    }

    /// Cancels a sequence whose client has disconnected.
    pub(super) fn abandon(&self, id: u64) {
        let mut state = self.state();
        let Some(entry) = state.sequences.get_mut(&id) else { return };
        entry.listener = None;
        let rank = entry.rank;
        state.order(rank, ToRank::Cancel { id });
    }

    /// Stops accepting new sequences.
    pub(crate) fn drain(&self) {
        self.state().draining = true;
    }

    /// Whether the unit has stopped accepting sequences.
    pub(crate) fn is_draining(&self) -> bool {
        self.state().draining
    }

    /// Cancels all sequences; their listeners still receive the last event.
    pub(crate) fn cancel_all(&self) {
        let mut state = self.state();
        let all: Vec<(u64, RankId)> = state.sequences.iter().map(|(&id, entry)| (id, entry.rank)).collect();
        all.into_iter().for_each(|(id, rank)| state.order(rank, ToRank::Cancel { id }));
    }

    /// Sends a command to every rank. Under attention tp, rank 0 forwards commands that affect sequences and caches, so
    /// that all ranks execute them between the same two steps.
    pub(crate) fn broadcast(&self, order: &ToRank) {
        self.state().broadcast(order);
    }

    /// Closes the links to the other ranks once all queued messages have been written.
    pub(crate) fn close(&self) {
        self.state().ports.clear();
    }

    /// Number of in-flight sequences by replica.
    pub(crate) fn in_flight(&self) -> Vec<usize> {
        self.state().in_flight.clone()
    }

    /// Returns every rank's statistics, or the last known ones for a rank that does not respond.
    pub(crate) async fn stats(&self) -> Vec<RankStats> {
        let answers: Vec<_> = (0..self.world).map(|rank| self.request_stats(RankId::new(rank))).collect();
        let all = futures_util::future::join_all(answers.into_iter().map(|(ticket, answer)| async move {
            let outcome = tokio::time::timeout(STATS_LIMIT, answer).await;
            self.state().tickets.remove(&ticket);
            outcome.ok().and_then(Result::ok)
        }));
        let fresh = all.await;
        let mut state = self.state();
        for (last, fresh) in state.last_stats.iter_mut().zip(fresh) {
            if let Some(fresh) = fresh {
                *last = fresh;
            }
        }
        state.last_stats.clone()
    }

    fn request_stats(&self, rank: RankId) -> (u64, oneshot::Receiver<RankStats>) {
        let (sender, answer) = oneshot::channel();
        let mut state = self.state();
        let ticket = state.take_id();
        // A failed unit never answers, so dropping the sender ends the wait immediately.
        if self.lost().is_none() && !state.ports.is_empty() {
            state.tickets.insert(ticket, (rank, sender));
            state.send(rank, ToRank::Stats { ticket });
        }
        (ticket, answer)
    }

    /// Processes a rank's message.
    pub(crate) fn deliver(&self, rank: RankId, message: FromRank) {
        match message {
            FromRank::Ready => self.status.send_modify(|status| status.ready += 1),
            FromRank::Stopped => self.status.send_modify(|status| status.stopped += 1),
            FromRank::Leaving => self.status.send_modify(|status| status.leaving = true),
            FromRank::Fatal { lost, cause } => self.fail(Lost { rank: RankId::new(lost), cause }),
            FromRank::Stats { ticket, stats } => {
                let requested = self.state().tickets.remove(&ticket);
                if let Some((_, sender)) = requested.filter(|(requested, _)| *requested == rank) {
                    // The caller may have stopped waiting.
                    let _ = sender.send(*stats);
                }
            }
            FromRank::Switch { ticket, report } => self.switch_report(rank, ticket, report),
            FromRank::Events(events) => {
                let mut state = self.state();
                let events = match state.deferred() {
                    Some(deferred) => deferred.filter(rank, events),
                    None => Some(events),
                };
                let ended = state.take_events(rank, events.unwrap_or_default());
                self.note_ended(ended);
            }
        }
    }

    pub(super) fn note_ended(&self, sequences: usize) {
        if sequences > 0 {
            self.status.send_modify(|status| status.in_flight -= sequences);
        }
    }

    /// Reports that a rank's control link has ended.
    pub(crate) fn closed(&self, rank: RankId, cause: &str) {
        self.status.send_modify(|status| status.closed += 1);
        if self.status.borrow().stopped < usize::from(self.world) {
            self.fail(Lost { rank, cause: format!("rank {rank} was lost: {cause}") });
        }
    }

    /// Fails the unit: every waiting request receives the cause, and the other ranks exit. The first cause wins.
    pub(crate) fn fail(&self, lost: Lost) {
        let first = self.status.send_if_modified(|status| {
            let first = status.lost.is_none();
            status.lost.get_or_insert_with(|| lost.clone());
            first
        });
        if !first {
            return;
        }
        tracing::error!("{}", lost.cause);
        self.broadcast(&ToRank::Abort { cause: lost.cause });
        let mut state = self.state();
        // Dropping listeners and tickets ends every wait.
        state.sequences.clear();
        state.tickets.clear();
        state.switch = None;
        state.in_flight.fill(0);
        self.status.send_modify(|status| status.in_flight = 0);
    }

    /// Locks the state. A thread that panics while holding the lock leaves only complete entries behind.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    /// Number of replicas that a sequence can be pinned to.
    pub(super) fn replicas(&self) -> u16 {
        match self.layout.attention {
            Attention::Dp => self.world,
            Attention::Tp => {
                self.layout.placement.layout.groups().map_or(self.attention_groups, |groups| groups.groups)
            }
        }
    }

    /// Distance between the first ranks of consecutive replicas. It is 1 without groups, because the single replica may
    /// split into one per rank.
    fn stride(&self) -> u16 {
        match self.layout.placement.layout.groups() {
            Some(groups) => groups.ranks,
            None if self.attention_groups > 1 => self.world / self.attention_groups,
            None => 1,
        }
    }

    /// Returns the rank that represents a replica.
    pub(super) fn leader(&self, replica: RankId) -> RankId {
        RankId::new(replica.get() * self.stride())
    }

    /// Returns an id that is never reused.
    pub(super) fn take_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    pub(super) fn send(&self, rank: RankId, order: ToRank) {
        if let Some(port) = self.ports.get(rank.index()) {
            port.send(order);
        }
    }

    /// See [`Unit::broadcast`].
    pub(super) fn broadcast(&mut self, order: &ToRank) {
        let (all, stride) = match order {
            ToRank::Abort { .. } | ToRank::Stats { .. } | ToRank::Switch { .. } => (self.world, 1),
            ToRank::Submit(_) | ToRank::Cancel { .. } | ToRank::Flush | ToRank::Stop => {
                if let Some(deferred) = self.deferred() {
                    return deferred.orders.push(order.clone());
                }
                (self.replicas(), self.stride())
            }
        };
        self.ports.iter().step_by(stride.into()).take(all.into()).for_each(|port| port.send(order.clone()));
    }

    /// Chooses the replica for a sequence: the requested one, the group of a rank that was requested before a switch to
    /// groups, or the next one in round-robin order.
    pub(super) fn rank_for(&mut self, requested: Option<RankId>) -> RankId {
        let (replicas, stride) = (self.replicas(), self.stride());
        let replica = |rank: RankId| if rank.get() < replicas { rank } else { RankId::new(rank.get() / stride) };
        let next = || {
            let rank = RankId::new(self.next_rank % replicas);
            self.next_rank = (rank.get() + 1) % replicas;
            rank
        };
        requested.filter(|_| replicas > 1).map_or_else(next, replica)
    }

    /// Forwards events; returns the number of sequences that ended.
    pub(super) fn take_events(&mut self, rank: RankId, events: Events) -> usize {
        let rank = RankId::new(rank.get() / self.stride());
        let before = self.sequences.len();
        for (id, event) in events {
            let Some(entry) = self.sequences.get(&id).filter(|entry| entry.rank == rank) else { continue };
            let last = event.is_last();
            if let Some(listener) = &entry.listener {
                // If sending fails, the client has just disconnected and the sequence will be cancelled.
                let _ = listener.send(event);
            }
            if last {
                self.sequences.remove(&id);
                self.in_flight[rank.index()] -= 1;
            }
        }
        before - self.sequences.len()
    }
}
