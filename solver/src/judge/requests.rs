//! Evaluation with requests as units: routing policies simulated on a trace, and the batch optimum.

use std::collections::BTreeMap;

use semmoe_routing::{Router, TablePrice, policy_with};
use semmoe_tables::{Attention, Tables, Trace};

use crate::input::{EvalOptions, Margins, SolveError, Unit};
use crate::judge::balance::spread;
use crate::judge::calibration::{Reliability, ReliabilitySum};
use crate::judge::evaluate::{Evaluation, OfflineBound, RequestFigures};
use crate::judge::hosts::Hosts;
use crate::judge::job::{Job, job};
use crate::judge::replay::{Replay, replay};
use crate::judge::tally::Tally;
use crate::judge::tokens::likeliest;
use crate::step::{Division, MAX_RANKS, MAX_ROUNDS, Requests, Transport, mass_capacity, to_profit, whole};

/// The policy whose assignment `lar` and related figures describe.
const HEADLINE: &str = "affinity";

/// Number of requests that [`Evaluation::windowed`](crate::Evaluation::windowed) assigns together.
pub const WINDOW: usize = 32;

/// Number of consecutive requests over which [`RequestFigures::burst_imbalance`] measures the load.
pub const BURST: usize = 64;

/// Evaluates the policies and the batch optimum.
pub(crate) fn judge(
    tables: &Tables,
    hosts: &Hosts,
    trace: &Trace,
    options: &EvalOptions,
) -> Result<Evaluation, SolveError> {
    let jobs: Vec<Job> = trace.iter().map(|request| job(tables, hosts, request, options)).collect();
    let bound = (hosts.places <= MAX_RANKS).then(|| bound(&jobs, hosts.places, options.bound));
    let random = jobs.iter().flat_map(|job| &job.local).sum::<u64>() as f64
        / (hosts.places as u64 * jobs.iter().map(|job| job.activations).sum::<u64>()) as f64;
    let prices = TablePrice::of_ranks(tables.dp_ranks(), tables.price(), tables.sequence_price());
    let run = |name: &str| -> Result<Replay, SolveError> {
        let router = Router::new(tables.dp_ranks(), &prices, &options.routing, &options.prefix);
        Ok(replay(&router, policy_with(name, &options.routing)?.as_ref(), &jobs, options))
    };
    let prompts = jobs.iter().map(|job| job.prompt_tokens).sum::<u64>().max(1) as f64;
    let of_policy = |replay: &Replay| {
        let placed = figures(&jobs, &replay.ranks, hosts.places);
        RequestFigures {
            cached_share: (options.prefix.blocks_per_rank > 0).then(|| replay.cached as f64 / prompts),
            evenness: Some(replay.evenness),
            of_bound: bound
                .map(|bound| bound.lar_by_t - random)
                .filter(|gain| *gain > 0.0)
                .map(|gain| (placed.request_lar - random) / gain),
            ..placed
        }
    };
    let replays = options.policies.iter().map(|name| Ok((name.clone(), run(name)?)));
    let replays = replays.collect::<Result<BTreeMap<_, _>, SolveError>>()?;
    let policies = replays.iter().map(|(name, replay)| (name.clone(), of_policy(replay))).collect();
    let headline = replays.into_iter().find(|(name, _)| name == HEADLINE);
    let ranks = headline.map_or_else(|| run(HEADLINE), |(_, replay)| Ok(replay))?.ranks;
    let mut tally = Tally::new(hosts);
    for (request, &rank) in trace.iter().zip(&ranks) {
        for position in 0..request.token_ids().len() {
            for (layer, route) in request.routes(position) {
                tally.add_route(hosts, layer.index(), route, Some(rank));
            }
        }
    }
    let token_imbalance = figures(&jobs, &ranks, hosts.places).request_imbalance;
    let tokens = jobs.iter().map(|job| job.known_tokens).sum();
    Ok(Evaluation {
        policies: Some(policies),
        argmax: Some(figures(&jobs, &argmax(&jobs), hosts.places)),
        windowed: Some(figures(&jobs, &windowed(&jobs, hosts.places, options.token_margin), hosts.places)),
        batch_predicted: Some(batch(&jobs, hosts.places, options.token_margin, |job, rank| {
            Some(job.share.as_ref()?[rank])
        })),
        batch_optimum: Some(batch(&jobs, hosts.places, options.token_margin, |job, rank| {
            Some(job.local[rank] as f64 / job.known_tokens as f64)
        })),
        bound,
        ..Evaluation::new(tables, hosts, Unit::Request, &tally, token_imbalance, tokens)
    })
}

/// Compares the mean share of a prompt on its likeliest rank with the share of the request that is local there. Skips
/// requests without evidence in T. Returns `None` if none is left, and with attention tp, where T has no per-rank
/// shares.
pub(crate) fn request_reliability(
    tables: &Tables,
    hosts: &Hosts,
    trace: &Trace,
    options: &EvalOptions,
) -> Option<Reliability> {
    if tables.attention() == Attention::Tp {
        return None;
    }
    let mut sum = ReliabilitySum::default();
    for job in trace.iter().map(|request| job(tables, hosts, request, options)).filter(|job| job.activations > 0) {
        if let Some(share) = &job.share {
            let best = likeliest(share);
            sum.add(share[best], job.local[best] as f64 / job.activations as f64, 1);
        }
    }
    sum.finish()
}

/// Returns the rank with each request's largest share; requests without evidence are assigned round-robin.
fn argmax(jobs: &[Job]) -> Vec<usize> {
    let places = |job: &Job| job.local.len();
    let of_job = |(sequence, job): (usize, &Job)| job.share.as_deref().map_or(sequence % places(job), likeliest);
    jobs.iter().enumerate().map(of_job).collect()
}

/// Assigns each window of requests exactly by share. Each rank's capacity is (1 + `token_margin`) times the mean tokens
/// so far, minus its load.
fn windowed(jobs: &[Job], places: usize, token_margin: f64) -> Vec<usize> {
    let mut loads = vec![0u64; places];
    let mut ranks = Vec::with_capacity(jobs.len());
    for window in jobs.chunks(WINDOW) {
        let mass: Vec<u64> = window.iter().map(|job| job.prompt_tokens.max(1)).collect();
        let profit: Vec<i64> = window
            .iter()
            .flat_map(|job| (0..places).map(move |rank| job.share.as_ref().map_or(0, |share| to_profit(share[rank]))))
            .collect();
        let total = loads.iter().sum::<u64>() + mass.iter().sum::<u64>();
        let capacity = room(&loads, &mass_capacity(total, places, token_margin), mass.iter().sum());
        let problem = Transport { mass: &mass, profit: &profit, capacity: &capacity };
        for (&rank, mass) in whole(&problem, &problem.solve(None), MAX_ROUNDS).label.iter().zip(&mass) {
            loads[usize::from(rank)] += mass;
            ranks.push(usize::from(rank));
        }
    }
    ranks
}

/// Returns each rank's remaining capacity, raised evenly if earlier overruns leave too little for `needed`.
fn room(loads: &[u64], capacity: &[u64], needed: u64) -> Vec<u64> {
    let mut room: Vec<u64> =
        capacity.iter().zip(loads).map(|(capacity, load)| capacity.saturating_sub(*load)).collect();
    let missing = needed.saturating_sub(room.iter().sum());
    let each = missing.div_ceil(room.len() as u64);
    room.iter_mut().for_each(|room| *room += each);
    room
}

fn figures(jobs: &[Job], ranks: &[usize], places: usize) -> RequestFigures {
    let jobs: Vec<&Job> = jobs.iter().collect();
    let tokens: Vec<u64> = jobs.iter().map(|job| job.tokens).collect();
    let mut loads = vec![0; places];
    for (tokens, &rank) in tokens.iter().zip(ranks) {
        loads[rank] += tokens;
    }
    of_jobs(&jobs, ranks, &loads, &tokens)
}

/// Computes the figures of an assignment. `tokens` are the jobs' tokens that count as load, `loads` their sums by rank.
fn of_jobs(jobs: &[&Job], ranks: &[usize], loads: &[u64], tokens: &[u64]) -> RequestFigures {
    let (mut local, mut activations, mut remote, mut routes) = (0, 0, 0, 0);
    for (job, &rank) in jobs.iter().zip(ranks) {
        local += job.local[rank];
        activations += job.activations;
        remote += job.remote[rank];
        routes += job.routes;
    }
    let (burst_imbalance, burst_imbalance_mean) = bursts(ranks, tokens, loads.len());
    RequestFigures {
        request_lar: local as f64 / activations as f64,
        remote_ranks_per_token: remote as f64 / routes as f64,
        request_imbalance: max_over_mean(loads),
        burst_imbalance,
        burst_imbalance_mean,
        ..RequestFigures::default()
    }
}

/// For each window of [`BURST`] consecutive requests (or all, if there are fewer), takes the ratio of the fullest
/// rank's tokens to the mean over ranks. Returns the maximum and the mean over all windows.
fn bursts(ranks: &[usize], tokens: &[u64], places: usize) -> (f64, f64) {
    let mut loads = vec![0; places];
    let (mut most, mut sum, mut count) = (1.0f64, 0.0, 0u32);
    for (at, (&rank, &of_request)) in ranks.iter().zip(tokens).enumerate() {
        loads[rank] += of_request;
        if let Some(left) = at.checked_sub(BURST) {
            loads[ranks[left]] -= tokens[left];
        }
        if at + 1 >= BURST.min(ranks.len()) {
            let imbalance = max_over_mean(&loads);
            most = most.max(imbalance);
            sum += imbalance;
            count += 1;
        }
    }
    (most, if count > 0 { sum / f64::from(count) } else { 1.0 })
}

fn max_over_mean(loads: &[u64]) -> f64 {
    spread(loads).map_or(1.0, |spread| spread.max_over_mean)
}

/// Assigns all requests at once, exactly by `share` (per rank), then makes split requests whole. Requests without a
/// share are placed where there is room.
fn batch(jobs: &[Job], places: usize, token_margin: f64, share: impl Fn(&Job, usize) -> Option<f64>) -> RequestFigures {
    let known: Vec<&Job> = jobs.iter().filter(|job| job.known_tokens > 0).collect();
    let mass: Vec<u64> = known.iter().map(|job| job.known_tokens).collect();
    let profit: Vec<i64> = known
        .iter()
        .flat_map(|&job| (0..places).map(move |place| (job, place)))
        .map(|(job, place)| share(job, place).map_or(0, to_profit))
        .collect();
    let capacity = mass_capacity(mass.iter().sum(), places, token_margin);
    let problem = Transport { mass: &mass, profit: &profit, capacity: &capacity };
    let plan = whole(&problem, &problem.solve(None), MAX_ROUNDS);
    let ranks: Vec<usize> = plan.label.iter().map(|&rank| usize::from(rank)).collect();
    of_jobs(&known, &ranks, &plan.loads(&mass, places), &mass)
}

/// Computes the bounds from the divisions by true routing and by T's shares.
fn bound(jobs: &[Job], places: usize, margins: Margins) -> OfflineBound {
    let tokens: Vec<f64> = jobs.iter().map(|job| job.tokens as f64).collect();
    let local: Vec<f64> = jobs.iter().flat_map(|job| job.local.iter().map(|&local| local as f64)).collect();
    let of_share = |job: &Job, rank: usize| job.share.as_ref().map_or(1.0 / places as f64, |share| share[rank]);
    let expected: Vec<f64> =
        jobs.iter().flat_map(|job| (0..places).map(move |rank| job.activations as f64 * of_share(job, rank))).collect();
    let divide = |value| Requests { tokens: &tokens, value, ranks: places }.divide(margins);
    let (by_routing, by_t) = (divide(&local), divide(&expected));
    let activations: u64 = jobs.iter().map(|job| job.activations).sum();
    let reached: f64 = by_t.parts.iter().zip(&local).map(|(part, local)| part * local).sum();
    let gap = |found: &Division| 1.0 - found.primal / found.dual;
    OfflineBound {
        margins,
        lar: by_routing.primal / activations as f64,
        lar_by_t: reached / activations as f64,
        gap: gap(&by_routing).max(gap(&by_t)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_burst_counts() {
        // Rank 1 gets nothing for BURST requests, then everything.
        let ranks: Vec<usize> = (0..2 * BURST).map(|at| usize::from(at >= BURST)).collect();
        let (most, mean) = bursts(&ranks, &vec![3; 2 * BURST], 2);
        assert_eq!(most, 2.0);
        let of = |at: usize| 2.0 * at.max(BURST - at) as f64 / BURST as f64;
        let expected = (0..=BURST).map(of).sum::<f64>() / (BURST + 1) as f64;
        assert!((mean - expected).abs() < 1e-12, "{mean} {expected}");
        assert_eq!(bursts(&[0, 1, 1], &[4, 1, 1], 2), (4.0 / 3.0, 4.0 / 3.0));
        assert_eq!(bursts(&[], &[], 2), (1.0, 1.0));
    }
}
