//! A simulated unit: ranks that step together, each with continuous batching, chunked prefill and a prefix cache.

use std::collections::VecDeque;

use semmoe_routing::{PrefixSettings, PrefixTable};

use crate::arrivals::BLOCK_TOKENS;
use crate::model::{Model, Part, StepTime};
use crate::workload::Job;

/// Limits of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Token budget of a step: decoding sequences first, then prompts.
    pub(crate) step_tokens: u32,
    /// Most sequences that decode at once.
    pub(crate) sequences: usize,
    /// Blocks in the prefix cache.
    pub(crate) cache_blocks: u32,
    /// Tokens of KV memory for running sequences. A prompt waits until it fits; if answers outgrow the memory, the
    /// youngest sequence is preempted and recomputed. A rank always runs at least one sequence.
    pub(crate) kv_tokens: u64,
}

/// A request on its rank. After a preemption, its prompt is recomputed together with the tokens generated so far.
struct Running {
    job: usize,
    generated: u32,
}

#[derive(Default)]
struct Rank {
    /// Prompts in order of arrival; the first has `left` tokens to compute once it has been looked up.
    waiting: VecDeque<Running>,
    left: Option<u32>,
    running: Vec<Running>,
    /// Tokens of KV memory in use; of these, the tokens of decoding sequences.
    used: u64,
    held: u64,
    /// \[ranks\] sums over the decoding sequences of their activation shares.
    hosted: Vec<f64>,
}

impl Rank {
    fn begin(&mut self, sequence: Running, job: &Job) {
        self.held += job.context(sequence.generated);
        self.hosted.iter_mut().zip(&job.local).for_each(|(sum, share)| *sum += share);
        self.running.push(sequence);
    }

    fn end(&mut self, sequence: &Running, job: &Job) {
        let tokens = job.context(sequence.generated);
        self.held -= tokens;
        self.used -= tokens;
        self.hosted.iter_mut().zip(&job.local).for_each(|(sum, share)| *sum -= share);
    }
}

/// The events of a step.
#[derive(Default)]
pub(crate) struct Step {
    pub(crate) seconds: f64,
    /// Requests whose prefill is complete: their first token is out.
    pub(crate) first: Vec<usize>,
    /// Completed requests.
    pub(crate) done: Vec<usize>,
}

pub(crate) struct Unit<'a> {
    jobs: &'a [Job],
    ranks: Vec<Rank>,
    cache: Option<PrefixTable>,
    limits: Limits,
    time: StepTime,
    parts: Vec<Part>,
    /// Prompt tokens found in the caches.
    pub(crate) cached_tokens: u64,
    /// Tokens computed, and their local activations, in tokens.
    pub(crate) computed: f64,
    pub(crate) local: f64,
    pub(crate) preemptions: u64,
}

impl<'a> Unit<'a> {
    pub(crate) fn new(jobs: &'a [Job], ranks: u16, limits: Limits, time: StepTime) -> Self {
        let prefix = PrefixSettings { block_tokens: BLOCK_TOKENS, blocks_per_rank: limits.cache_blocks };
        let kv_tokens = if time.model == Model::Full { limits.kv_tokens } else { u64::MAX };
        let idle = || Rank { hosted: vec![0.0; usize::from(ranks)], ..Rank::default() };
        Unit {
            jobs,
            ranks: (0..ranks).map(|_| idle()).collect(),
            cache: PrefixTable::new(ranks, &prefix),
            limits: Limits { kv_tokens, ..limits },
            time,
            parts: Vec::new(),
            cached_tokens: 0,
            computed: 0.0,
            local: 0.0,
            preemptions: 0,
        }
    }

    pub(crate) fn submit(&mut self, job: usize, rank: usize) {
        self.ranks[rank].waiting.push_back(Running { job, generated: 0 });
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.ranks.iter().all(|rank| rank.waiting.is_empty() && rank.running.is_empty())
    }

    /// Number of requests on each rank.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = usize> {
        self.ranks.iter().map(|rank| rank.waiting.len() + rank.running.len())
    }

    /// Computes a step on every rank.
    pub(crate) fn step(&mut self) -> Step {
        let mut step = Step::default();
        let mut parts = std::mem::take(&mut self.parts);
        parts.clear();
        parts.resize(self.ranks.len(), Part::default());
        for rank in 0..self.ranks.len() {
            self.decode(rank, &mut step, &mut parts);
            self.prefill(rank, &mut step, &mut parts);
            self.computed += parts[rank].prefilled + parts[rank].decoded;
        }
        self.local += parts.iter().map(|part| part.local).sum::<f64>();
        step.seconds = self.time.step(&parts);
        self.parts = parts;
        step
    }

    /// Decodes one token of each running sequence.
    fn decode(&mut self, rank: usize, step: &mut Step, parts: &mut [Part]) {
        let state = &mut self.ranks[rank];
        parts[rank].decoded = state.running.len() as f64;
        parts[rank].held = state.held as f64;
        note_hosted(parts, rank, 1.0, &state.hosted);
        (state.used, state.held) = (state.used + state.running.len() as u64, state.held + state.running.len() as u64);
        state.running.iter_mut().for_each(|sequence| sequence.generated += 1);
        let complete = |sequence: &mut Running| sequence.generated == self.jobs[sequence.job].output_tokens;
        for sequence in state.running.extract_if(.., complete).collect::<Vec<_>>() {
            state.end(&sequence, &self.jobs[sequence.job]);
            step.done.push(sequence.job);
        }
        while state.used > self.limits.kv_tokens && state.running.len() > 1 {
            let Some(sequence) = state.running.pop() else { break };
            state.end(&sequence, &self.jobs[sequence.job]);
            self.preemptions += 1;
            // A prompt in progress goes first.
            let at = usize::from(state.left.is_some()).min(state.waiting.len());
            state.waiting.insert(at, sequence);
        }
    }

    fn prefill(&mut self, rank: usize, step: &mut Step, parts: &mut [Part]) {
        let mut budget = self.limits.step_tokens.saturating_sub(parts[rank].decoded as u32);
        while budget > 0 && self.ranks[rank].running.len() < self.limits.sequences {
            let Some(&Running { job: index, generated }) = self.ranks[rank].waiting.front() else { break };
            let job = &self.jobs[index];
            let context = job.context(generated);
            let left = match self.ranks[rank].left {
                Some(left) => left,
                None if !self.has_room(rank, context) => break,
                None => {
                    self.ranks[rank].used += context;
                    self.look_up(rank, index, generated)
                }
            };
            let now = left.min(budget);
            budget -= now;
            let tokens = f64::from(now);
            parts[rank].prefilled += tokens;
            parts[rank].attended += tokens * (context as f64 - f64::from(left) + tokens / 2.0);
            note_hosted(parts, rank, tokens, &job.local);
            self.ranks[rank].left = Some(left - now);
            if left == now {
                self.prefilled(rank, step);
            }
        }
    }

    fn has_room(&self, rank: usize, tokens: u64) -> bool {
        let Rank { used, running, .. } = &self.ranks[rank];
        running.is_empty() || used + tokens <= self.limits.kv_tokens
    }

    /// Tokens of the prompt that are not in the rank's cache. The last token is always computed.
    fn look_up(&mut self, rank: usize, job: usize, generated: u32) -> u32 {
        let Job { prompt_tokens, blocks, .. } = &self.jobs[job];
        let mut cached = vec![0; self.ranks.len()];
        if let Some(cache) = &self.cache {
            cache.cached(blocks, &mut cached);
        }
        let cached = (cached[rank] as u32).min(prompt_tokens - 1);
        if generated == 0 {
            self.cached_tokens += u64::from(cached);
        }
        prompt_tokens + generated - cached
    }

    fn prefilled(&mut self, rank: usize, step: &mut Step) {
        let state = &mut self.ranks[rank];
        state.left = None;
        let Some(mut sequence) = state.waiting.pop_front() else { return };
        let job = &self.jobs[sequence.job];
        if let Some(cache) = &self.cache {
            cache.record(rank as u16, &job.blocks);
        }
        if sequence.generated == 0 {
            step.first.push(sequence.job);
        }
        state.used += 1;
        sequence.generated += 1;
        if sequence.generated == job.output_tokens {
            step.done.push(sequence.job);
            state.used -= job.context(sequence.generated);
        } else {
            state.begin(sequence, job);
        }
    }
}

/// Adds `tokens` of `rank` to the ranks that host their experts, weighted by `shares`.
fn note_hosted(parts: &mut [Part], rank: usize, tokens: f64, shares: &[f64]) {
    for (at, (part, share)) in parts.iter_mut().zip(shares).enumerate() {
        *(if at == rank { &mut part.local } else { &mut part.received }) += tokens * share;
    }
}
