//! Input and output of a policy.

use serde::Serialize;

use crate::accounts::MAX_SEQUENCES;

/// One request to be placed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    /// Prompt tokens. Zero counts as one.
    pub tokens: u64,
    /// Tokens that it is expected to generate, all its sequences together.
    pub output: u64,
    /// Sequences that it runs as. Zero counts as one.
    pub sequences: u32,
    /// Expected local share per rank: the mean over the prompt's tokens of their rows of T, in `0..=1`.
    /// `None`, a length other than the number of ranks, or a value that is not finite: no evidence.
    pub share: Option<&'a [f64]>,
    /// Leading prompt tokens per rank that the rank need not compute again. `None`, or another length: none on any.
    pub cached: Option<&'a [u64]>,
    /// Hash of the session's name.
    pub key: Option<u64>,
    /// A rank ran this session before, and is among [`cached`](Self::cached): shares do not move it.
    pub settled: bool,
}

impl Request<'_> {
    /// Prompt tokens as they are counted, at least one.
    pub(crate) fn tokens(&self) -> f64 {
        self.tokens.max(1) as f64
    }

    /// Sequences as they are counted, at least one.
    pub(crate) fn sequences(&self) -> f64 {
        self.sequences.clamp(1, MAX_SEQUENCES).into()
    }

    /// Prompt tokens that the rank would have to compute. The last token always is: it gives the first new one.
    pub fn uncached(&self, rank: usize, ranks: usize) -> u64 {
        self.missing(rank, ranks).max(1)
    }

    fn missing(&self, rank: usize, ranks: usize) -> u64 {
        let cached = self.cached.filter(|cached| cached.len() == ranks).map_or(0, |cached| cached[rank]);
        self.tokens.max(1).saturating_sub(cached)
    }

    /// [`uncached`](Self::uncached) as the cost counts it: half a token on a rank that holds the whole prompt, so that
    /// even a session of one-token prompts stays there.
    pub(crate) fn work(&self, rank: usize, ranks: usize) -> f64 {
        (self.missing(rank, ranks) as f64).max(0.5)
    }
}

/// State of one rank at the moment of choosing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankLoad {
    /// Keys and values that the requests in flight hold or will hold, in tokens: prompts, and answers as far as they
    /// are expected.
    pub in_flight_tokens: u64,
    /// Requests in flight.
    pub in_flight_requests: u32,
    /// Their sequences.
    pub in_flight_sequences: u64,
    /// Prompt tokens that are still to be computed, as far as is known: those of streaming requests that sent nothing
    /// yet.
    pub pending_tokens: u64,
    /// Tokens among the last requests assigned to any rank, [`Settings::memory`](crate::Settings::memory) for each
    /// rank.
    pub recent_tokens: f64,
    /// Requests among them.
    pub recent_requests: f64,
    /// Requests assigned so far; a rank that was away comes back with the least count of the others.
    pub assigned_requests: u64,
    /// In units of share: what a token costs more here than elsewhere, as the rank is wanted more.
    pub price: f64,
    /// In units of share of a mean-sized request: what a sequence costs more here than elsewhere.
    pub sequence_price: f64,
    /// Ranks of one unit step together, and are kept even over time. Units are as fast as they are, and get what they
    /// get done: between them only what is in flight counts.
    pub unit: u16,
    /// Whether the rank may be chosen.
    pub available: bool,
    /// Whether the counts of what is in flight are to be believed. Where they are not, they are at least the mean of
    /// the ranks whose are: an unknown load is not an idle one.
    pub known: bool,
}

impl RankLoad {
    /// A rank that is available and has nothing to do.
    pub const IDLE: RankLoad = RankLoad {
        in_flight_tokens: 0,
        in_flight_requests: 0,
        in_flight_sequences: 0,
        pending_tokens: 0,
        recent_tokens: 0.0,
        recent_requests: 0.0,
        assigned_requests: 0,
        price: 0.0,
        sequence_price: 0.0,
        unit: 0,
        available: true,
        known: true,
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

/// The inputs a policy reads. The caller need not compute any other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// [`Request::share`]: the prompt must be tokenized and scored.
    pub share: bool,
    /// [`Request::cached`]: the prompt must be tokenized and looked up.
    pub cached: bool,
    /// [`Request::key`].
    pub key: bool,
}

/// Chooses a rank for a request. Implementations hold settings only: the same arguments give the same answer.
pub trait Policy: Send + Sync {
    /// The name in the registry, in configuration files, metrics and response headers.
    fn name(&self) -> &'static str;

    /// The inputs it reads; loads alone by default.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Picks among the available ranks; `None` if there is none.
    ///
    /// `sequence` counts the requests and decides ties, so that equal ranks are taken in turn.
    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice>;

    /// Name of the policy that a request was really placed by: another one where this policy only watches.
    fn acting_name(&self) -> &'static str {
        self.name()
    }

    /// A policy whose choices are to be compared with this one's and not carried out.
    fn watched(&self) -> Option<&dyn Policy> {
        None
    }
}

/// The ranks that may be chosen, with their indices.
pub(crate) fn available(loads: &[RankLoad]) -> impl Iterator<Item = (usize, &RankLoad)> {
    loads.iter().enumerate().filter(|(_, load)| load.available)
}

/// How many ranks come before the one at an index in this round, which begins with another rank for each request: the
/// last word on ties.
pub(crate) fn turn(ranks: usize, sequence: u64) -> impl Fn(usize) -> usize {
    let first = sequence.checked_rem(ranks as u64).unwrap_or(0) as usize;
    move |index| if index >= first { index - first } else { index + ranks - first }
}
