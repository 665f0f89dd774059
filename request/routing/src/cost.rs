//! The cost of routing a request to a rank, and the choice of the cheapest rank within the load caps.
//!
//! Costs are in prefill-token equivalents, for a request of `a` prompt tokens and `k` sequences that is expected to
//! generate `o` tokens and has expected local shares `s[r]`; `m` is the mean size of recent requests, `n[r]` the number
//! of sequences in flight, and `u` their mean over the unit of `r`:
//!
//! ```text
//! cost(r) =  wait[r] + w * in_flight[r]           backlog: work queued on rank r, and load that slows its steps
//!          + (1 + q) * (a - cached[r])           work of this request on rank r
//!          + (1 + q + n / 5) * gamma * (
//!              (a + o) * (1 - s[r])                its traffic to other ranks, for prompt and output
//!            + a * price[r]                        demand for rank r
//!            + k * (m + o) * (sequence_price[r] + v * d[r])   delay that a fuller rank adds to each step
//!          )
//! wait[r] =  pending[r]^2 / (pending[r] + b)
//! q       =  mean of pending / m
//! n       =  mean of n[r]
//! d[r]    =  (n[r] - u + 4 * max(n[r] + k - max of n in r's unit, 0) / k + 4 * (u - n)) * min(n / 5, 1, 8 / n)
//! ```
//!
//! If any rank already ran the request's session, the terms with shares and prices are omitted: a session moves to a
//! rank only if its shorter backlog outweighs recomputing the prompt there, not because it has more of the prompt's
//! experts.
//!
//! The sum is a delay: the request waits for the backlog and for its own work, and each of the `q` requests expected
//! behind it also waits for that work. The backlog delays only this request: if all ranks have a queue, none is idle
//! whichever one is chosen. A backlog much shorter than `b` is computed in the same step as the request. A step lasts
//! as long as the slowest rank needs to exchange tokens and to read its sequences' keys and values, so running requests
//! wait for these as well. One fifth of the running requests are counted, a fraction chosen in simulation
//! (bench/replay, the first half of its traces), where counting more reduced goodput.
//!
//! `gamma` is [`Settings::communication`](crate::Settings::communication), `w`
//! [`Settings::in_flight_weight`](crate::Settings::in_flight_weight), `b`
//! [`Settings::backlog_tokens`](crate::Settings::backlog_tokens) and `v`
//! [`Settings::sequence_weight`](crate::Settings::sequence_weight).
//!
//! The cheapest rank within both caps is chosen:
//!
//! ```text
//! n[r] + k   <=  1.5 * (sum of n + k) / ranks  +  2
//! recent[r]  <=  (1 + eps) * (sum of recent + a) / ranks  +  slack * m * sqrt(recent requests per rank)
//! ```
//!
//! where `ranks` and the sums of recent tokens and requests are over the unit of `r`.
//!
//! The request's own tokens may exceed the second cap, since a request is never split. The second cap does not apply to
//! a rank that has more of the prompt cached than another, so balancing load over time never moves a session. The rank
//! with the fewest recent tokens is always within the second cap, and is chosen if no rank is within both.
//!
//! gamma is configured. A caller that measures latencies can fit it by regressing prefill time on uncached tokens and
//! on tokens times remote share: gamma is the second coefficient divided by the first. Policies own their settings, so
//! changing gamma requires a new policy.

use std::cell::Cell;

use crate::policy::{Choice, RankLoad, Request, available, turn};
use crate::settings::Settings;

/// Weights of the cost terms; see the module documentation.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    communication: f64,
    in_flight_weight: f64,
    backlog_tokens: f64,
    sequence_weight: f64,
}

/// The cost of one request on each rank in `loads`, with rank-independent factors precomputed.
#[derive(Debug)]
pub struct Costs<'a> {
    cost: Cost,
    request: &'a Request<'a>,
    share: Option<&'a [f64]>,
    loads: &'a [RankLoad],
    /// Number of requests that wait for this request's work: itself and those queued behind it.
    waiters: f64,
    /// Cost of the request's tokens if all of their activations are remote.
    remote: f64,
    /// Multiplier for a rank's token price.
    price: f64,
    /// Multiplier for a rank's sequence price.
    sequence_price: f64,
    mean_sequences: f64,
    /// Cost per sequence above the unit's mean.
    above_mean: f64,
    /// Cost per sequence beyond the unit's fullest rank.
    beyond_fullest: f64,
    units: ByUnit<'a, UnitSequences>,
}

/// In-flight sequence counts of one unit.
#[derive(Clone, Copy, Debug)]
struct UnitSequences {
    mean: f64,
    most: f64,
}

impl UnitSequences {
    fn of(sums: &Sums) -> Self {
        UnitSequences { mean: sums.sequences / sums.ranks, most: sums.most_sequences }
    }
}

/// A value derived from a unit's sums. Caches the value of the last unit queried, since ranks of one unit are adjacent.
#[derive(Debug)]
struct ByUnit<'a, T: Copy> {
    /// By ascending unit.
    loads: &'a [RankLoad],
    last: Cell<(u16, T)>,
}

impl<'a, T: Copy> ByUnit<'a, T> {
    /// `all` contains the sums over `loads`, reused for the first unit if there is only one unit.
    fn new(loads: &'a [RankLoad], all: &Sums, of: impl Fn(&Sums) -> T) -> Self {
        let unit = loads.first().map_or(0, |load| load.unit);
        let only = loads.last().is_none_or(|load| load.unit == unit);
        let first = if only { of(all) } else { of(&Sums::of(ranks_of(loads, unit))) };
        Self { loads, last: Cell::new((unit, first)) }
    }

    fn get(&self, unit: u16, of: impl Fn(&Sums) -> T) -> T {
        if self.last.get().0 != unit {
            self.last.set((unit, of(&Sums::of(ranks_of(self.loads, unit)))));
        }
        self.last.get().1
    }
}

/// The ranks of one unit.
fn ranks_of(loads: &[RankLoad], unit: u16) -> &[RankLoad] {
    let from = loads.partition_point(|load| load.unit < unit);
    let many = loads[from..].partition_point(|load| load.unit == unit);
    &loads[from..from + many]
}

/// Cost of a request on one rank, in prefill-token equivalents.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostParts {
    /// Work already queued or running on the rank.
    pub backlog: f64,
    /// Request tokens missing from the rank's prefix cache, times the number of requests that wait for them.
    pub uncached: f64,
    /// Cost of remote tokens and prices, times gamma and a weighted count of waiting and running requests; 0 without
    /// evidence.
    pub communication: f64,
    /// Time added to each step because the rank has more sequences than the mean; negative if it has fewer.
    pub crowding: f64,
}

impl CostParts {
    /// Returns the sum of all parts.
    pub fn total(&self) -> f64 {
        self.backlog + self.uncached + self.communication + self.crowding
    }
}

/// Weight of each sequence by which a unit's mean exceeds the mean of all ranks, relative to a sequence above the
/// unit's mean. Ranks of one unit step at the same pace; units may differ in pace, which shows only in their
/// outstanding work.
const BETWEEN_UNITS: f64 = 4.0;

/// Weight of each sequence beyond the fullest rank's count, relative to a sequence above the mean: all ranks of the
/// unit wait for the fullest one.
const FULLEST: f64 = 4.0;

/// Weight of one sequence when ranks run `mean_sequences` on average: small while ranks are mostly idle, and falling as
/// 1 / mean from eight upwards, since one more sequence then matters less.
fn occupancy(mean_sequences: f64) -> f64 {
    (mean_sequences / 5.0).min(1.0) * 8.0 / mean_sequences.max(8.0)
}

/// Fraction of a rank's running sequences counted as waiting for communication.
const RUNNING_SHARE: f64 = 0.2;

impl Cost {
    /// Builds the cost from these settings.
    pub fn new(settings: &Settings) -> Self {
        Cost {
            communication: settings.communication,
            in_flight_weight: settings.in_flight_weight,
            backlog_tokens: f64::from(settings.backlog_tokens),
            sequence_weight: settings.sequence_weight,
        }
    }

    /// Returns the delay of a request queued behind `pending` tokens.
    fn wait(&self, pending: f64) -> f64 {
        if pending > 0.0 { pending * pending / (pending + self.backlog_tokens) } else { 0.0 }
    }

    /// Returns the cost of the request on each rank in `loads`. `share` is the result of [`evidence`].
    pub fn of<'a>(&self, request: &'a Request<'a>, share: Option<&'a [f64]>, loads: &'a [RankLoad]) -> Costs<'a> {
        self.given(&Sums::of(loads), request, share, loads)
    }

    fn given<'a>(
        &self,
        sums: &Sums,
        request: &'a Request<'a>,
        share: Option<&'a [f64]>,
        loads: &'a [RankLoad],
    ) -> Costs<'a> {
        let (tokens, output, sequences) = (request.tokens(), request.output as f64, request.sequences());
        let mean_request = sums.mean_request(tokens);
        let waiters = 1.0 + sums.pending / (sums.ranks * mean_request);
        let mean_sequences = sums.sequences / sums.ranks;
        let communication = self.communication * (waiters + RUNNING_SHARE * mean_sequences);
        let sequence_price = communication * sequences * (mean_request + output);
        let above_mean = sequence_price * self.sequence_weight * occupancy(mean_sequences);
        Costs {
            cost: *self,
            request,
            share,
            loads,
            waiters,
            remote: communication * (tokens + output),
            price: communication * tokens,
            sequence_price,
            mean_sequences,
            above_mean,
            beyond_fullest: above_mean * FULLEST / sequences,
            units: ByUnit::new(loads, sums, UnitSequences::of),
        }
    }
}

impl Costs<'_> {
    /// Returns the cost on the rank at `index`.
    pub fn on(&self, index: usize) -> CostParts {
        let load = &self.loads[index];
        let communication = |share: &[f64]| {
            self.remote * (1.0 - share[index]) + self.price * load.price + self.sequence_price * load.sequence_price
        };
        CostParts {
            backlog: self.cost.wait(load.pending_tokens as f64)
                + self.cost.in_flight_weight * load.in_flight_tokens as f64,
            uncached: self.waiters * self.request.work(index, self.loads.len()),
            communication: self.share.map_or(0.0, communication),
            crowding: self.crowding(load.unit, load.in_flight_sequences as f64),
        }
    }

    fn crowding(&self, unit: u16, sequences: f64) -> f64 {
        let UnitSequences { mean, most } = self.units.get(unit, UnitSequences::of);
        let beyond = (sequences + self.request.sequences() - most).max(0.0);
        self.above_mean * (sequences - mean + BETWEEN_UNITS * (mean - self.mean_sequences))
            + self.beyond_fullest * beyond
    }
}

/// Returns the request's shares if they differ between the available ranks.
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

/// The hard caps on sequences in flight and on recent tokens.
#[derive(Clone, Copy, Debug)]
pub struct Cap {
    margin: f64,
    slack: f64,
}

/// The caps for one request, given the current loads.
#[derive(Debug)]
pub struct LoadLimits<'a> {
    cap: Cap,
    tokens: f64,
    mean_request: f64,
    /// Maximum in-flight sequences for a rank to be eligible for the request.
    pub sequences: f64,
    /// Maximum recent tokens for a rank to be eligible for the request, by unit.
    recent: ByUnit<'a, f64>,
}

impl LoadLimits<'_> {
    /// Returns whether a rank is eligible for the request. `holds` is whether the rank has more of the prompt cached
    /// than another rank.
    pub fn allows(&self, load: &RankLoad, holds: bool) -> bool {
        self.is_idle_enough(load) && (holds || load.recent_tokens <= self.recent_in(load.unit))
    }

    /// Returns the maximum recent tokens for a rank of this unit to be eligible for the request.
    pub fn recent_in(&self, unit: u16) -> f64 {
        self.recent.get(unit, |sums| self.cap.recent(sums, self.tokens, self.mean_request))
    }

    /// Returns whether the rank's in-flight sequences are within the cap.
    pub fn is_idle_enough(&self, load: &RankLoad) -> bool {
        load.in_flight_sequences as f64 <= self.sequences
    }
}

/// A rank accepts no sequence that would take it above this multiple of the mean plus [`SPARE_SEQUENCES`].
const SEQUENCES_OVER_MEAN: f64 = 1.5;
const SPARE_SEQUENCES: f64 = 2.0;

/// Sums over the available ranks.
#[derive(Default)]
struct Sums {
    /// Number of ranks, at least 1.
    ranks: f64,
    recent_tokens: f64,
    recent_requests: f64,
    pending: f64,
    sequences: f64,
    most_sequences: f64,
}

impl Sums {
    fn of<'a>(loads: impl IntoIterator<Item = &'a RankLoad>) -> Self {
        let mut sums = Sums::default();
        for load in loads.into_iter().filter(|load| load.available) {
            sums.ranks += 1.0;
            sums.recent_tokens += load.recent_tokens;
            sums.recent_requests += load.recent_requests;
            sums.pending += load.pending_tokens as f64;
            sums.sequences += load.in_flight_sequences as f64;
            sums.most_sequences = sums.most_sequences.max(load.in_flight_sequences as f64);
        }
        Sums { ranks: sums.ranks.max(1.0), ..sums }
    }

    /// Returns the mean number of tokens per recent request, or `otherwise` if there were none.
    fn mean_request(&self, otherwise: f64) -> f64 {
        if self.recent_tokens > 0.0 { self.recent_tokens / self.recent_requests } else { otherwise }
    }
}

impl Cap {
    /// Builds the caps from these settings.
    pub fn new(settings: &Settings) -> Self {
        Cap { margin: settings.load_margin, slack: settings.load_slack }
    }

    /// Returns the load limits for this request.
    pub fn limits<'a>(&self, loads: &'a [RankLoad], request: &Request<'_>) -> LoadLimits<'a> {
        self.given(&Sums::of(loads), request, loads)
    }

    /// Returns the maximum recent tokens per rank in the unit with these sums.
    fn recent(&self, unit: &Sums, tokens: f64, mean_request: f64) -> f64 {
        let chance = self.slack * mean_request * (unit.recent_requests / unit.ranks).sqrt();
        (1.0 + self.margin) * (unit.recent_tokens + tokens) / unit.ranks + chance
    }

    fn given<'a>(&self, sums: &Sums, request: &Request<'_>, loads: &'a [RankLoad]) -> LoadLimits<'a> {
        let (tokens, sequences) = (request.tokens(), request.sequences());
        let mean_request = sums.mean_request(tokens);
        LoadLimits {
            cap: *self,
            tokens,
            mean_request,
            recent: ByUnit::new(loads, sums, |sums| self.recent(sums, tokens, mean_request)),
            sequences: SEQUENCES_OVER_MEAN * (sums.sequences + sequences) / sums.ranks + SPARE_SEQUENCES
                - sequences.min(SPARE_SEQUENCES),
        }
    }
}

/// A candidate rank; candidates are compared by cost, then burden, then rotation.
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

/// One policy's cost weights and load caps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weighing {
    cost: Cost,
    cap: Cap,
}

impl Weighing {
    pub(crate) fn new(settings: &Settings) -> Self {
        Self { cost: Cost::new(settings), cap: Cap::new(settings) }
    }

    /// Chooses the cheapest rank within the caps, with `share` as evidence for the request.
    pub(crate) fn choose(
        &self,
        request: &Request<'_>,
        share: Option<&[f64]>,
        loads: &[RankLoad],
        sequence: u64,
    ) -> Option<Choice> {
        let sums = Sums::of(loads);
        let costs = self.cost.given(&sums, request, share.filter(|_| !request.settled), loads);
        let limits = self.cap.given(&sums, request, loads);
        let cached = request.cached_by(loads.len());
        let fewest = cached.and_then(|cached| available(loads).map(|(index, _)| cached[index]).min());
        let holds = |index: usize| cached.zip(fewest).is_some_and(|(cached, fewest)| cached[index] > fewest);
        let allows = |index: usize, load: &RankLoad| limits.allows(load, holds(index));
        let (index, capped) = cheapest(loads, sequence, allows, |index, _| costs.on(index).total())?;
        Choice::at(index, request, capped)
    }
}

/// Returns the cheapest available rank that `allows` accepts, or the one with the fewest recent tokens if it accepts
/// none, and whether that rank differs from the cheapest of all.
pub(crate) fn cheapest(
    loads: &[RankLoad],
    sequence: u64,
    allows: impl Fn(usize, &RankLoad) -> bool,
    cost: impl Fn(usize, &RankLoad) -> f64,
) -> Option<(usize, bool)> {
    let (mut best, mut allowed) = (None, None);
    let turn = turn(loads.len(), sequence);
    let available = || available(loads);
    let candidate =
        |index: usize, load: &RankLoad, cost: f64| Candidate { index, cost, burden: load.burden(), turn: turn(index) };
    for (index, load) in available() {
        let cost = cost(index, load);
        // Skip ranks that cost more than the best so far, as most do.
        let contends = |current: &Option<Candidate>| current.is_none_or(|current| cost <= current.cost);
        if contends(&best) {
            keep_better(&mut best, candidate(index, load, cost));
        }
        if contends(&allowed) && allows(index, load) {
            keep_better(&mut allowed, candidate(index, load, cost));
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
