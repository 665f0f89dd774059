//! The report of the `shadow` policy: compares the choices of two policies on the same requests.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use schemars::JsonSchema;
use serde::Serialize;

use crate::router::Decision;

/// Shares are summed as integer millionths, so the sum does not depend on the order.
const UNIT: f64 = 1e6;

/// Sums for one of the two policies.
#[derive(Debug, Default)]
struct Side {
    /// Sum of the expected local share over scored tokens, in millionths.
    share: AtomicU64,
    cached: AtomicU64,
    /// [ranks] tokens.
    tokens: Box<[AtomicU64]>,
}

/// Accumulates pairs of decisions without taking a lock.
#[derive(Debug, Default)]
pub struct Comparison {
    requests: AtomicU64,
    same: AtomicU64,
    tokens: AtomicU64,
    scored: AtomicU64,
    looked_up: AtomicU64,
    acting: Side,
    watched: Side,
}

/// One policy's figures in a [`Report`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ReportSide {
    /// Expected local activation rate: the mean expected local share of prompt tokens on the chosen ranks, over
    /// requests scored with evidence.
    pub local_share: Option<f64>,
    /// Fraction of prompt tokens estimated to be cached on the chosen ranks, over requests whose prefix was looked up.
    pub cached_share: Option<f64>,
    /// Tokens on the most loaded rank divided by the mean over ranks.
    pub tokens_max_over_mean: f64,
}

/// The figures so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Report {
    /// Requests compared.
    pub requests: u64,
    /// Requests for which both policies chose the same rank.
    pub same_rank: u64,
    /// Total prompt tokens of the compared requests.
    pub tokens: u64,
    /// Total prompt tokens of the requests scored with evidence.
    pub scored_tokens: u64,
    /// The policy that routes.
    pub acting: ReportSide,
    /// The watched policy, simulated with the loads and caches that would result if it had routed all of these
    /// requests.
    pub watched: ReportSide,
}

impl Side {
    fn new(ranks: u16) -> Self {
        Side { tokens: (0..ranks).map(|_| AtomicU64::default()).collect(), ..Side::default() }
    }

    fn add(&self, decision: &Decision, tokens: u64) {
        if let Some(share) = decision.choice.expected_share {
            self.share.fetch_add((share.clamp(0.0, 1.0) * tokens as f64 * UNIT).round() as u64, Relaxed);
        }
        self.cached.fetch_add(decision.cached.unwrap_or(0), Relaxed);
        if let Some(count) = self.tokens.get(usize::from(decision.choice.rank)) {
            count.fetch_add(tokens, Relaxed);
        }
    }

    fn report(&self, scored: u64, looked_up: u64) -> ReportSide {
        let over = |sum: f64, tokens: u64| (tokens > 0).then(|| sum / tokens as f64);
        let tokens: Vec<u64> = self.tokens.iter().map(|count| count.load(Relaxed)).collect();
        let (most, sum) = (tokens.iter().max().copied().unwrap_or(0), tokens.iter().sum::<u64>());
        ReportSide {
            local_share: over(self.share.load(Relaxed) as f64 / UNIT, scored),
            cached_share: over(self.cached.load(Relaxed) as f64, looked_up),
            tokens_max_over_mean: over(most as f64 * tokens.len() as f64, sum).unwrap_or(1.0),
        }
    }
}

impl Comparison {
    /// Creates an empty comparison.
    pub fn new(ranks: u16) -> Self {
        Comparison { acting: Side::new(ranks), watched: Side::new(ranks), ..Comparison::default() }
    }

    /// Adds both policies' decisions for one request.
    pub fn add(&self, acting: &Decision, watched: &Decision) {
        let tokens = acting.work.counted_tokens();
        self.requests.fetch_add(1, Relaxed);
        self.tokens.fetch_add(tokens, Relaxed);
        self.same.fetch_add(u64::from(acting.choice.rank == watched.choice.rank), Relaxed);
        if watched.choice.expected_share.is_some() {
            self.scored.fetch_add(tokens, Relaxed);
        }
        if watched.cached.is_some() {
            self.looked_up.fetch_add(tokens, Relaxed);
        }
        self.acting.add(acting, tokens);
        self.watched.add(watched, tokens);
    }

    /// Returns the figures so far. Concurrent additions may be partially included.
    pub fn report(&self) -> Report {
        let (scored, looked_up) = (self.scored.load(Relaxed), self.looked_up.load(Relaxed));
        Report {
            requests: self.requests.load(Relaxed),
            same_rank: self.same.load(Relaxed),
            tokens: self.tokens.load(Relaxed),
            scored_tokens: scored,
            acting: self.acting.report(scored, looked_up),
            watched: self.watched.report(scored, looked_up),
        }
    }
}
