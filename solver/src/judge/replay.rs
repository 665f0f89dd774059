//! Replays a routing policy on recorded requests: a closed loop over ranks that step together, with no other queues.
//!
//! A new request arrives whenever one finishes. The first requests arrive evenly over the steps of a mean-length
//! answer, so that equally long answers do not keep all requests in lockstep. In each step, every rank computes pending
//! prompts in order of arrival, up to a token limit, and every sequence with a complete prompt generates one token,
//! including those whose prompt was completed in this step. The router sees what a gateway would see of streams: a
//! request's prompt is pending until the first token, and the request is in flight until the last token.

use semmoe_routing::{Policy, Prompt, Router, Scratch, Work};
use serde::Serialize;

use crate::input::EvalOptions;
use crate::judge::balance::spread_of;
use crate::judge::job::Job;

/// Default number of prompt tokens that a rank computes per step.
const STEP_TOKENS: u64 = 2048;

/// How evenly a replay loaded the ranks; each figure is the ratio of maximum to mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Evenness {
    /// Prompt tokens computed.
    pub prefill_tokens: f64,
    /// Tokens generated.
    pub decode_tokens: f64,
    /// Steps that sequences spent on a rank, including waiting.
    pub sequence_steps: f64,
    /// Sequences in flight; the ratio is averaged over the steps at full concurrency with more requests to come (1 if
    /// there are none).
    pub running: f64,
}

/// A policy's choices, and figures of the replay.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    /// The rank of each request, in trace order.
    pub(crate) ranks: Vec<usize>,
    /// Prompt tokens estimated to be cached on the chosen ranks.
    pub(crate) cached: u64,
    pub(crate) evenness: Evenness,
}

/// A sequence in flight.
struct Sequence {
    rank: u16,
    work: Work,
    /// Prompt tokens to compute.
    pending: u64,
    generated: u64,
    /// Tokens to generate, at least one.
    answer: u64,
}

struct Unit<'a> {
    router: &'a Router,
    /// Running sequences in order of arrival.
    running: Vec<Sequence>,
    cached: u64,
    /// [ranks] prompt tokens, generated tokens and sequences, each summed over the steps.
    prefill: Vec<f64>,
    decode: Vec<f64>,
    held: Vec<f64>,
}

/// Replays a policy on `jobs` in order.
pub(crate) fn replay(router: &Router, policy: &dyn Policy, jobs: &[Job], options: &EvalOptions) -> Replay {
    let step_tokens = options.step_tokens.map_or(STEP_TOKENS, |tokens| tokens as u64);
    let none = || vec![0.0; router.accounts().ranks()];
    let mut unit = Unit { router, running: Vec::new(), cached: 0, prefill: none(), decode: none(), held: none() };
    let (mut replay, mut scratch) = (Replay::default(), Scratch::default());
    let (mut unevenness, mut full_steps) = (0.0, 0u64);
    let answers = jobs.iter().map(|job| answer(job, options)).sum::<u64>() as f64 / jobs.len().max(1) as f64;
    let mut coming = jobs.iter().enumerate();
    for step in 1u64.. {
        let most = (step as f64 / answers * options.concurrency as f64).ceil().min(options.concurrency as f64) as usize;
        for (sequence, job) in coming.by_ref().take(most.saturating_sub(unit.running.len())) {
            // All ranks are available, so a choice always exists.
            let Some(rank) = unit.admit(policy, sequence as u64, job, options, &mut scratch) else { continue };
            replay.ranks.push(usize::from(rank));
        }
        if unit.running.is_empty() {
            break;
        }
        let counts = unit.step(step_tokens);
        if coming.len() > 0 && most == options.concurrency {
            unevenness += max_over_mean(&counts);
            full_steps += 1;
        }
    }
    replay.cached = unit.cached;
    replay.evenness = Evenness {
        prefill_tokens: max_over_mean(&unit.prefill),
        decode_tokens: max_over_mean(&unit.decode),
        sequence_steps: max_over_mean(&unit.held),
        running: if full_steps > 0 { unevenness / full_steps as f64 } else { 1.0 },
    };
    replay
}

impl Unit<'_> {
    /// Routes a request and returns its rank.
    fn admit(
        &mut self,
        policy: &dyn Policy,
        sequence: u64,
        job: &Job,
        options: &EvalOptions,
        scratch: &mut Scratch,
    ) -> Option<u16> {
        let (share, blocks) = (job.share.as_deref(), &job.blocks);
        let prompt = Prompt { tokens: job.prompt_tokens, share, blocks, reports: true, ..Prompt::default() };
        let decision = self.router.decide(policy, &prompt, sequence, None, scratch)?;
        let rank = decision.choice.rank;
        let cached = self.router.prefixes().map_or(0, |prefixes| {
            let mut held = vec![0; self.held.len()];
            prefixes.cached(blocks, &mut held);
            held[usize::from(rank)]
        });
        self.cached += cached;
        self.router.assign(&decision, blocks, true);
        // The last prompt token is always computed, since it produces the first new one.
        let pending = job.prompt_tokens.saturating_sub(cached).max(1);
        self.running.push(Sequence { rank, work: decision.work, pending, generated: 0, answer: answer(job, options) });
        Some(rank)
    }

    /// Runs one step on all ranks; returns each rank's number of sequences.
    fn step(&mut self, step_tokens: u64) -> Vec<f64> {
        let accounts = self.router.accounts();
        let mut counts = vec![0.0; self.held.len()];
        let mut room = vec![step_tokens; counts.len()];
        for sequence in &mut self.running {
            let rank = usize::from(sequence.rank);
            counts[rank] += 1.0;
            let computed = sequence.pending.min(room[rank]);
            room[rank] -= computed;
            sequence.pending -= computed;
            self.prefill[rank] += computed as f64;
            if sequence.pending > 0 {
                continue;
            }
            if sequence.generated == 0 {
                accounts.computed(sequence.rank, &mut sequence.work);
            }
            sequence.generated += 1;
            self.decode[rank] += 1.0;
            if sequence.generated == sequence.answer {
                accounts.release(sequence.rank, sequence.work);
                accounts.generated(sequence.answer);
            }
        }
        self.running.retain(|sequence| sequence.generated < sequence.answer);
        self.held.iter_mut().zip(&counts).for_each(|(held, count)| *held += count);
        counts
    }
}

/// Returns the number of tokens that a request generates.
fn answer(job: &Job, options: &EvalOptions) -> u64 {
    match job.tokens.saturating_sub(job.prompt_tokens) {
        0 => options.output_tokens,
        recorded => recorded,
    }
}

fn max_over_mean(loads: &[f64]) -> f64 {
    spread_of(loads).map_or(1.0, |spread| spread.max_over_mean)
}

#[cfg(test)]
mod tests {
    use semmoe_routing::policy;

    use super::*;

    #[test]
    fn every_step_counts() {
        let job = |tokens| Job { prompt_tokens: tokens, tokens, ..Job::default() };
        let options = EvalOptions { concurrency: 2, output_tokens: 2, step_tokens: Some(10), ..EvalOptions::default() };
        let router = Router::new(2, &[], &options.routing, &options.prefix);
        let replay = replay(&router, policy("round_robin").unwrap().as_ref(), &[job(15), job(5), job(5)], &options);
        assert_eq!((replay.ranks, replay.cached), (vec![0, 1, 0], 0));
        // The first request arrives alone and takes three steps; the second arrives in the second step and takes two,
        // as does the third.
        let even = Evenness { prefill_tokens: 1.6, decode_tokens: 4.0 / 3.0, sequence_steps: 10.0 / 7.0, running: 1.0 };
        assert_eq!(replay.evenness, even);
        assert_eq!(router.accounts().expected_output(None), 2);
        for load in router.accounts().loads() {
            assert_eq!((load.in_flight_sequences, load.in_flight_tokens, load.pending_tokens), (0, 0, 0));
        }
    }
}
