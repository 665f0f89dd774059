//! One rank's step loop.

use std::sync::Arc;
use std::time::Instant;

use semmoe_tables::{Attention, Tables};
use semmoe_text::Tokenizer;

use super::batch;
use super::inbox::Inbox;
use super::limits::UnitLimits;
use super::queue::WaitingQueue;
use super::request::{Finish, RankStats, SequenceEvent};
use super::sequence::{Carried, Sampled, Sequence, reservation};
use super::switch::Prepared;
use super::switch::attention::Arriving;
use super::together::Together;
use crate::control::message::{FromRank, ToRank};
use crate::ep::{ExpertParallel, UnitError, Wake};
use crate::model::{KvPool, Model, ModelConfig, StepError, StepItem, Wants};

/// Receives an engine's messages.
pub(crate) type Emit = Box<dyn FnMut(FromRank) + Send>;

/// How an engine's loop ended without failing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EngineEnd {
    /// Ended by [`ToRank::Stop`].
    Stopped,
    /// Ended by [`ToRank::Abort`].
    Aborted,
}

/// Continuous batching: sequences join and leave between steps.
pub(crate) struct Engine {
    pub(super) model: Model,
    pub(super) config: ModelConfig,
    pub(super) ep: ExpertParallel,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) limits: UnitLimits,
    pub(super) pool: KvPool,
    pub(super) inbox: Inbox,
    pub(super) emit: Emit,
    pub(super) running: Vec<Sequence>,
    /// Set after an attention switch whose KV pages move lazily.
    pub(super) arriving: Option<Arriving>,
    pub(super) waiting: WaitingQueue,
    /// Number of sequences that have joined the batch.
    pub(super) admitted: usize,
    /// Number of prompt tokens found in the prefix cache.
    cached_tokens: u64,
    /// Events of the current step, which are sent in one message.
    pub(super) events: Vec<(u64, SequenceEvent)>,
    /// State of the attention tp loop.
    pub(super) together: Together,
    /// The prepared layout switch.
    pub(super) switch: Option<Prepared>,
    /// Tables that assign ranks to sequences without a preferred rank when attention switches to dp.
    pub(crate) affinity: Option<Arc<Tables>>,
}

impl Engine {
    pub(crate) fn new(
        model: Model,
        ep: ExpertParallel,
        tokenizer: Arc<Tokenizer>,
        limits: UnitLimits,
        inbox: Inbox,
        emit: Emit,
    ) -> Self {
        let config = model.config().clone();
        let pool = KvPool::new(model.cache_shape(), limits.kv_pages.of(model.attention()), limits.prefix_reuse);
        Self {
            together: Together::default(),
            model,
            config,
            ep,
            tokenizer,
            limits,
            pool,
            inbox,
            emit,
            running: Vec::new(),
            arriving: None,
            waiting: WaitingQueue::default(),
            admitted: 0,
            cached_tokens: 0,
            events: Vec::new(),
            switch: None,
            affinity: None,
        }
    }

    /// Runs until the engine is stopped or a rank fails. The transport stays open until the engine is dropped, because
    /// peers may still be finishing the last step.
    pub(crate) fn run(&mut self) -> Result<EngineEnd, UnitError> {
        loop {
            let end = match self.model.attention() {
                Attention::Tp => self.run_together()?,
                Attention::Dp => self.run_apart()?,
            };
            if let Some(end) = end {
                return Ok(end);
            }
        }
    }

    /// Runs the attention dp loop, in which each rank has its own sequences. Returns `None` once attention has
    /// switched.
    fn run_apart(&mut self) -> Result<Option<EngineEnd>, UnitError> {
        let mut end = None;
        loop {
            end = self.take_orders()?.or(end);
            // Other ranks may already have begun to move the remaining pages, even if the sequences were cancelled.
            let waits = end == Some(EngineEnd::Stopped) && self.arriving.is_some();
            if self.model.attention() == Attention::Tp || end.is_some() && !waits {
                return Ok(end);
            }
            if self.is_quiet() {
                continue;
            }
            self.admit();
            self.flush();
            if self.is_idle() || self.holds() {
                // Woken by a local command: process it. Woken by a peer: take part in its step.
                if self.ep.wait()? == Wake::Local {
                    continue;
                }
            }
            self.arrive()?;
            self.step()?;
            self.flush();
        }
    }

    /// Whether no sequence runs on this rank and no pages are still to arrive on any rank.
    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.arriving.is_none()
    }

    /// Returns the number of sequences in the batch, including those whose pages have not arrived yet.
    fn batched(&self) -> usize {
        self.running.len() + self.arriving.as_ref().map_or(0, |arriving| arriving.carried.len())
    }

    /// Whether this rank reports and counts sequence events. Under attention tp, all ranks of a group see the same
    /// events.
    pub(super) fn is_leader(&self) -> bool {
        self.model.attention() == Attention::Dp || self.ep.attention_place() == 0
    }

    fn take_orders(&mut self) -> Result<Option<EngineEnd>, UnitError> {
        let orders = if self.is_quiet() { self.inbox.wait() } else { self.inbox.take() };
        for order in orders {
            match order {
                ToRank::Stats { ticket } => {
                    self.flush();
                    self.report_stats(ticket);
                }
                ToRank::Switch { ticket, order } => self.take_switch_order(ticket, order)?,
                ToRank::Stop => return Ok(Some(EngineEnd::Stopped)),
                ToRank::Abort { .. } => return Ok(Some(EngineEnd::Aborted)),
                order => self.take_order(order),
            }
        }
        Ok(None)
    }

    /// Executes a command about sequences or their pages; ignores all others.
    pub(super) fn take_order(&mut self, order: ToRank) {
        match order {
            ToRank::Submit(request) => self.waiting.push(*request),
            ToRank::Cancel { id } => self.cancel(id),
            ToRank::Flush => {
                self.pool.flush();
            }
            ToRank::Stats { .. } | ToRank::Switch { .. } | ToRank::Stop | ToRank::Abort { .. } => {}
        }
    }

    /// Frees a sequence immediately; if it has already ended, its last event has been sent.
    pub(super) fn cancel(&mut self, id: u64) {
        let held = self.batched() + self.waiting.len();
        self.running.retain(|sequence| sequence.carried.request.id != id);
        self.waiting.remove(id);
        self.arriving.iter_mut().for_each(|arriving| drop(arriving.carried.remove(&id)));
        if self.batched() + self.waiting.len() < held {
            self.events.push((id, SequenceEvent::Finished { finish: Finish::Abort, routes: None }));
        }
    }

    /// Moves waiting sequences into the batch in due order, as long as the cache can reserve all pages that they may
    /// need. So a running sequence never waits for a page: it always finishes and makes room for a waiting one.
    pub(super) fn admit(&mut self) {
        while self.batched() < self.limits.running {
            let Some(request) = self.waiting.first() else { return };
            let Some(kv) = self.pool.admit(&request.tokens, reservation(request)) else {
                if !self.is_idle() {
                    return;
                }
                // Rank 0 rejects requests that do not fit into an empty cache, but such a request must never wait here
                // forever.
                let message = "the request does not fit the key-value cache".to_owned();
                self.events.push((request.id, SequenceEvent::Failed { message }));
                self.waiting.pop_first();
                continue;
            };
            let Some(request) = self.waiting.pop_first() else { return };
            if self.is_leader() {
                self.cached_tokens += kv.len() as u64;
            }
            let cached_tokens = u32::try_from(kv.len()).unwrap_or(u32::MAX);
            self.events.push((request.id, SequenceEvent::Begun { cached_tokens }));
            let group = self.ep.attention_group();
            self.running.push(Sequence::new(request, kv, group.start + self.admitted % group.len()));
            self.admitted = self.admitted.wrapping_add(1);
        }
    }

    /// Runs one step with the other ranks and processes its results.
    pub(super) fn step(&mut self) -> Result<(), UnitError> {
        let (me, attention) = (self.ep.rank().index(), self.model.attention());
        loop {
            let ready: Vec<_> = self.running.iter().map(Sequence::ready).collect();
            let counts = batch::plan(&ready, self.limits.step_tokens);
            let mut items = Vec::new();
            let mut members = Vec::new();
            for (index, (sequence, &count)) in self.running.iter_mut().zip(&counts).enumerate() {
                if count > 0 {
                    let (id, owner) = (sequence.carried.request.id, sequence.owner);
                    let item = sequence.step_item(count);
                    let ends = item.wants != Wants::Nothing;
                    let here = attention == Attention::Dp || owner == me;
                    items.push(StepItem { wants: if here { item.wants } else { Wants::Nothing }, ..item });
                    members.push(StepSequence { index, id, count, ends });
                }
            }
            let batch = batch::summary(&ready, &counts, attention);
            let began = Instant::now();
            match self.model.step(&mut items, &mut self.ep) {
                Ok(output) => {
                    self.ep.count_step(&batch, began);
                    drop(items);
                    let mut ended = Vec::new();
                    for (item, member) in members.iter().enumerate() {
                        let sequence = &mut self.running[member.index];
                        sequence.advance(member.count);
                        let sampled = output.next(item).map(|next| sequence.sample(next));
                        if attention == Attention::Tp {
                            if member.ends {
                                self.together.await_token(member.id, sequence.owner, sampled);
                            }
                        } else if let Some(sampled) = sampled
                            && settle(sequence, sampled, true, &self.tokenizer, &self.config, &mut self.events)
                        {
                            ended.push(member.index);
                        }
                    }
                    for index in ended.into_iter().rev() {
                        self.running.remove(index);
                    }
                    if attention == Attention::Tp {
                        self.together.note_batch(members.iter().map(|member| (member.id, member.count)));
                    }
                    return Ok(());
                }
                Err(StepError::Transport(error)) => return Err(error),
                // Peers may already be waiting for this step. Nothing was sent yet, so restart it without the sequence.
                // Under attention tp, every rank makes the same decision.
                Err(StepError::Item { item, source }) => {
                    drop(items);
                    let sequence = self.running.remove(members[item].index);
                    self.events
                        .push((sequence.carried.request.id, SequenceEvent::Failed { message: source.to_string() }));
                }
            }
        }
    }

    /// Reports the queued events.
    pub(super) fn flush(&mut self) {
        if !self.is_leader() {
            self.events.clear();
        } else if !self.events.is_empty() {
            (self.emit)(FromRank::Events(std::mem::take(&mut self.events)));
        }
    }

    /// Reports the rank's statistics.
    pub(super) fn report_stats(&mut self, ticket: u64) {
        let total = |sum: usize| sum as u64;
        let waiting_tokens = self.waiting.iter().map(|request| request.tokens.len()).sum();
        let arriving = self.arriving.iter().flat_map(|arriving| arriving.carried.values().map(Carried::tokens));
        let running_tokens: usize = self.running.iter().map(|sequence| sequence.carried.tokens()).chain(arriving).sum();
        let stats = RankStats {
            counters: self.ep.counters().clone(),
            timings: self.ep.timings().clone(),
            running: total(self.batched()),
            waiting: total(self.waiting.len()),
            waiting_tokens: total(waiting_tokens),
            kv: self.pool.usage(),
            cached_tokens: self.cached_tokens,
            fetches: self.model.expert_fetches(),
            device: self.model.device_work(),
            total_tokens: total(running_tokens + waiting_tokens),
        };
        (self.emit)(FromRank::Stats { ticket, stats: Box::new(stats) });
    }
}

/// One sequence's part of a step.
struct StepSequence {
    /// Index among the running sequences.
    index: usize,
    id: u64,
    count: usize,
    /// Whether the step yields the sequence's next token.
    ends: bool,
}

/// Appends the sampled token to a sequence (`None` if the logits were unusable) and returns true if the sequence has
/// ended. `reports_routes` is set if this rank reports requested routes.
pub(super) fn settle(
    sequence: &mut Sequence,
    sampled: Option<Sampled>,
    reports_routes: bool,
    tokenizer: &Tokenizer,
    model: &ModelConfig,
    events: &mut Vec<(u64, SequenceEvent)>,
) -> bool {
    let id = sequence.carried.request.id;
    let failed = |message: String| (id, SequenceEvent::Failed { message });
    let Some(Sampled { token, logprobs }) = sampled else {
        events.push(failed("the model's logits have no finite maximum".into()));
        return true;
    };
    match sequence.push(token, tokenizer) {
        Ok(finish) => {
            events.push((id, SequenceEvent::Token { id: token, logprobs }));
            let Some(finish) = finish else { return false };
            let routes = reports_routes.then(|| sequence.encoded_routes(model)).flatten();
            events.push((id, SequenceEvent::Finished { finish, routes }));
        }
        Err(error) => events.push(failed(error.to_string())),
    }
    true
}
