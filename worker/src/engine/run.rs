//! The step loop of one rank.

use std::collections::VecDeque;
use std::sync::Arc;

use semmoe_text::Tokenizer;

use super::EngineLimits;
use super::batch;
use super::inbox::Inbox;
use super::request::{Finish, RankStats, SequenceEvent, SequenceRequest};
use super::sequence::{Sequence, reservation};
use crate::control::message::{FromRank, ToRank};
use crate::ep::{ExpertParallel, TransportError, Wake};
use crate::model::{Model, ModelConfig, StepError, StepItem};

/// Where an engine's messages go.
pub(crate) type Emit = Box<dyn FnMut(FromRank) + Send>;

/// How an engine's loop ended without a failure of its own.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EngineEnd {
    /// By [`ToRank::Stop`].
    Stopped,
    /// By [`ToRank::Abort`], with the cause.
    Aborted(String),
}

/// Continuous batching: sequences join and leave between steps.
pub(crate) struct Engine {
    model: Model,
    config: ModelConfig,
    ep: ExpertParallel,
    tokenizer: Arc<Tokenizer>,
    limits: EngineLimits,
    inbox: Inbox,
    emit: Emit,
    running: Vec<Sequence>,
    waiting: VecDeque<SequenceRequest>,
    /// Of the current step, sent in one message.
    events: Vec<(u64, SequenceEvent)>,
}

impl Engine {
    pub(crate) fn new(
        model: Model,
        ep: ExpertParallel,
        tokenizer: Arc<Tokenizer>,
        limits: EngineLimits,
        inbox: Inbox,
        emit: Emit,
    ) -> Self {
        let config = model.config().clone();
        let limits = limits.fitted(&config);
        Self {
            model,
            config,
            ep,
            tokenizer,
            limits,
            inbox,
            emit,
            running: Vec::new(),
            waiting: VecDeque::new(),
            events: Vec::new(),
        }
    }

    /// Runs until told to stop or a rank fails. The transport stays open until the engine is dropped: peers may still be
    /// finishing the last step.
    pub(crate) fn run(&mut self) -> Result<EngineEnd, TransportError> {
        loop {
            if let Some(end) = self.take_orders() {
                return Ok(end);
            }
            self.admit();
            self.flush();
            if self.running.is_empty() {
                // Rung by an order: look at it. Rung by a peer: take part with nothing of one's own.
                if self.ep.wait()? == Wake::Local {
                    continue;
                }
            }
            self.step()?;
            self.flush();
        }
    }

    fn take_orders(&mut self) -> Option<EngineEnd> {
        for order in self.inbox.take() {
            match order {
                ToRank::Submit(request) => self.waiting.push_back(*request),
                ToRank::Cancel { id } => self.cancel(id),
                ToRank::Stats { ticket } => {
                    let stats = self.stats();
                    self.flush();
                    (self.emit)(FromRank::Stats { ticket, stats });
                }
                ToRank::Stop => return Some(EngineEnd::Stopped),
                ToRank::Abort { cause } => return Some(EngineEnd::Aborted(cause)),
            }
        }
        None
    }

    /// Frees a sequence at once; one that has ended meanwhile has had its last event.
    fn cancel(&mut self, id: u64) {
        let held = self.running.len() + self.waiting.len();
        self.running.retain(|sequence| sequence.id() != id);
        self.waiting.retain(|request| request.id != id);
        if self.running.len() + self.waiting.len() < held {
            self.events.push((id, SequenceEvent::Finished { finish: Finish::Abort, routes: None }));
        }
    }

    /// Moves waiting sequences into the batch, oldest first, while there is room for all that they may come to need.
    fn admit(&mut self) {
        let mut reserved: usize = self.running.iter().map(Sequence::reserved).sum();
        while self.running.len() < self.limits.running {
            let fits = |request: &SequenceRequest| reserved + reservation(request) <= self.limits.kv_tokens;
            // One that does not fit alone was refused by rank 0; running it beats waiting for ever.
            let Some(request) = self.waiting.pop_front_if(|request| fits(request) || self.running.is_empty()) else {
                return;
            };
            reserved += reservation(&request);
            let kv = self.model.new_sequence();
            self.running.push(Sequence::new(request, kv));
        }
    }

    /// One step with the other ranks, and what follows from it.
    fn step(&mut self) -> Result<(), TransportError> {
        loop {
            let ready: Vec<_> = self.running.iter().map(Sequence::ready).collect();
            let counts = batch::plan(&ready, self.limits.step_tokens);
            let mut items = Vec::new();
            let mut members = Vec::new();
            for (index, (sequence, &count)) in self.running.iter_mut().zip(&counts).enumerate() {
                if count > 0 {
                    let (kv, tokens, want_logits, phase) = sequence.step_parts(count);
                    items.push(StepItem { kv, tokens, want_logits, phase });
                    members.push((index, count));
                }
            }
            match self.model.step(&mut items, &mut self.ep) {
                Ok(output) => {
                    drop(items);
                    let mut ended = Vec::new();
                    for (item, &(index, count)) in members.iter().enumerate() {
                        let sequence = &mut self.running[index];
                        sequence.advance(count, output.routes(item));
                        if let Some(logits) = output.logits(item)
                            && choose(sequence, logits, &self.tokenizer, &self.config, &mut self.events)
                        {
                            ended.push(index);
                        }
                    }
                    for index in ended.into_iter().rev() {
                        self.running.remove(index);
                    }
                    return Ok(());
                }
                Err(StepError::Transport(error)) => return Err(error),
                // Nothing was sent: the step begins again without the sequence, as peers may be waiting for it.
                Err(StepError::Item { item, detail }) => {
                    drop(items);
                    let sequence = self.running.remove(members[item].0);
                    self.events.push((sequence.id(), SequenceEvent::Failed { message: detail }));
                }
            }
        }
    }

    fn flush(&mut self) {
        if !self.events.is_empty() {
            (self.emit)(FromRank::Events(std::mem::take(&mut self.events)));
        }
    }

    fn stats(&self) -> RankStats {
        let total = |sum: usize| sum as u64;
        let waiting_tokens = self.waiting.iter().map(|request| request.tokens.len()).sum();
        RankStats {
            counters: self.ep.counters().snapshot(),
            running: total(self.running.len()),
            waiting: total(self.waiting.len()),
            waiting_tokens: total(waiting_tokens),
            used_tokens: total(self.running.iter().map(|sequence| sequence.kv.len()).sum()),
            total_tokens: total(self.running.iter().map(Sequence::tokens).sum::<usize>() + waiting_tokens),
        }
    }
}

/// The next token of a sequence; true if it was the last.
fn choose(
    sequence: &mut Sequence,
    logits: &[f32],
    tokenizer: &Tokenizer,
    model: &ModelConfig,
    events: &mut Vec<(u64, SequenceEvent)>,
) -> bool {
    let id = sequence.id();
    let failed = |message: String| (id, SequenceEvent::Failed { message });
    match sequence.choose(logits, tokenizer) {
        Ok(Some((token, finish))) => {
            events.push((id, SequenceEvent::Token(token)));
            let Some(finish) = finish else { return false };
            let routes = sequence.encoded_routes(model);
            events.push((id, SequenceEvent::Finished { finish, routes }));
        }
        Ok(None) => events.push(failed("the model's logits hold no finite maximum".into())),
        Err(error) => events.push(failed(error.to_string())),
    }
    true
}
