//! A recorded request, prepared for the replay of policies.

use semmoe_routing::block_hashes;
use semmoe_tables::{Score, Tables, TokenId, TraceRequest};

use crate::input::EvalOptions;
use crate::judge::hosts::{Hosts, indices};

/// A request with all the data that the replay needs.
#[derive(Default)]
pub(crate) struct Job {
    /// Prompt tokens, the only ones that a policy sees.
    pub(crate) prompt_tokens: u64,
    /// Prompt and output tokens: the work of a rank.
    pub(crate) tokens: u64,
    /// Tokens with a known route.
    pub(crate) known_tokens: u64,
    /// Hashes of the prompt's full blocks.
    pub(crate) blocks: Vec<u64>,
    /// Expected local share per rank; `None` without evidence.
    pub(crate) share: Option<Vec<f64>>,
    /// [ranks] activations that would be local on each rank.
    pub(crate) local: Vec<u64>,
    /// [ranks] remote ranks that the request's tokens would be sent to from each rank, summed over all layers.
    pub(crate) remote: Vec<u64>,
    /// Number of routes: tokens times layers.
    pub(crate) routes: u64,
    pub(crate) activations: u64,
}

/// Scores a request with T as the gateway does, and counts its local activations by rank.
pub(crate) fn job(tables: &Tables, hosts: &Hosts, request: TraceRequest<'_>, options: &EvalOptions) -> Job {
    let tokens = request.token_ids();
    let prompt = &tokens[..request.prompt_len()];
    let rows = prompt.iter().filter_map(|&id| tables.token_row(TokenId::new(id)));
    let mut job = Job {
        prompt_tokens: prompt.len() as u64,
        tokens: tokens.len() as u64,
        known_tokens: 0,
        blocks: Vec::new(),
        share: Score::of_rows(hosts.places, rows).share(),
        local: vec![0; hosts.places],
        remote: vec![0; hosts.places],
        routes: 0,
        activations: 0,
    };
    let mut seen = Vec::new();
    block_hashes(prompt, options.prefix.block_tokens, &mut job.blocks);
    for position in 0..tokens.len() {
        let mut known = false;
        for (layer, route) in request.routes(position) {
            known = true;
            job.routes += 1;
            for expert in route.experts() {
                job.activations += 1;
                for &place in hosts.of(hosts.column(layer.index(), expert.index())) {
                    job.local[usize::from(place)] += 1;
                }
            }
            for (place, remote) in job.remote.iter_mut().enumerate() {
                *remote += hosts.sent_to(layer.index(), indices(route), place, &mut seen) as u64;
            }
        }
        job.known_tokens += u64::from(known);
    }
    job
}
