//! The one cost of placing a request, and the pick under the load cap that goes with it.
//!
//! In token-equivalents of prefill work, for a request of `a` tokens with expected local shares `s[r]`:
//!
//! ```text
//! cost(r) =  pending[r] + w * in_flight[r]       backlog: what rank r computes first, and what slows its steps
//!          + (1 + q) * (
//!              a - cached[r]                      what rank r must compute of this request
//!            + gamma * a * (1 - s[r] + price[r])  what it must send to other ranks, and what r is worth to others
//!            )
//! q       =  mean of pending / mean recent request
//! ```
//!
//! The sum is delay: the request itself waits for the backlog and for its own work, and each of the `q` requests that
//! are to be expected behind it waits for its work once more. Backlog delays it alone: where all ranks have a queue,
//! none runs idle, whichever takes it. Without `q` a long queue would drown what is local, just when throughput is all
//! that counts (bench/replay has both).
//!
//! `gamma` is [`Settings::communication`](crate::Settings::communication) and `w`
//! [`Settings::in_flight_weight`](crate::Settings::in_flight_weight). The cheapest rank under the cap is taken:
//!
//! ```text
//! recent[r]  <=  (1 + eps) * (sum of recent + a) / ranks  +  slack * m * sqrt(q)
//! ```
//!
//! and the same for the latest tokens with their own slack. `m` is the mean request of that time and `q` the requests
//! per rank. The request itself may lie above the cap, as it is never split. The rank with the least recent tokens is
//! below the first cap always; where the second one leaves no rank, that one is taken.
//!
//! gamma is configured. A caller that sees latencies can fit it: regress the time of a prefill on its uncached tokens
//! and on tokens times remote share; gamma is the second coefficient over the first. Policies hold their settings by
//! value, so that a new gamma is a new policy in the place of the old one.

use crate::policy::{Choice, RankLoad, Request, available, turn};
use crate::settings::Settings;

/// The weights of the cost; see the module's text.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    communication: f64,
    in_flight_weight: f64,
}

/// The cost of one request on each of the ranks in `loads`.
#[derive(Clone, Copy, Debug)]
pub struct Costs<'a> {
    cost: Cost,
    request: &'a Request<'a>,
    share: Option<&'a [f64]>,
    loads: &'a [RankLoad],
    /// Requests that wait for this one's work: itself, and those behind it.
    waiters: f64,
}

/// Cost of a request on one rank, in token-equivalents of prefill work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostParts {
    /// Work already there.
    pub backlog: f64,
    /// Tokens of the request that are not in the rank's prefix cache, for each request that waits for them.
    pub uncached: f64,
    /// Tokens times gamma times (remote share + price), for each request that waits for them; 0 without evidence, for
    /// then it would be the same everywhere.
    pub communication: f64,
}

impl CostParts {
    /// The cost.
    pub fn total(&self) -> f64 {
        self.backlog + self.uncached + self.communication
    }
}

impl Cost {
    /// The cost with these settings.
    pub fn new(settings: &Settings) -> Self {
        Cost { communication: settings.communication, in_flight_weight: settings.in_flight_weight }
    }

    /// The cost of the request on each of `loads`. `share`: as [`evidence`] gives it.
    pub fn of<'a>(&self, request: &'a Request<'a>, share: Option<&'a [f64]>, loads: &'a [RankLoad]) -> Costs<'a> {
        Costs { cost: *self, request, share, loads, waiters: 1.0 + waiting(loads) }
    }
}

impl Costs<'_> {
    /// The cost on the rank at `index`.
    pub fn on(&self, index: usize) -> CostParts {
        let load = &self.loads[index];
        let tokens = self.request.tokens.max(1) as f64;
        let remote = |share: &[f64]| self.cost.communication * tokens * (1.0 - share[index] + load.price);
        CostParts {
            backlog: load.pending_tokens as f64 + self.cost.in_flight_weight * load.in_flight_tokens as f64,
            uncached: self.waiters * self.request.uncached(index, self.loads.len()) as f64,
            communication: self.waiters * self.share.map_or(0.0, remote),
        }
    }
}

/// q: the average number of prompts known to wait on an available rank, each counted as a mean recent request.
fn waiting(loads: &[RankLoad]) -> f64 {
    let (mut pending, mut recent, mut ranks) = (0.0, Sums::default(), 0.0);
    for load in loads.iter().filter(|load| load.available) {
        pending += load.pending_tokens as f64;
        recent.add(load.recent_tokens, load.recent_requests);
        ranks += 1.0;
    }
    if pending > 0.0 && recent.tokens > 0.0 { pending * recent.requests / (ranks * recent.tokens) } else { 0.0 }
}

/// The request's shares, if they differ between the available ranks.
pub fn evidence<'a>(request: &Request<'a>, loads: &[RankLoad]) -> Option<&'a [f64]> {
    let share = request.share.filter(|share| share.len() == loads.len())?;
    let mut first = None;
    let mut differ = false;
    for (value, _) in share.iter().zip(loads).filter(|(_, load)| load.available) {
        if !value.is_finite() {
            return None;
        }
        differ |= *first.get_or_insert(*value) != *value;
    }
    differ.then_some(share)
}

/// The hard cap on recent and on latest tokens.
#[derive(Clone, Copy, Debug)]
pub struct Cap {
    margin: f64,
    slack: f64,
    burst_slack: f64,
}

/// The cap for one request among given loads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Most {
    /// Greatest recent tokens that a rank may have before it takes the request.
    pub recent: f64,
    /// Greatest latest tokens.
    pub latest: f64,
}

impl Most {
    /// Whether a rank may take the request.
    pub fn allows(&self, load: &RankLoad) -> bool {
        load.recent_tokens <= self.recent && load.latest_tokens <= self.latest
    }
}

/// Sums over the available ranks.
#[derive(Default)]
struct Sums {
    tokens: f64,
    requests: f64,
}

impl Sums {
    fn add(&mut self, tokens: f64, requests: f64) {
        self.tokens += tokens;
        self.requests += requests;
    }

    fn most(&self, ranks: f64, tokens: f64, margin: f64, slack: f64) -> f64 {
        let mean_request = if self.requests > 0.0 { self.tokens / self.requests } else { tokens };
        (1.0 + margin) * (self.tokens + tokens) / ranks + slack * mean_request * (self.requests / ranks).sqrt()
    }
}

impl Cap {
    /// The cap with these settings.
    pub fn new(settings: &Settings) -> Self {
        Cap { margin: settings.load_margin, slack: settings.load_slack, burst_slack: settings.burst_slack }
    }

    /// The load limits of a rank that takes a request of `tokens`.
    pub fn most(&self, loads: &[RankLoad], tokens: u64) -> Most {
        let tokens = tokens.max(1) as f64;
        let (mut recent, mut latest, mut ranks) = (Sums::default(), Sums::default(), 0.0f64);
        for load in loads.iter().filter(|load| load.available) {
            recent.add(load.recent_tokens, load.recent_requests);
            latest.add(load.latest_tokens, load.latest_requests);
            ranks += 1.0;
        }
        let ranks = ranks.max(1.0);
        Most {
            recent: recent.most(ranks, tokens, self.margin, self.slack),
            latest: latest.most(ranks, tokens, self.margin, self.burst_slack),
        }
    }
}

/// A rank under comparison: the lower cost first, then the lower burden, then whose turn it is.
#[derive(Clone, Copy)]
struct Candidate {
    index: usize,
    cost: f64,
    burden: f64,
    turn: usize,
}

fn keep_better(best: &mut Option<Candidate>, other: Candidate) {
    let beats = |current: &Candidate| {
        let order = other.cost.total_cmp(&current.cost).then(other.burden.total_cmp(&current.burden));
        order.then(other.turn.cmp(&current.turn)).is_lt()
    };
    if best.as_ref().is_none_or(beats) {
        *best = Some(other);
    }
}

/// The cost and the cap of one policy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weighing {
    cost: Cost,
    cap: Cap,
}

impl Weighing {
    pub(crate) fn new(settings: &Settings) -> Self {
        Self { cost: Cost::new(settings), cap: Cap::new(settings) }
    }

    /// The cheapest rank under the cap, with `share` as the evidence for the request.
    pub(crate) fn choose(
        &self,
        request: &Request<'_>,
        share: Option<&[f64]>,
        loads: &[RankLoad],
        sequence: u64,
    ) -> Option<Choice> {
        let costs = self.cost.of(request, share, loads);
        let most = self.cap.most(loads, request.tokens);
        let (index, capped) = cheapest(loads, sequence, most, |index, _| costs.on(index).total())?;
        Choice::at(index, request, capped)
    }
}

/// The cheapest available rank that `most` allows, or else the one with the fewest recent tokens; and whether that is
/// another one than the cheapest of all.
pub(crate) fn cheapest(
    loads: &[RankLoad],
    sequence: u64,
    most: Most,
    cost: impl Fn(usize, &RankLoad) -> f64,
) -> Option<(usize, bool)> {
    let (mut best, mut allowed) = (None, None);
    let turn = turn(loads.len(), sequence);
    let available = || available(loads);
    let candidate =
        |index: usize, load: &RankLoad, cost: f64| Candidate { index, cost, burden: load.burden(), turn: turn(index) };
    for (index, load) in available() {
        let candidate = candidate(index, load, cost(index, load));
        keep_better(&mut best, candidate);
        if most.allows(load) {
            keep_better(&mut allowed, candidate);
        }
    }
    if allowed.is_none() {
        for (index, load) in available() {
            keep_better(&mut allowed, candidate(index, load, load.recent_tokens));
        }
    }
    let chosen = allowed?.index;
    Some((chosen, chosen != best?.index))
}
