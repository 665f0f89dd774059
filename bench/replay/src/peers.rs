//! Cost functions of other routers, for comparison. They see the loads and caches that ours sees, without their
//! transport.

use semmoe_routing::{Choice, Needs, Policy, RankLoad, Request};

use crate::arrivals::BLOCK_TOKENS;

/// Takes the rank with the lowest cost; ties rotate.
struct Peer {
    name: &'static str,
    /// Cost of each rank; the lowest wins.
    cost: fn(&Request<'_>, &[RankLoad]) -> Vec<f64>,
}

const PEERS: [Peer; 3] = [
    Peer { name: "dynamo", cost: dynamo },
    Peer { name: "llm_d", cost: llm_d },
    Peer { name: "sglang_cache_aware", cost: cache_aware },
];

/// The peer of that name.
pub(crate) fn policy(name: &str) -> Option<Box<dyn Policy>> {
    Some(Box::new(PEERS.into_iter().find(|peer| peer.name == name)?))
}

impl Policy for Peer {
    fn name(&self) -> &'static str {
        self.name
    }

    fn needs(&self) -> Needs {
        Needs { cached: true, ..Needs::default() }
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice> {
        let costs = (self.cost)(request, loads);
        let turn = |rank: usize| (rank + loads.len() - sequence as usize % loads.len()) % loads.len();
        let best = (0..loads.len()).min_by(|&a, &b| costs[a].total_cmp(&costs[b]).then(turn(a).cmp(&turn(b))))?;
        let share = request.share.and_then(|share| share.get(best).copied());
        Some(Choice { rank: best as u16, expected_share: share, capped: false })
    }
}

/// Dynamo's KV router: `overlap_score_weight` (1) times the blocks to prefill, including waiting ones, plus the blocks
/// in use; temperature 0.
fn dynamo(request: &Request<'_>, loads: &[RankLoad]) -> Vec<f64> {
    let cost = |(rank, load): (usize, &RankLoad)| {
        let to_compute = load.pending_tokens + request.uncached(rank, loads.len());
        (to_compute + load.in_flight_tokens + request.tokens) as f64 / f64::from(BLOCK_TOKENS)
    };
    loads.iter().enumerate().map(cost).collect()
}

/// llm-d's default scorers: 3 times the cached share of the prompt, 2 times the queue length scaled between the
/// shortest and the longest, 2 times the free share of KV memory.
fn llm_d(request: &Request<'_>, loads: &[RankLoad]) -> Vec<f64> {
    let queue = |load: &RankLoad| load.pending_tokens as f64;
    let least = loads.iter().map(queue).fold(f64::INFINITY, f64::min);
    let most = loads.iter().map(queue).fold(0.0, f64::max);
    let memory = loads.iter().map(|load| load.in_flight_tokens).max().unwrap_or(0).max(1) as f64;
    let cost = |(rank, load): (usize, &RankLoad)| {
        let cached = 1.0 - request.uncached(rank, loads.len()) as f64 / request.tokens.max(1) as f64;
        let idle = if most > least { (most - queue(load)) / (most - least) } else { 1.0 };
        -(3.0 * cached + 2.0 * idle - 2.0 * load.in_flight_tokens as f64 / memory)
    };
    loads.iter().enumerate().map(cost).collect()
}

/// SGLang's router, `cache_aware`: the shortest queue if the longest exceeds it by 64 requests and by half; otherwise
/// the longest match if it covers more than 0.3 of the prompt, or the rank with the fewest assigned tokens.
fn cache_aware(request: &Request<'_>, loads: &[RankLoad]) -> Vec<f64> {
    let requests = || loads.iter().map(|load| load.in_flight_requests);
    let (least, most) = (requests().min().unwrap_or(0), requests().max().unwrap_or(0));
    if most > least + 64 && f64::from(most) > 1.5 * f64::from(least) {
        return requests().map(f64::from).collect();
    }
    let matched = |rank: usize| request.tokens.max(1) as f64 - request.uncached(rank, loads.len()) as f64;
    let longest = (0..loads.len()).map(matched).fold(0.0, f64::max);
    match longest > 0.3 * request.tokens as f64 {
        true => (0..loads.len()).map(|rank| -matched(rank)).collect(),
        false => loads.iter().map(|load| load.recent_tokens).collect(),
    }
}
