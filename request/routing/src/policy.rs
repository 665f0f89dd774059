//! Input and output of a policy.

use serde::Serialize;

use crate::accounts::MAX_SEQUENCES;

/// One request to be routed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    /// Prompt tokens. Zero counts as one.
    pub tokens: u64,
    /// Expected number of generated tokens, over all sequences.
    pub output: u64,
    /// Number of sequences. Zero counts as one.
    pub sequences: u32,
    /// Expected local share per rank: the mean over the prompt's tokens of their rows of T, in `0..=1`.
    /// `None`, a length other than the number of ranks, or a non-finite value: no evidence.
    pub share: Option<&'a [f64]>,
    /// Number of leading prompt tokens per rank that need not be computed again. `None`, or another length: none
    /// anywhere.
    pub cached: Option<&'a [u64]>,
    /// Hash of the session's name.
    pub key: Option<u64>,
    /// Whether a rank that ran this session before is among [`cached`](Self::cached); shares do not move it then.
    pub settled: bool,
}

impl Request<'_> {
    /// Prompt tokens as counted, at least one.
    pub(crate) fn tokens(&self) -> f64 {
        self.tokens.max(1) as f64
    }

    /// Sequences as counted, at least one.
    pub(crate) fn sequences(&self) -> f64 {
        self.sequences.clamp(1, MAX_SEQUENCES).into()
    }

    /// Prompt tokens that the rank would have to compute. The last token always is one, since it produces the first new
    /// one.
    pub fn uncached(&self, rank: usize, ranks: usize) -> u64 {
        self.missing(rank, ranks).max(1)
    }

    /// [`cached`](Self::cached), if it is for this many ranks.
    pub(crate) fn cached_by(&self, ranks: usize) -> Option<&[u64]> {
        self.cached.filter(|cached| cached.len() == ranks)
    }

    fn missing(&self, rank: usize, ranks: usize) -> u64 {
        let cached = self.cached_by(ranks).map_or(0, |cached| cached[rank]);
        self.tokens.max(1).saturating_sub(cached)
    }

    /// [`uncached`](Self::uncached) as used in the cost: half a token on a rank that holds the entire prompt, so that
    /// even a session of one-token prompts stays there.
    pub(crate) fn work(&self, rank: usize, ranks: usize) -> f64 {
        (self.missing(rank, ranks) as f64).max(0.5)
    }
}

/// State of one rank when choosing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankLoad {
    /// Tokens of keys and values that the requests in flight hold or will hold: prompts and expected answers.
    pub in_flight_tokens: u64,
    /// Requests in flight.
    pub in_flight_requests: u32,
    /// Sequences in flight.
    pub in_flight_sequences: u64,
    /// Known prompt tokens still to be computed: those of streaming requests without any output yet.
    pub pending_tokens: u64,
    /// Tokens among the last requests assigned to any rank, [`Settings::memory`](crate::Settings::memory) per rank.
    pub recent_tokens: f64,
    /// Requests among the last ones assigned to any rank.
    pub recent_requests: f64,
    /// Requests assigned so far; a rank that was away comes back with the lowest count of the others.
    pub assigned_requests: u64,
    /// Extra cost of a token here, in units of share, since the rank is in more demand.
    pub price: f64,
    /// Extra cost of a sequence here, in units of share of a mean-sized request.
    pub sequence_price: f64,
    /// The rank's unit. Ranks of a unit step together, and are kept even over time. Units may differ in speed and get
    /// as much as they complete: between them only the load in flight counts.
    pub unit: u16,
    /// Whether the rank may be chosen.
    pub available: bool,
    /// Whether the counts in flight can be trusted. If not, they are at least the mean of the known ranks: an unknown
    /// load is not an idle one.
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

    /// Tokens that count against the rank when only load decides: recent ones, plus those still in flight.
    pub(crate) fn burden(&self) -> f64 {
        self.recent_tokens + self.in_flight_tokens as f64
    }
}

/// The rank that a policy chose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Index of the rank, below the number of loads.
    pub rank: u16,
    /// Expected local share of the request on that rank; `None` without evidence.
    pub expected_share: Option<f64>,
    /// Whether the best rank was over the load cap, so another one was taken.
    pub capped: bool,
}

impl Choice {
    /// The rank at `index`, with the request's share on it; `None` if the index exceeds what file formats can name.
    pub(crate) fn at(index: usize, request: &Request<'_>, capped: bool) -> Option<Choice> {
        let expected_share = request.share.and_then(|share| share.get(index).copied());
        Some(Choice { rank: u16::try_from(index).ok()?, expected_share, capped })
    }
}

/// The inputs that a policy reads; the caller need not compute others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// [`Request::share`]: the prompt must be tokenized and scored.
    pub share: bool,
    /// [`Request::cached`]: the prompt must be tokenized and looked up.
    pub cached: bool,
    /// Whether the policy reads [`Request::key`].
    pub key: bool,
}

/// Chooses a rank for a request. Implementations hold only settings: equal arguments give equal answers.
pub trait Policy: Send + Sync {
    /// The name in the registry, in configuration files, metrics and response headers.
    fn name(&self) -> &'static str;

    /// The inputs that the policy reads; only loads by default.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Picks among the available ranks; `None` if there is none.
    ///
    /// `sequence` counts the requests and breaks ties, so that equal ranks rotate.
    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice>;

    /// Name of the policy that actually placed a request: another one if this policy only watches.
    fn acting_name(&self) -> &'static str {
        self.name()
    }

    /// A policy to compare with this one, whose choices are not carried out.
    fn watched(&self) -> Option<&dyn Policy> {
        None
    }
}

/// The ranks that may be chosen, with their indices.
pub(crate) fn available(loads: &[RankLoad]) -> impl Iterator<Item = (usize, &RankLoad)> {
    loads.iter().enumerate().filter(|(_, load)| load.available)
}

/// Position of a rank in this request's rotation, which starts at another rank for each request: breaks any remaining
/// ties.
pub(crate) fn turn(ranks: usize, sequence: u64) -> impl Fn(usize) -> usize {
    let first = sequence.checked_rem(ranks as u64).unwrap_or(0) as usize;
    move |index| if index >= first { index - first } else { index + ranks - first }
}
