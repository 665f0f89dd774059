//! `affinity`: the rank with the best expected share, less its price and its backlog, under a hard load cap.
//!
//! For a request of `a` tokens with expected local shares `s[r]`, over the available ranks `r`:
//!
//! ```text
//! maximise    s[r] - price[r] - beta * backlog[r]
//! subject to  recent[r] + a  <=  (1 + eps) * (sum of recent + a) / ranks  +  slack * m * sqrt(q)  +  a
//! ```
//!
//! `m` is the mean recent request, `q` the recent requests per rank, `backlog` the tokens in flight in units of `m`;
//! `beta`, `eps` and `slack` are [`Settings::backlog_weight`](crate::Settings::backlog_weight),
//! [`Settings::load_margin`](crate::Settings::load_margin) and [`Settings::load_slack`](crate::Settings::load_slack).
//! The trailing `a` is there because a request is never split: the rank that takes it may exceed the cap by that much
//! and no more. The least loaded rank always meets the cap. A request without evidence goes to the rank with the least
//! recent and unfinished tokens.
//!
//! The paper's Algorithm 2 instead masks each device until all the others had a request. That keeps counts even but
//! forces most requests away from their experts, and ignores that requests differ in length.

use crate::policy::{Choice, Policy, RankLoad, Request, mean_request, turn};
use crate::settings::Settings;

/// The policy; see the module's text.
#[derive(Clone, Copy, Debug)]
pub struct Affinity {
    backlog_weight: f64,
    load_margin: f64,
    load_slack: f64,
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
        Affinity {
            backlog_weight: settings.backlog_weight,
            load_margin: settings.load_margin,
            load_slack: settings.load_slack,
        }
    }

    /// Greatest recent load that a rank may have before it takes a request of `tokens`.
    fn cap(&self, loads: &[RankLoad], tokens: f64, mean_request: f64) -> f64 {
        let (mut recent, mut requests, mut ranks) = (tokens, 0.0, 0.0f64);
        for load in loads.iter().filter(|load| load.available) {
            recent += load.recent_tokens;
            requests += load.recent_requests;
            ranks += 1.0;
        }
        let ranks = ranks.max(1.0);
        (1.0 + self.load_margin) * recent / ranks + self.load_slack * mean_request * (requests / ranks).sqrt()
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
        let tokens = request.tokens.max(1) as f64;
        let mean_request = mean_request(loads).unwrap_or(tokens);
        let cap = self.cap(loads, tokens, mean_request);
        let per_token = self.backlog_weight / mean_request.max(1.0);
        let share = evidence(request, loads);

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
        Choice::at(chosen.index, request, chosen.index != best.index)
    }
}
