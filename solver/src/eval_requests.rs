//! Evaluation with requests as units: routing policies simulated on a trace, and the batch optimum.

use std::collections::BTreeMap;

use semmoe_routing::{Accounts, Policy, Request, policy_with};
use semmoe_tables::{LayerIdx, Tables, Trace, TraceRequest};

use crate::balance::spread;
use crate::error::SolveError;
use crate::evaluate::{Judged, RequestFigures};
use crate::hosts::Hosts;
use crate::options::EvalOptions;
use crate::report::Unit;
use crate::score::mean_share;
use crate::tally::Tally;
use crate::transport::Transport;
use crate::unit_step::{mass_capacity, to_profit};
use crate::whole::{MOST_ROUNDS, whole};

/// The policy whose assignment `lar` and its companions describe.
const HEADLINE: &str = "affinity";

/// Requests that [`Evaluation::windowed`](crate::Evaluation::windowed) assigns together.
pub const WINDOW: usize = 32;

/// One request with everything that the simulation needs.
struct Job {
    /// Prompt tokens: what a policy is told.
    prompt_tokens: u64,
    /// All tokens: what a rank has to do.
    tokens: u64,
    /// Tokens with a known route.
    known_tokens: u64,
    /// Expected local share per rank; `None` without evidence.
    share: Option<Vec<f64>>,
    /// [ranks] activations that are local on each.
    local: Vec<u64>,
    activations: u64,
}

/// Judges the policies and the batch optimum.
pub(crate) fn judge(
    tables: &Tables,
    hosts: &Hosts,
    trace: &Trace,
    options: &EvalOptions,
) -> Result<Judged, SolveError> {
    let jobs: Vec<Job> = trace.iter().map(|request| job(tables, hosts, request)).collect();
    let mut policies = BTreeMap::new();
    for name in &options.policies {
        let ranks = simulate(tables, &jobs, policy_with(name, &options.routing)?.as_ref(), options);
        policies.insert(name.clone(), figures(&jobs, &ranks, hosts.places));
    }
    let ranks = simulate(tables, &jobs, policy_with(HEADLINE, &options.routing)?.as_ref(), options);
    let mut tally = Tally::new(hosts);
    for (request, &rank) in trace.iter().zip(&ranks) {
        add_request(&mut tally, hosts, request, rank);
    }
    Ok(Judged {
        unit: Unit::Request,
        tally,
        token_imbalance: figures(&jobs, &ranks, hosts.places).request_imbalance,
        tokens: jobs.iter().map(|job| job.known_tokens).sum(),
        policies: Some(policies),
        argmax: Some(figures(&jobs, &argmax(&jobs), hosts.places)),
        windowed: Some(figures(&jobs, &windowed(&jobs, hosts.places, options.token_margin), hosts.places)),
        batch_predicted: Some(batch(&jobs, hosts.places, options.token_margin, |job, rank| {
            Some(job.share.as_ref()?[rank])
        })),
        batch_optimum: Some(batch(&jobs, hosts.places, options.token_margin, |job, rank| {
            Some(job.local[rank] as f64 / job.known_tokens as f64)
        })),
    })
}

fn job(tables: &Tables, hosts: &Hosts, request: TraceRequest<'_>) -> Job {
    let tokens = request.token_ids();
    let prompt = &tokens[..request.prompt_len()];
    let mut job = Job {
        prompt_tokens: prompt.len() as u64,
        tokens: tokens.len() as u64,
        known_tokens: 0,
        share: mean_share(prompt, hosts.places, |token| tables.token_row(token)),
        local: vec![0; hosts.places],
        activations: 0,
    };
    for position in 0..tokens.len() {
        let mut known = false;
        for layer in 0..hosts.layers {
            let Some(route) = request.route(position, LayerIdx::new(layer as u16)) else { continue };
            known = true;
            for expert in route.experts() {
                job.activations += 1;
                for &place in hosts.of(hosts.column(layer, expert.index())) {
                    job.local[usize::from(place)] += 1;
                }
            }
        }
        job.known_tokens += u64::from(known);
    }
    job
}

fn add_request(tally: &mut Tally, hosts: &Hosts, request: TraceRequest<'_>, rank: usize) {
    for position in 0..request.token_ids().len() {
        for layer in 0..hosts.layers {
            if let Some(route) = request.route(position, LayerIdx::new(layer as u16)) {
                tally.add_route(hosts, layer, route.experts().map(|expert| expert.index()), Some(rank));
            }
        }
    }
}

/// The rank of each request under a policy, in the order of the trace.
fn simulate(tables: &Tables, jobs: &[Job], policy: &dyn Policy, options: &EvalOptions) -> Vec<usize> {
    let mut accounts = Accounts::new(tables.dp_ranks(), tables.price(), &options.routing);
    let mut ranks: Vec<u16> = Vec::with_capacity(jobs.len());
    for (sequence, job) in jobs.iter().enumerate() {
        if let Some(done) = sequence.checked_sub(options.concurrency) {
            accounts.release(ranks[done], jobs[done].prompt_tokens);
        }
        let request = Request { tokens: job.prompt_tokens, share: job.share.as_deref() };
        let choice = policy.choose(&request, accounts.loads(), accounts.prices(), sequence as u64);
        // All ranks are available here, so that there is a choice.
        let rank = choice.map_or(0, |choice| choice.rank);
        accounts.assign(rank, job.prompt_tokens);
        ranks.push(rank);
    }
    ranks.into_iter().map(usize::from).collect()
}

/// The rank of each request's greatest share; requests without evidence in turn.
fn argmax(jobs: &[Job]) -> Vec<usize> {
    let best =
        |share: &[f64]| (1..share.len()).fold(0, |best, rank| if share[rank] > share[best] { rank } else { best });
    let places = |job: &Job| job.local.len();
    let of_job = |(sequence, job): (usize, &Job)| job.share.as_deref().map_or(sequence % places(job), best);
    jobs.iter().enumerate().map(of_job).collect()
}

/// Windows of requests, each assigned exactly by share into what the ranks have left of (1 + margin) of the mean.
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
        for (&rank, mass) in whole(&problem, &problem.solve(None), MOST_ROUNDS).label.iter().zip(&mass) {
            loads[usize::from(rank)] += mass;
            ranks.push(usize::from(rank));
        }
    }
    ranks
}

/// What is left of each capacity, enlarged evenly where an earlier excess leaves too little for `needed`.
fn room(loads: &[u64], capacity: &[u64], needed: u64) -> Vec<u64> {
    let mut room: Vec<u64> =
        capacity.iter().zip(loads).map(|(capacity, load)| capacity.saturating_sub(*load)).collect();
    let missing = needed.saturating_sub(room.iter().sum());
    let each = missing.div_ceil(room.len() as u64);
    room.iter_mut().for_each(|room| *room += each);
    room
}

fn figures(jobs: &[Job], ranks: &[usize], places: usize) -> RequestFigures {
    let mut loads = vec![0; places];
    let (mut local, mut activations) = (0, 0);
    for (job, &rank) in jobs.iter().zip(ranks) {
        loads[rank] += job.tokens;
        local += job.local[rank];
        activations += job.activations;
    }
    RequestFigures { request_lar: local as f64 / activations as f64, request_imbalance: max_over_mean(&loads) }
}

fn max_over_mean(loads: &[u64]) -> f64 {
    spread(loads).map_or(1.0, |spread| spread.max_over_mean)
}

/// All requests at once, assigned exactly by `share` (per rank), then whole; those without a share lie where there is
/// room.
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
    let plan = whole(&problem, &problem.solve(None), MOST_ROUNDS);
    let local: u64 = known.iter().zip(&plan.label).map(|(job, &rank)| job.local[usize::from(rank)]).sum();
    let activations: u64 = known.iter().map(|job| job.activations).sum();
    RequestFigures {
        request_lar: local as f64 / activations as f64,
        request_imbalance: max_over_mean(&plan.loads(&mass, places)),
    }
}
