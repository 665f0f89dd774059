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
    /// Expected local share per rank: the mean of the prompt tokens' rows of T, in `0..=1`. `None`, a length other than
    /// the number of ranks, or a non-finite value means no evidence.
    pub share: Option<&'a [f64]>,
    /// Number of leading prompt tokens cached on each rank. `None`, or a length other than the number of ranks, means
    /// that no rank has any cached.
    pub cached: Option<&'a [u64]>,
    /// Hash of the session name.
    pub key: Option<u64>,
    /// Whether [`cached`](Self::cached) includes a rank that already ran this session; if so, shares do not move the
    /// session.
    pub settled: bool,
}

impl Request<'_> {
    /// Returns the number of prompt tokens, at least one.
    pub(crate) fn tokens(&self) -> f64 {
        self.tokens.max(1) as f64
    }

    /// Returns the number of sequences, between one and [`MAX_SEQUENCES`].
    pub(crate) fn sequences(&self) -> f64 {
        self.sequences.clamp(1, MAX_SEQUENCES).into()
    }

    /// Returns the number of prompt tokens that the rank would have to compute: at least one, since computing the last
    /// prompt token yields the first output token.
    pub fn uncached(&self, rank: usize, ranks: usize) -> u64 {
        self.missing(rank, ranks).max(1)
    }

    /// Returns [`cached`](Self::cached) if its length is the number of ranks.
    pub(crate) fn cached_by(&self, ranks: usize) -> Option<&[u64]> {
        self.cached.filter(|cached| cached.len() == ranks)
    }

    fn missing(&self, rank: usize, ranks: usize) -> u64 {
        let cached = self.cached_by(ranks).map_or(0, |cached| cached[rank]);
        self.tokens.max(1).saturating_sub(cached)
    }

    /// Like [`uncached`](Self::uncached), but for the cost: half a token if the rank has the entire prompt cached, so
    /// that even a session of one-token prompts stays on its rank.
    pub(crate) fn work(&self, rank: usize, ranks: usize) -> f64 {
        (self.missing(rank, ranks) as f64).max(0.5)
    }
}

/// State of one rank, as seen by a policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankLoad {
    /// KV cache tokens of the requests in flight: their prompts and expected outputs.
    pub in_flight_tokens: u64,
    /// Requests in flight.
    pub in_flight_requests: u32,
    /// Sequences in flight.
    pub in_flight_sequences: u64,
    /// Prompt tokens known not to be computed yet: those of streaming requests without any output so far.
    pub pending_tokens: u64,
    /// This rank's tokens within the window of recent requests to all ranks, which covers
    /// [`Settings::memory`](crate::Settings::memory) requests per rank.
    pub recent_tokens: f64,
    /// This rank's requests within the window of recent requests to all ranks.
    pub recent_requests: f64,
    /// Requests assigned so far; a rank that becomes available again starts from the lowest count of the others.
    pub assigned_requests: u64,
    /// Extra cost per token on this rank, in units of share, which reflects demand for the rank.
    pub price: f64,
    /// Extra cost per sequence on this rank, in units of share of a mean-sized request.
    pub sequence_price: f64,
    /// The rank's unit. Ranks of a unit step together, so their load is kept even over time. Units may differ in speed
    /// and receive as much as they complete, so only in-flight load is compared between units.
    pub unit: u16,
    /// Whether the rank may be chosen.
    pub available: bool,
    /// Whether the in-flight counts are reliable. If not, they are raised to at least the mean of the known ranks, so
    /// that a rank with unknown load does not look idle.
    pub known: bool,
}

impl RankLoad {
    /// An available rank with no load.
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

    /// Returns the rank's load for comparisons by load only: recent tokens plus tokens in flight.
    pub(crate) fn burden(&self) -> f64 {
        self.recent_tokens + self.in_flight_tokens as f64
    }
}

/// The rank that a policy chose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Index of the rank in the given loads.
    pub rank: u16,
    /// Expected local share of the request on that rank; `None` without evidence.
    pub expected_share: Option<f64>,
    /// Whether another rank was chosen because the best one exceeded the load cap.
    pub capped: bool,
}

impl Choice {
    /// Chooses the rank at `index` and looks up the request's share there; `None` if the index exceeds the 16 bits of a
    /// rank number.
    pub(crate) fn at(index: usize, request: &Request<'_>, capped: bool) -> Option<Choice> {
        let expected_share = request.share.and_then(|share| share.get(index).copied());
        Some(Choice { rank: u16::try_from(index).ok()?, expected_share, capped })
    }
}

/// The inputs that a policy reads; the caller need not compute others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Whether the policy reads [`Request::share`], for which the prompt must be tokenized and scored.
    pub share: bool,
    /// Whether the policy reads [`Request::cached`], for which the prompt must be tokenized and looked up.
    pub cached: bool,
    /// Whether the policy reads [`Request::key`].
    pub key: bool,
}

/// Chooses a rank for a request. Implementations store only settings, so equal arguments yield equal choices.
pub trait Policy: Send + Sync {
    /// Returns the policy's name, as used in the registry, configuration files, metrics and response headers.
    fn name(&self) -> &'static str;

    /// Returns the inputs that the policy reads; by default only the loads.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Chooses an available rank; `None` if there is none.
    ///
    /// `sequence` is the request's number, which breaks ties so that equal ranks rotate.
    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], sequence: u64) -> Option<Choice>;

    /// Returns the name of the policy that actually routes requests; it differs from [`name`](Self::name) only for
    /// `shadow`.
    fn acting_name(&self) -> &'static str {
        self.name()
    }

    /// Returns a policy to compare with this one; its choices have no effect on routing.
    fn watched(&self) -> Option<&dyn Policy> {
        None
    }
}

/// Iterates over the available ranks with their indices.
pub(crate) fn available(loads: &[RankLoad]) -> impl Iterator<Item = (usize, &RankLoad)> {
    loads.iter().enumerate().filter(|(_, load)| load.available)
}

/// Returns each rank's position in this request's rotation, used to break remaining ties. The rotation starts at a
/// different rank for each request.
pub(crate) fn turn(ranks: usize, sequence: u64) -> impl Fn(usize) -> usize {
    let first = sequence.checked_rem(ranks as u64).unwrap_or(0) as usize;
    move |index| if index >= first { index - first } else { index + ranks - first }
}
