//! What a policy sees and what it answers.

use serde::Serialize;

/// One request to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Prompt tokens. Zero counts as one.
    pub tokens: u64,
    /// Expected local share per rank: the mean over the prompt's tokens of their rows of T, in `0..=1`.
    /// `None`, a length other than the number of ranks, or a value that is not finite: no evidence.
    pub share: Option<&'a [f64]>,
}

/// Load of one rank at the moment of choosing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankLoad {
    /// Prompt tokens of the requests in flight.
    pub in_flight_tokens: u64,
    /// Requests in flight.
    pub in_flight_requests: u32,
    /// Tokens assigned lately, each halved for every half-life of tokens assigned after it.
    pub recent_tokens: f64,
    /// Requests assigned lately, counted and halved alike; over all ranks they give the mean request.
    pub recent_requests: f64,
    /// Requests assigned so far; a rank that was away comes back with the least count of the others.
    pub assigned_requests: u64,
    /// Whether the rank may be chosen.
    pub available: bool,
}

impl RankLoad {
    /// A rank that is available and has nothing to do.
    pub const IDLE: RankLoad = RankLoad {
        in_flight_tokens: 0,
        in_flight_requests: 0,
        recent_tokens: 0.0,
        recent_requests: 0.0,
        assigned_requests: 0,
        available: true,
    };

    /// Tokens that count against the rank when only load decides: recent ones, and again those still in flight.
    pub(crate) fn burden(&self) -> f64 {
        self.recent_tokens + self.in_flight_tokens as f64
    }
}

/// The rank that a policy picked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Index of the rank, below the number of loads given.
    pub rank: u16,
    /// Expected local share of the request on that rank; `None` without evidence.
    pub expected_share: Option<f64>,
    /// Whether the best rank was over the load cap, so that another one was taken.
    pub capped: bool,
}

impl Choice {
    /// The rank at `index`, with the request's share on it; `None` beyond the ranks that file formats can name.
    pub(crate) fn at(index: usize, request: &Request<'_>, capped: bool) -> Option<Choice> {
        let expected_share = request.share.and_then(|share| share.get(index).copied());
        Some(Choice { rank: u16::try_from(index).ok()?, expected_share, capped })
    }
}

/// Chooses a rank for a request. Implementations hold settings only: the same arguments give the same answer.
pub trait Policy: Send + Sync {
    /// The name in the registry, in configuration files, metrics and response headers.
    fn name(&self) -> &'static str;

    /// Whether [`Request::share`] is looked at; a caller need not score prompts for a policy that ignores it.
    fn needs_share(&self) -> bool;

    /// Picks among the available ranks; `None` if there is none.
    ///
    /// `prices` are in units of share, one per rank; missing ones count as zero. `sequence` counts the requests and
    /// decides ties, so that equal ranks are taken in turn.
    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], prices: &[f64], sequence: u64) -> Option<Choice>;
}

/// Tokens of the mean recent request; `None` before the first one.
pub(crate) fn mean_request(loads: &[RankLoad]) -> Option<f64> {
    let requests: f64 = loads.iter().map(|load| load.recent_requests).sum();
    let tokens: f64 = loads.iter().map(|load| load.recent_tokens).sum();
    (requests > 0.0).then(|| tokens / requests)
}

/// Steps from the rotating start of `sequence` to `index` among `ranks`: the last word on ties.
pub(crate) fn turn(index: usize, ranks: usize, sequence: u64) -> usize {
    let start = (sequence % ranks as u64) as usize;
    (index + ranks - start) % ranks
}
