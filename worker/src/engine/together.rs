//! The step loop with attention tp. All ranks hold the same sequences and make the same decisions: they get the same
//! orders between the same two steps (from rank 0, in the sync before a step) and the same tokens (each chosen by the
//! sequence's own rank, in the next sync). Everything else follows from these: admission, pages, batches, ends.
//!
//! If attention is in groups, this applies to each group, whose first rank takes the role of rank 0. All ranks take
//! part in each sync and in the step after it, groups without sequences with an empty one, because their experts serve
//! all. Groups with all experts run independently: their syncs and steps are those of the group alone.
//!
//! Agreement is checked: each sync carries the digest of the last batch and the ids of the tokens' sequences.

use std::collections::{HashMap, VecDeque};

use semmoe_kernels::mix;
use semmoe_tables::Attention;

use super::run::{Engine, EngineEnd, settle};
use super::sequence::Sampled;
use super::step_sync::{Chosen, MAX_ORDER_BYTES, StepSync};
use super::switch::SwitchOrder;
use crate::control::message::ToRank;
use crate::ep::{UnitError, Wake};

/// The state that an engine with attention tp keeps between a step and the next sync.
#[derive(Default)]
pub(super) struct Together {
    /// Rank 0: orders not yet sent to the others, oldest first.
    orders: VecDeque<ToRank>,
    /// Requests for counts that arrived while orders were waiting; answered after those.
    pub(super) tickets: Vec<u64>,
    /// Number of the last step.
    steps: u64,
    digest: u64,
    /// The sequences that got a token in the last step, in batch order, and the ranks that choose it.
    awaited: Vec<(u64, usize)>,
    /// The tokens that this rank chose.
    chosen: Vec<Chosen>,
    message: Vec<u8>,
}

impl Together {
    /// Records a computed batch: its sequences, and the tokens of each.
    pub(super) fn note_batch(&mut self, batch: impl Iterator<Item = (u64, usize)>) {
        self.steps += 1;
        self.digest = batch.fold(self.steps, |hash, (id, count)| mix(mix(hash, id), count as u64));
    }

    /// Records that `owner` chooses a sequence's next token: `sampled` if that is this rank.
    pub(super) fn await_token(&mut self, sequence: u64, owner: usize, sampled: Option<Option<Sampled>>) {
        self.awaited.push((sequence, owner));
        self.chosen.extend(sampled.map(|sampled| Chosen { sequence, sampled }));
    }

    /// The orders in the next sync: at least one if there is any, and no more than fit a message.
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

/// An upper bound on the size of an order as JSON.
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
    /// The loop with attention tp; returns `None` once attention is dp.
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

    /// Takes the orders of rank 0's front end; true if the unit has failed.
    fn receive_orders(&mut self) -> Result<bool, UnitError> {
        for order in self.inbox.take() {
            match order {
                ToRank::Abort { .. } => return Ok(true),
                ToRank::Stats { ticket } if self.together.orders.is_empty() => self.report_stats(ticket),
                ToRank::Stats { ticket } => self.together.tickets.push(ticket),
                // Every rank gets the request, but all move between the same two steps, when rank 0 forwards the order.
                ToRank::Switch { ticket, order } if order != SwitchOrder::Move => {
                    self.take_switch_order(ticket, order)?;
                }
                order if self.is_leader() => self.together.orders.push_back(order),
                // Only rank 0 receives them, and forwards them.
                order => tracing::warn!("ignoring an order that only rank 0 accepts: {}", kind(&order)),
            }
        }
        Ok(false)
    }

    /// Exchanges chosen tokens and rank 0's orders, and executes these; true if the loop must end.
    fn sync(&mut self) -> Result<bool, UnitError> {
        let first = self.ep.step_ranks().start;
        let me = self.ep.rank().index() - first;
        let together = &mut self.together;
        let orders = together.next_orders();
        let (steps, digest, chosen) = (together.steps, together.digest, std::mem::take(&mut together.chosen));
        let own = StepSync { steps, digest, chosen, orders };
        let mut message = std::mem::take(&mut together.message);
        own.encode(&mut message)
            .map_err(|error| UnitError::protocol(first + me, format!("its orders cannot be serialized: {error}")))?;
        let received = self.ep.allgather_bytes(&message)?;
        let mut syncs = Vec::with_capacity(received.len());
        for (place, message) in received.iter().enumerate() {
            // This rank's own message is not transported.
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
                let detail = format!("it ran another batch in step {steps}, or is at step {}", syncs.steps);
                return Err(UnitError::protocol(rank, detail));
            }
            if !rank.is_multiple_of(group.len()) && !syncs.orders.is_empty() {
                return Err(UnitError::protocol(rank, "it sent orders, which only rank 0 may"));
            }
        }
        // All groups that step together end together, with the first that gets the order.
        let stop = syncs.iter().any(|syncs| syncs.orders.contains(&ToRank::Stop));
        let orders = std::mem::take(&mut syncs[group.start - first].orders);
        self.take_tokens(syncs)?;
        Ok(self.obey(orders)? || stop)
    }

    /// Gives every sequence of the last batch its token.
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
            // Only rank 0 reports routes.
            let (leads, sequence) = (self.is_leader(), &mut self.running[at]);
            if settle(sequence, sampled, leads, &self.tokenizer, &self.config, &mut self.events) {
                ended.push(at);
            }
        }
        if let Some(owner) = chosen.iter().position(|chosen| chosen.len() > 0) {
            return Err(UnitError::protocol(first + owner, "it chose more tokens than sequences wait for"));
        }
        // In descending order, so that earlier indices stay valid.
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
                        format!("it forwarded {}, which it must answer itself", kind(&order)),
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
        ToRank::Stats { .. } => "a question for counts",
        ToRank::Flush => "a flush",
        ToRank::Switch { .. } => "a switch of layouts",
        ToRank::Stop => "a stop",
        ToRank::Abort { .. } => "an abort",
    }
}
