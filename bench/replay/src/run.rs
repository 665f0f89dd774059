//! One policy on one workload: the real code routes arrivals, and the simulated unit computes them.

use semmoe_routing::{Decision, Policy, PrefixSettings, Prompt, Router, Scratch, Settings, TablePrice, policy_with};

use crate::arrivals::BLOCK_TOKENS;
use crate::error::ReplayError;
use crate::model::StepTime;
use crate::peers;
use crate::unit::{Limits, Unit};
use crate::workload::Job;

/// Latencies may be this multiple of those on an idle unit.
const SLO: f64 = 5.0;

/// The inputs of a run.
#[derive(Clone, Copy)]
pub(crate) struct Setup<'a> {
    pub(crate) jobs: &'a [Job],
    pub(crate) ranks: u16,
    pub(crate) prices: &'a [TablePrice],
    pub(crate) limits: Limits,
    pub(crate) time: StepTime,
    /// Speed-up of arrivals against the recording.
    pub(crate) speed: f64,
    /// The router's settings, except that gamma is the simulation's.
    pub(crate) settings: &'a Settings,
}

/// The results of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    /// Local activation rate of all tokens computed.
    pub(crate) lar: f64,
    /// Share of the prompts' tokens found in the ranks' caches.
    pub(crate) cached: f64,
    /// Share of requests within the limits on both latencies.
    pub(crate) good: f64,
    /// Requests per second within the limits, from the first arrival to the last token.
    pub(crate) goodput: f64,
    /// All requests per second.
    pub(crate) throughput: f64,
    /// Seconds to the first token.
    pub(crate) ttft_median: f64,
    pub(crate) ttft_p99: f64,
    /// Mean seconds per token after the first; 99th percentile over requests.
    pub(crate) per_token_p99: f64,
    /// Prompt tokens assigned to a rank, maximum over mean.
    pub(crate) tokens_max_over_mean: f64,
    /// Requests on the fullest rank over the mean, averaged over the time with any requests.
    pub(crate) sequences_max_over_mean: f64,
    /// Sequences preempted.
    pub(crate) preemptions: u64,
}

/// An average over time.
#[derive(Default)]
struct Average {
    sum: f64,
    seconds: f64,
}

impl Average {
    fn add(&mut self, value: f64, seconds: f64) {
        self.sum += value * seconds;
        self.seconds += seconds;
    }
}

#[derive(Clone, Copy)]
struct Times {
    arrived: f64,
    first: f64,
    done: f64,
}

struct Run<'a> {
    setup: Setup<'a>,
    policy: Box<dyn Policy>,
    router: Router,
    scratch: Scratch,
    unit: Unit<'a>,
    times: Vec<Times>,
    decisions: Vec<Option<Decision>>,
    assigned: Vec<u64>,
    unevenness: Average,
}

/// Runs `policy` to the last token of the last request.
pub(crate) fn run(policy: &str, setup: Setup<'_>) -> Result<Figures, ReplayError> {
    let settings = Settings { communication: setup.time.gamma(), ..setup.settings.clone() };
    let prefix = PrefixSettings { block_tokens: BLOCK_TOKENS, blocks_per_rank: setup.limits.cache_blocks };
    let nothing = Times { arrived: 0.0, first: 0.0, done: 0.0 };
    let mut run = Run {
        policy: match peers::policy(policy) {
            Some(peer) => peer,
            None => policy_with(policy, &settings)?,
        },
        router: Router::new(setup.ranks, setup.prices, &settings, &prefix),
        scratch: Scratch::default(),
        unit: Unit::new(setup.jobs, setup.ranks, setup.limits, setup.time),
        times: vec![nothing; setup.jobs.len()],
        decisions: vec![None; setup.jobs.len()],
        assigned: vec![0; usize::from(setup.ranks)],
        unevenness: Average::default(),
        setup,
    };
    run.play();
    Ok(run.figures())
}

impl Run<'_> {
    fn play(&mut self) {
        let (mut now, mut next) = (0.0, 0);
        loop {
            while next < self.setup.jobs.len() && self.arrival(next) <= now {
                self.arrive(next);
                next += 1;
            }
            if self.unit.is_idle() {
                if next == self.setup.jobs.len() {
                    return;
                }
                now = self.arrival(next);
                continue;
            }
            let (most, all) = self.unit.sequences().fold((0, 0), |(most, all), count| (count.max(most), all + count));
            let step = self.unit.step();
            self.unevenness.add((most * usize::from(self.setup.ranks)) as f64 / all as f64, step.seconds);
            now += step.seconds;
            for job in step.first {
                self.times[job].first = now;
                if let Some(decision) = &mut self.decisions[job] {
                    self.router.accounts().computed(decision.choice.rank, &mut decision.work);
                }
            }
            for job in step.done {
                self.times[job].done = now;
                self.router.accounts().generated(self.setup.jobs[job].output_tokens.into());
                if let Some(decision) = self.decisions[job].take() {
                    self.router.accounts().release(decision.choice.rank, decision.work);
                }
            }
        }
    }

    fn arrival(&self, job: usize) -> f64 {
        self.setup.jobs[job].at / self.setup.speed
    }

    fn arrive(&mut self, index: usize) {
        let job = &self.setup.jobs[index];
        self.times[index].arrived = self.arrival(index);
        let prompt = Prompt {
            tokens: job.prompt_tokens.into(),
            share: Some(&job.expected),
            blocks: &job.blocks,
            reports: true,
            ..Prompt::default()
        };
        let policy = self.policy.as_ref();
        // Every rank is available, so the policy always decides.
        let Some(decision) = self.router.decide(policy, &prompt, index as u64, None, &mut self.scratch) else { return };
        self.router.assign(&decision, &job.blocks, true);
        let rank = usize::from(decision.choice.rank);
        self.assigned[rank] += u64::from(job.prompt_tokens);
        self.decisions[index] = Some(decision);
        self.unit.submit(index, rank);
    }

    fn figures(&self) -> Figures {
        let Setup { jobs, time, limits, ranks, .. } = self.setup;
        let mut good = 0;
        let (mut ttft, mut per_token, mut end) = (Vec::new(), Vec::new(), 0.0f64);
        for (job, times) in jobs.iter().zip(&self.times) {
            let (alone_first, alone_token) = time.alone(job.prompt_tokens, limits.step_tokens, ranks);
            let first = times.first - times.arrived;
            let token = (times.done - times.first) / f64::from((job.output_tokens - 1).max(1));
            good += u32::from(first <= SLO * alone_first && token <= SLO * alone_token);
            ttft.push(first);
            per_token.push(token);
            end = end.max(times.done);
        }
        ttft.sort_by(f64::total_cmp);
        per_token.sort_by(f64::total_cmp);
        let at = |values: &[f64], share: f64| values[((values.len() - 1) as f64 * share) as usize];
        let prompts: u64 = jobs.iter().map(|job| u64::from(job.prompt_tokens)).sum();
        let mean = self.assigned.iter().sum::<u64>() as f64 / self.assigned.len() as f64;
        Figures {
            lar: self.unit.local / self.unit.computed,
            cached: self.unit.cached_tokens as f64 / prompts as f64,
            good: f64::from(good) / jobs.len() as f64,
            goodput: f64::from(good) / end,
            throughput: jobs.len() as f64 / end,
            ttft_median: at(&ttft, 0.5),
            ttft_p99: at(&ttft, 0.99),
            per_token_p99: at(&per_token, 0.99),
            sequences_max_over_mean: self.unevenness.sum / self.unevenness.seconds,
            preemptions: self.unit.preemptions,
            tokens_max_over_mean: self.assigned.iter().copied().max().unwrap_or(0) as f64 / mean,
        }
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
