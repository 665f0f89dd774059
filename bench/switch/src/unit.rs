//! One simulated unit: continuous batching with chunked prefill, a KV cache that bounds admission, and switches that
//! stop the unit.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use semmoe_planner::policy::{ByLayout, Decision, Event, Head, Layout, Step, SwitchCost, SwitchPolicy, UnitView};

use crate::engines::{CHUNK_TOKENS, Engine, Rates};
use crate::traces::{Request, normal};

/// Standard deviation of the logarithm of a step's time.
const STEP_NOISE: f64 = 0.03;
/// Standard deviation of the logarithm of a switch's time.
const SWITCH_NOISE: f64 = 0.1;

/// The setup that all runs of a contest share.
#[derive(Clone, Copy)]
pub(crate) struct Setup<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) rates: Rates,
    pub(crate) cost: &'a SwitchCost,
    pub(crate) room_tokens: ByLayout<u64>,
    pub(crate) requests: &'a [Request],
    /// Head start in the queue for each step of a request's priority.
    pub(crate) priority_seconds: f64,
    /// Seed of the noise.
    pub(crate) seed: u64,
}

/// Times of a request's first and last token.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Served {
    pub(crate) first: f64,
    pub(crate) last: f64,
}

/// The results of a run.
pub(crate) struct Outcome {
    /// One entry per request, in order.
    pub(crate) served: Vec<Served>,
    pub(crate) switches: u32,
    /// Total time that switches stopped the unit.
    pub(crate) stopped_seconds: f64,
    /// Time of the last token.
    pub(crate) end: f64,
}

struct Unit<'a> {
    setup: Setup<'a>,
    random: fastrand::Rng,
    layout: Layout,
    now: f64,
    /// Requests without a first token, in order of due times; only the first one may be partly prefilled.
    waiting: VecDeque<usize>,
    /// Prompt tokens that the first one still has to compute, once admitted.
    admitted: Option<u32>,
    waiting_tokens: u64,
    /// Running requests by the decode step at which they end.
    running: BinaryHeap<Reverse<(u64, usize)>>,
    decode_steps: u64,
    live_tokens: u64,
    promised_tokens: u64,
    outcome: Outcome,
}

/// Runs `policy` from the layout `start` to the last token.
pub(crate) fn run(setup: Setup<'_>, start: Layout, policy: &mut dyn SwitchPolicy) -> Outcome {
    let served = vec![Served::default(); setup.requests.len()];
    let mut unit = Unit {
        setup,
        random: fastrand::Rng::with_seed(setup.seed ^ 0x5eed),
        layout: start,
        now: 0.0,
        waiting: VecDeque::new(),
        admitted: None,
        waiting_tokens: 0,
        running: BinaryHeap::new(),
        decode_steps: 0,
        live_tokens: 0,
        promised_tokens: 0,
        outcome: Outcome { served, switches: 0, stopped_seconds: 0.0, end: 0.0 },
    };
    unit.play(policy);
    unit.outcome
}

impl Unit<'_> {
    fn play(&mut self, policy: &mut dyn SwitchPolicy) {
        let mut next = 0;
        loop {
            while let Some(request) = self.setup.requests.get(next).filter(|request| request.at <= self.now) {
                policy.observe(request.at, &Event::Arrived { prompt_tokens: request.prompt_tokens });
                self.enqueue(next);
                next += 1;
            }
            if self.waiting.is_empty() && self.running.is_empty() {
                let Some(request) = self.setup.requests.get(next) else { break };
                self.now = request.at;
                continue;
            }
            match self.ask(policy) {
                Decision::Switch(switch) => self.switch(switch.to, policy),
                Decision::Stay(_) => {
                    let step = self.step();
                    policy.observe(self.now, &Event::Stepped(step));
                }
            }
        }
        self.outcome.end = self.now;
    }

    /// Adds a request behind those due no later; a prompt that has begun stays first.
    fn enqueue(&mut self, index: usize) {
        let request = |index: usize| &self.setup.requests[index];
        let due = |index: usize| request(index).at - f64::from(request(index).priority) * self.setup.priority_seconds;
        let begun = usize::from(self.admitted.is_some());
        let later = self.waiting.iter().skip(begun).rev().take_while(|&&other| due(other) > due(index)).count();
        self.waiting_tokens += u64::from(request(index).prompt_tokens);
        self.waiting.insert(self.waiting.len() - later, index);
    }

    fn ask(&self, policy: &mut dyn SwitchPolicy) -> Decision {
        let heads = self.head();
        let view = UnitView {
            layout: self.layout,
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            waiting_tokens: self.waiting_tokens,
            live_kv_tokens: self.live_tokens,
            promised_kv_tokens: self.promised_tokens,
            blocked: self.admitted.is_none()
                && self.running.len() < self.setup.engine.max_sequences as usize
                && self.waiting.front().is_some_and(|&first| !self.fits(first)),
            heads: heads.as_slice(),
        };
        policy.decide(self.now, &view)
    }

    /// The first waiting request of priority 1.
    fn head(&self) -> Option<Head> {
        let mut tokens_ahead = 0;
        for &index in &self.waiting {
            let request = &self.setup.requests[index];
            tokens_ahead += u64::from(match self.admitted {
                Some(left) if self.waiting.front() == Some(&index) => left,
                _ => request.prompt_tokens,
            });
            if request.priority == 1 {
                return Some(Head { priority: 1, waited_seconds: self.now - request.at, tokens_ahead });
            }
        }
        None
    }

    fn switch(&mut self, to: Layout, policy: &mut dyn SwitchPolicy) {
        let noise = (SWITCH_NOISE * normal(&mut self.random)).exp();
        let seconds = self.setup.cost.seconds(to, self.live_tokens) * noise;
        self.outcome.switches += 1;
        self.outcome.stopped_seconds += seconds;
        self.now += seconds;
        self.layout = to;
        policy.observe(self.now, &Event::Switched { to, seconds, kv_tokens: self.live_tokens });
    }

    fn needs(&self, index: usize) -> u64 {
        let request = &self.setup.requests[index];
        u64::from(request.prompt_tokens) + u64::from(request.output_tokens)
    }

    fn fits(&self, index: usize) -> bool {
        // A request larger than the whole cache is admitted alone; no trace should contain one.
        self.promised_tokens == 0 || self.promised_tokens + self.needs(index) <= self.setup.room_tokens[self.layout]
    }

    /// One step: every running sequence decodes a token alongside a chunk of prompts.
    fn step(&mut self) -> Step {
        let sequences = self.running.len() as u32;
        let (prompt_tokens, prefilled) = self.prefill();
        let engine = &self.setup.engine.steps[self.layout];
        // The curve covers the largest number of sequences admitted.
        let decode = if sequences > 0 { engine.seconds(sequences).unwrap_or_default() } else { 0.0 };
        let noise = (STEP_NOISE * normal(&mut self.random)).exp();
        let seconds = (decode + f64::from(prompt_tokens) / self.setup.rates[self.layout]) * noise;
        self.now += seconds;
        self.decode_steps += 1;
        self.live_tokens += u64::from(sequences);
        while let Some(&Reverse((end, index))) = self.running.peek().filter(|running| running.0.0 <= self.decode_steps)
        {
            debug_assert_eq!(end, self.decode_steps);
            self.running.pop();
            self.finish(index);
        }
        for index in prefilled {
            self.outcome.served[index].first = self.now;
            self.live_tokens += 1;
            match u64::from(self.setup.requests[index].output_tokens - 1) {
                0 => self.finish(index),
                left => self.running.push(Reverse((self.decode_steps + left, index))),
            }
        }
        Step { layout: self.layout, sequences, prompt_tokens, seconds }
    }

    fn finish(&mut self, index: usize) {
        self.outcome.served[index].last = self.now;
        self.live_tokens -= self.needs(index);
        self.promised_tokens -= self.needs(index);
    }

    /// Takes prompt tokens in order of the queue; returns their number, and the requests whose prompts are complete.
    fn prefill(&mut self) -> (u32, Vec<usize>) {
        let mut budget = CHUNK_TOKENS;
        let mut prefilled = Vec::new();
        while budget > 0
            && let Some(&index) = self.waiting.front()
        {
            let left = match self.admitted {
                Some(left) => left,
                None if self.running.len() + prefilled.len() < self.setup.engine.max_sequences as usize
                    && self.fits(index) =>
                {
                    self.promised_tokens += self.needs(index);
                    self.setup.requests[index].prompt_tokens
                }
                None => break,
            };
            let tokens = left.min(budget);
            budget -= tokens;
            self.live_tokens += u64::from(tokens);
            self.waiting_tokens -= u64::from(tokens);
            self.admitted = Some(left - tokens);
            if left == tokens {
                self.admitted = None;
                self.waiting.pop_front();
                prefilled.push(index);
            }
        }
        (CHUNK_TOKENS - budget, prefilled)
    }
}
