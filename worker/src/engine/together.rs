//! The step loop under attention tp. All ranks have the same sequences and make the same decisions, because between the
//! same two steps they receive the same commands (from rank 0, in the sync before a step) and the same tokens (each
//! sampled by the sequence's owner, in the next sync). Admission, pages, batches and finishes all follow from these.
//!
//! If attention runs in groups, this applies to each group, with its first rank in the role of rank 0. All ranks take
//! part in each sync and in the step after it, even with an empty batch, because their experts serve all groups. Groups
//! with all experts run independently: their syncs and steps involve only the group.
//!
//! Ranks verify that they agree: each sync contains the digest of the last batch, and the sequence id of every token.

use std::collections::{HashMap, VecDeque};

use semmoe_kernels::mix;
use semmoe_tables::Attention;

use super::run::{Engine, EngineEnd, settle};
use super::sequence::Sampled;
use super::step_sync::{Chosen, MAX_ORDER_BYTES, StepSync};
use super::switch::SwitchOrder;
use crate::control::message::ToRank;
use crate::ep::{UnitError, Wake};

/// The state that an engine under attention tp keeps between a step and the next sync.
#[derive(Default)]
pub(super) struct Together {
    /// On rank 0: commands not yet sent to the other ranks, oldest first.
    orders: VecDeque<ToRank>,
    /// Statistics requests that arrived while commands were queued, answered after those commands.
    pub(super) tickets: Vec<u64>,
    /// Number of the last step.
    steps: u64,
    digest: u64,
    /// The sequences that the last step yields a token for, in batch order, and the ranks that sample those tokens.
    awaited: Vec<(u64, usize)>,
    /// The tokens that this rank sampled.
    chosen: Vec<Chosen>,
    message: Vec<u8>,
}

impl Together {
    /// Records a computed batch: its sequences and their token counts.
    pub(super) fn note_batch(&mut self, batch: impl Iterator<Item = (u64, usize)>) {
        self.steps += 1;
        self.digest = batch.fold(self.steps, |hash, (id, count)| mix(mix(hash, id), count as u64));
    }

    /// Records that `owner` samples a sequence's next token; `sampled` is set if this rank is the owner.
    pub(super) fn await_token(&mut self, sequence: u64, owner: usize, sampled: Option<Option<Sampled>>) {
        self.awaited.push((sequence, owner));
        self.chosen.extend(sampled.map(|sampled| Chosen { sequence, sampled }));
    }

    /// Returns the commands for the next sync: as many as fit into a message, but at least one if any are queued.
    fn next_orders(&mut self) -> Vec<ToRank> {
        let mut bytes = 0;
        let mut orders = Vec::new();
        while let Some(order) = self.orders.front() {
            bytes += order_bytes(order);
            if bytes > MAX_ORDER_BYTES && !orders.is_empty() {
                break;
            }
            orders.extend(self.orders.pop_front());
        }
        orders
    }
}

/// Returns an upper bound on the JSON size of a command.
fn order_bytes(order: &ToRank) -> usize {
    const TOKEN: usize = 11;
    const REST: usize = 1024;
    match order {
        ToRank::Submit(request) => {
            let texts: usize = request.stop.texts.iter().map(|text| 6 * text.len() + 3).sum();
            REST + TOKEN * (request.tokens.len() + request.stop.token_ids.len()) + texts
        }
        _ => REST,
    }
}

impl Engine {
    /// Runs the attention tp loop; returns `None` once attention has switched to dp.
    pub(super) fn run_together(&mut self) -> Result<Option<EngineEnd>, UnitError> {
        loop {
            if self.receive_orders()? {
                return Ok(Some(EngineEnd::Aborted));
            }
            if self.is_idle() && self.together.orders.is_empty() && self.ep.wait()? == Wake::Local {
                continue;
            }
            let stop = self.sync()?;
            self.flush();
            if self.model.attention() == Attention::Dp {
                return Ok(None);
            }
            for ticket in std::mem::take(&mut self.together.tickets) {
                self.report_stats(ticket);
            }
            if stop {
                return Ok(Some(EngineEnd::Stopped));
            }
            self.admit();
            self.flush();
            self.arrive()?;
            let has_groups = self.ep.attention_group().len() < self.ep.step_ranks().len();
            if has_groups || !self.running.is_empty() {
                self.step()?;
            }
        }
    }

    /// Processes commands from rank 0's front end; returns true if the unit has failed.
    fn receive_orders(&mut self) -> Result<bool, UnitError> {
        for order in self.inbox.take() {
            match order {
                ToRank::Abort { .. } => return Ok(true),
                ToRank::Stats { ticket } if self.together.orders.is_empty() => self.report_stats(ticket),
                ToRank::Stats { ticket } => self.together.tickets.push(ticket),
                // Every rank receives switch commands directly, except for the move: rank 0 forwards it in a sync, so
                // that all ranks move between the same two steps.
                ToRank::Switch { ticket, order } if order != SwitchOrder::Move => {
                    self.take_switch_order(ticket, order)?;
                }
                order if self.is_leader() => self.together.orders.push_back(order),
                // Only a leader receives other commands and forwards them.
                order => tracing::warn!("ignoring a command that only rank 0 accepts: {}", kind(&order)),
            }
        }
        Ok(false)
    }

    /// Exchanges sampled tokens and rank 0's commands, and executes the commands; returns true if the loop must end.
    fn sync(&mut self) -> Result<bool, UnitError> {
        let first = self.ep.step_ranks().start;
        let me = self.ep.rank().index() - first;
        let together = &mut self.together;
        let orders = together.next_orders();
        let (steps, digest, chosen) = (together.steps, together.digest, std::mem::take(&mut together.chosen));
        let own = StepSync { steps, digest, chosen, orders };
        let mut message = std::mem::take(&mut together.message);
        own.encode(&mut message)
            .map_err(|error| UnitError::protocol(first + me, format!("cannot serialize its commands: {error}")))?;
        let received = self.ep.allgather_bytes(&message)?;
        let mut syncs = Vec::with_capacity(received.len());
        for (place, message) in received.iter().enumerate() {
            // This rank's own message is not sent.
            let sync = if place == me { Ok(StepSync::default()) } else { StepSync::decode(message) };
            syncs.push(sync.map_err(|error| UnitError::protocol(first + place, error.to_string()))?);
        }
        self.together.message = message;
        syncs[me] = own;
        let group = self.ep.attention_group();
        for (rank, syncs) in (first..).zip(&mut syncs) {
            if !group.contains(&rank) {
                (syncs.digest, syncs.chosen) = (digest, Vec::new());
            }
            if (syncs.steps, syncs.digest) != (steps, digest) {
                let detail = format!("it ran a different batch in step {steps}, or is at step {}", syncs.steps);
                return Err(UnitError::protocol(rank, detail));
            }
            if !rank.is_multiple_of(group.len()) && !syncs.orders.is_empty() {
                return Err(UnitError::protocol(rank, "it sent commands, but only rank 0 may"));
            }
        }
        // All groups that step together stop together, when the first of them receives the command.
        let stop = syncs.iter().any(|syncs| syncs.orders.contains(&ToRank::Stop));
        let orders = std::mem::take(&mut syncs[group.start - first].orders);
        self.take_tokens(syncs)?;
        Ok(self.obey(orders)? || stop)
    }

    /// Appends its sampled token to every sequence of the last batch.
    fn take_tokens(&mut self, syncs: Vec<StepSync>) -> Result<(), UnitError> {
        let first = self.ep.step_ranks().start;
        let mut chosen: Vec<_> = syncs.into_iter().map(|syncs| syncs.chosen.into_iter()).collect();
        let places: HashMap<u64, usize> =
            self.running.iter().enumerate().map(|(at, sequence)| (sequence.carried.request.id, at)).collect();
        let mut ended = Vec::new();
        for (id, owner) in std::mem::take(&mut self.together.awaited) {
            let Some(Chosen { sequence, sampled }) = chosen[owner - first].next() else {
                return Err(UnitError::protocol(owner, format!("it chose no token for sequence {id}")));
            };
            let (Some(&at), true) = (places.get(&id), sequence == id) else {
                return Err(UnitError::protocol(
                    owner,
                    format!("it chose a token for sequence {sequence}, expected {id}"),
                ));
            };
            let vocabulary = self.config.vocab_size;
            let token = sampled.as_ref().map(|sampled| sampled.token);
            if let Some(token) = token.filter(|token| *token as usize >= vocabulary) {
                return Err(UnitError::protocol(owner, format!("it chose token {token}, expected below {vocabulary}")));
            }
            // Only the leader reports routes.
            let (leads, sequence) = (self.is_leader(), &mut self.running[at]);
            if settle(sequence, sampled, leads, &self.tokenizer, &self.config, &mut self.events) {
                ended.push(at);
            }
        }
        if let Some(owner) = chosen.iter().position(|chosen| chosen.len() > 0) {
            return Err(UnitError::protocol(first + owner, "it sampled more tokens than were expected"));
        }
        // Remove in descending order, so that earlier indices stay valid.
        ended.sort_unstable();
        for at in ended.into_iter().rev() {
            self.running.remove(at);
        }
        Ok(())
    }

    fn obey(&mut self, orders: Vec<ToRank>) -> Result<bool, UnitError> {
        for order in orders {
            match order {
                ToRank::Switch { ticket, order: SwitchOrder::Move } => self.switch_now(ticket)?,
                ToRank::Stop => return Ok(true),
                ToRank::Stats { .. } | ToRank::Abort { .. } | ToRank::Switch { .. } => {
                    return Err(UnitError::protocol(
                        0,
                        format!("it forwarded {}, which rank 0 must handle itself", kind(&order)),
                    ));
                }
                order => self.take_order(order),
            }
        }
        Ok(false)
    }
}

fn kind(order: &ToRank) -> &'static str {
    match order {
        ToRank::Submit(_) => "a sequence",
        ToRank::Cancel { .. } => "a cancellation",
        ToRank::Stats { .. } => "a statistics request",
        ToRank::Flush => "a flush",
        ToRank::Switch { .. } => "a layout switch",
        ToRank::Stop => "a stop",
        ToRank::Abort { .. } => "an abort",
    }
}
