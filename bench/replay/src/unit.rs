//! A simulated unit: ranks that step together, each with continuous batching, chunked prefill and a prefix cache.

use std::collections::VecDeque;

use semmoe_routing::{PrefixSettings, PrefixTable};

use crate::arrivals::BLOCK_TOKENS;
use crate::model::StepTime;
use crate::workload::Job;

/// Limits of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Tokens of a step: what is decoding, and then prompts.
    pub(crate) step_tokens: u32,
    /// Sequences that decode at once.
    pub(crate) sequences: usize,
    /// Blocks in the prefix cache.
    pub(crate) cache_blocks: u32,
}

/// A request on its rank.
struct Running {
    job: usize,
    left: u32,
}

#[derive(Default)]
struct Rank {
    /// Prompts in order of arrival; the first has `left` tokens to compute, once it was looked at.
    waiting: VecDeque<usize>,
    left: Option<u32>,
    running: Vec<Running>,
}

/// The events of a step.
#[derive(Default)]
pub(crate) struct Step {
    pub(crate) seconds: f64,
    /// Prompts that are computed now: their first tokens are out.
    pub(crate) first: Vec<usize>,
    /// Requests that are complete.
    pub(crate) done: Vec<usize>,
}

pub(crate) struct Unit<'a> {
    jobs: &'a [Job],
    ranks: Vec<Rank>,
    cache: Option<PrefixTable>,
    limits: Limits,
    time: StepTime,
    /// Prompt tokens that were found in the caches.
    pub(crate) cached_tokens: u64,
    /// Tokens computed, and the activations among them that were local, in tokens.
    pub(crate) computed: f64,
    pub(crate) local: f64,
}

impl<'a> Unit<'a> {
    pub(crate) fn new(jobs: &'a [Job], ranks: u16, limits: Limits, time: StepTime) -> Self {
        let prefix = PrefixSettings { block_tokens: BLOCK_TOKENS, blocks_per_rank: limits.cache_blocks };
        Unit {
            jobs,
            ranks: (0..ranks).map(|_| Rank::default()).collect(),
            cache: PrefixTable::new(ranks, &prefix),
            limits,
            time,
            cached_tokens: 0,
            computed: 0.0,
            local: 0.0,
        }
    }

    pub(crate) fn submit(&mut self, job: usize, rank: usize) {
        self.ranks[rank].waiting.push_back(job);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.ranks.iter().all(|rank| rank.waiting.is_empty() && rank.running.is_empty())
    }

    /// Every rank computes what fits into a step.
    pub(crate) fn step(&mut self) -> Step {
        let mut step = Step::default();
        let mut longest = 0.0f64;
        for rank in 0..self.ranks.len() {
            longest = longest.max(self.step_rank(rank, &mut step));
        }
        step.seconds = self.time.fixed + longest;
        step
    }

    /// The rank's variable seconds.
    fn step_rank(&mut self, rank: usize, step: &mut Step) -> f64 {
        let (decoded, decoded_local) = self.decode(rank, step);
        let budget = self.limits.step_tokens.saturating_sub(decoded);
        let (prefilled, prefilled_local) = self.prefill(rank, budget, step);
        let (tokens, local) = (f64::from(decoded + prefilled), decoded_local + prefilled_local);
        self.computed += tokens;
        self.local += local;
        let StepTime { prefill, decode, transfer, .. } = self.time;
        prefill * f64::from(prefilled) + decode * f64::from(decoded) + transfer * (tokens - local)
    }

    /// One token for each running sequence: their number, and how many tokens' activations were local.
    fn decode(&mut self, rank: usize, step: &mut Step) -> (u32, f64) {
        let running = &mut self.ranks[rank].running;
        let local = running.iter().map(|running| self.jobs[running.job].local[rank]).sum();
        let decoded = running.len() as u32;
        running.retain_mut(|running| {
            running.left -= 1;
            if running.left == 0 {
                step.done.push(running.job);
            }
            running.left > 0
        });
        (decoded, local)
    }

    fn prefill(&mut self, rank: usize, mut budget: u32, step: &mut Step) -> (u32, f64) {
        let (mut tokens, mut local) = (0, 0.0);
        while budget > 0 && self.ranks[rank].running.len() < self.limits.sequences {
            let Some(&job) = self.ranks[rank].waiting.front() else { break };
            let left = match self.ranks[rank].left {
                Some(left) => left,
                None => self.look_up(rank, job),
            };
            let now = left.min(budget);
            budget -= now;
            tokens += now;
            local += f64::from(now) * self.jobs[job].local[rank];
            self.ranks[rank].left = Some(left - now);
            if left == now {
                self.prefilled(rank, job, step);
            }
        }
        (tokens, local)
    }

    /// Tokens of the prompt that are not in the rank's cache; the last one always is computed.
    fn look_up(&mut self, rank: usize, job: usize) -> u32 {
        let Job { prompt_tokens, blocks, .. } = &self.jobs[job];
        let mut cached = vec![0; self.ranks.len()];
        if let Some(cache) = &self.cache {
            cache.cached(blocks, &mut cached);
        }
        let cached = (cached[rank] as u32).min(prompt_tokens - 1);
        self.cached_tokens += u64::from(cached);
        prompt_tokens - cached
    }

    fn prefilled(&mut self, rank: usize, job: usize, step: &mut Step) {
        let Job { blocks, output_tokens, .. } = &self.jobs[job];
        if let Some(cache) = &self.cache {
            cache.record(rank as u16, blocks);
        }
        let state = &mut self.ranks[rank];
        state.waiting.pop_front();
        state.left = None;
        step.first.push(job);
        match output_tokens - 1 {
            0 => step.done.push(job),
            left => state.running.push(Running { job, left }),
        }
    }
}
