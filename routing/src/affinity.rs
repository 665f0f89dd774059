//! `affinity`: the rank with the best expected share, less its price and its backlog, under a hard load cap.
//!
//! For a request of `a` tokens with expected local shares `s[r]`, over the available ranks `r`:
//!
//! ```text
//! maximise    s[r] - price[r] - beta * backlog[r]
//! subject to  recent[r] + a  <=  (1 + eps) * (sum of recent + a) / ranks  +  a
//! ```
//!
//! `backlog` is the tokens in flight in units of the mean request in flight, `beta` is
//! [`Settings::backlog_weight`](crate::Settings::backlog_weight), `eps` is
//! [`Settings::load_margin`](crate::Settings::load_margin). The trailing `a` is the slack for the one request: a
//! request is never split, so the rank that takes it may exceed the margin by that much and no more. The least loaded
//! rank always meets the cap.
//!
//! The paper's Algorithm 2 instead masks each device until all the others had a request. That keeps counts even but
//! forces most requests away from their experts, and ignores that requests differ in length.

use crate::policy::{Choice, Policy, RankLoad, Request, rank_id, turn};
use crate::settings::Settings;

/// The policy; see the module's text.
#[derive(Clone, Copy, Debug)]
pub struct Affinity {
    backlog_weight: f64,
    load_margin: f64,
}

/// What is summed over the available ranks before they are compared.
struct Totals {
    ranks: usize,
    recent_tokens: f64,
    in_flight_tokens: f64,
    in_flight_requests: u64,
}

impl Totals {
    fn of(loads: &[RankLoad]) -> Totals {
        let mut totals = Totals { ranks: 0, recent_tokens: 0.0, in_flight_tokens: 0.0, in_flight_requests: 0 };
        for load in loads.iter().filter(|load| load.available) {
            totals.ranks += 1;
            totals.recent_tokens += load.recent_tokens;
            totals.in_flight_tokens += load.in_flight_tokens as f64;
            totals.in_flight_requests += u64::from(load.in_flight_requests);
        }
        totals
    }
}

/// A rank under comparison: better score first, then the lower burden, then whose turn it is.
#[derive(Clone, Copy)]
struct Candidate {
    index: usize,
    score: f64,
    burden: f64,
    turn: usize,
}

impl Candidate {
    fn beats(&self, other: &Candidate) -> bool {
        let order = self.score.total_cmp(&other.score).reverse();
        order.then(self.burden.total_cmp(&other.burden)).then(self.turn.cmp(&other.turn)).is_lt()
    }
}

fn keep_better(best: &mut Option<Candidate>, candidate: Candidate) {
    if best.is_none_or(|current| candidate.beats(&current)) {
        *best = Some(candidate);
    }
}

impl Affinity {
    /// The policy with these settings.
    pub fn new(settings: &Settings) -> Self {
        Affinity { backlog_weight: settings.backlog_weight, load_margin: settings.load_margin }
    }

    /// Greatest recent load that a rank may have before it takes a request of `tokens`.
    fn cap(&self, totals: &Totals, tokens: f64) -> f64 {
        (1.0 + self.load_margin) * (totals.recent_tokens + tokens) / totals.ranks as f64
    }
}

/// The shares, if they tell the available ranks apart.
fn evidence<'a>(request: &Request<'a>, loads: &[RankLoad]) -> Option<&'a [f64]> {
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

impl Policy for Affinity {
    fn name(&self) -> &'static str {
        "affinity"
    }

    fn needs_share(&self) -> bool {
        true
    }

    fn choose(&self, request: &Request<'_>, loads: &[RankLoad], prices: &[f64], sequence: u64) -> Option<Choice> {
        let totals = Totals::of(loads);
        let share = evidence(request, loads);
        let cap = self.cap(&totals, request.tokens.max(1) as f64);
        let mean_request = totals.in_flight_tokens / totals.in_flight_requests.max(1) as f64;
        let per_token = if mean_request > 0.0 { self.backlog_weight / mean_request } else { 0.0 };

        let (mut best, mut allowed, mut least) = (None, None, None);
        for (index, load) in loads.iter().enumerate().filter(|(_, load)| load.available) {
            let score = match share {
                Some(share) => {
                    let price = prices.get(index).copied().unwrap_or(0.0);
                    share[index] - price - per_token * load.in_flight_tokens as f64
                }
                None => -load.burden(),
            };
            let candidate = Candidate { index, score, burden: load.burden(), turn: turn(index, loads.len(), sequence) };
            keep_better(&mut best, candidate);
            if load.recent_tokens <= cap {
                keep_better(&mut allowed, candidate);
            }
            keep_better(&mut least, Candidate { score: -load.recent_tokens, ..candidate });
        }
        let best = best?;
        let chosen = allowed.or(least)?;
        let expected_share = request.share.and_then(|share| share.get(chosen.index).copied());
        Some(Choice { rank: rank_id(chosen.index)?, expected_share, capped: chosen.index != best.index })
    }
}
