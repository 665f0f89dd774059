//! Evaluation with tokens as units: each token on the best place that T knows.

use semmoe_tables::{Attention, LayerIdx, Profile, Tables, TokenId, Trace};

use crate::balance::spread_of;
use crate::evaluate::Judged;
use crate::hosts::Hosts;
use crate::report::Unit;
use crate::tally::Tally;

/// The place of a token in a layer; `None` where T has no evidence.
fn place_of(tables: &Tables, layer: LayerIdx, token: TokenId) -> Option<usize> {
    match tables.attention() {
        Attention::Tp => tables.token_groups(layer, token).map(|labels| usize::from(labels.groups[0])),
        Attention::Dp => {
            let row = tables.token_row(token)?;
            let best = (1..row.len()).fold(0, |best, rank| if row[rank] > row[best] { rank } else { best });
            row.iter().any(|share| *share != row[best]).then_some(best)
        }
    }
}

/// Tokens on each place, layer by layer; a token without a place counts on all of them by share.
struct TokenLoads {
    loads: Vec<Vec<f64>>,
}

impl TokenLoads {
    fn new(hosts: &Hosts) -> Self {
        TokenLoads { loads: vec![vec![0.0; hosts.places]; hosts.layers] }
    }

    fn add(&mut self, layer: usize, place: Option<usize>, tokens: u64) {
        let loads = &mut self.loads[layer];
        match place {
            Some(place) => loads[place] += tokens as f64,
            None => {
                let each = tokens as f64 / loads.len() as f64;
                loads.iter_mut().for_each(|load| *load += each);
            }
        }
    }

    fn imbalance(&self) -> f64 {
        let layers: Vec<f64> = self.loads.iter().filter_map(|loads| Some(spread_of(loads)?.max_over_mean)).collect();
        layers.iter().sum::<f64>() / layers.len().max(1) as f64
    }
}

/// Every token of a trace, layer by layer.
pub(crate) fn judge_trace(tables: &Tables, hosts: &Hosts, trace: &Trace) -> Judged {
    let mut tally = Tally::new(hosts);
    let mut loads = TokenLoads::new(hosts);
    let mut tokens = 0;
    for request in trace.iter() {
        for (position, &token) in request.token_ids().iter().enumerate() {
            let mut known = false;
            for layer in 0..hosts.layers {
                let id = LayerIdx::new(layer as u16);
                let Some(route) = request.route(position, id) else { continue };
                let place = place_of(tables, id, TokenId::new(token));
                tally.add_route(hosts, layer, route.experts().map(|expert| expert.index()), place);
                loads.add(layer, place, 1);
                known = true;
            }
            tokens += u64::from(known);
        }
    }
    judged(tally, &loads, tokens)
}

/// Every token of a profile, by its counts.
pub(crate) fn judge_profile(tables: &Tables, hosts: &Hosts, profile: &Profile) -> Judged {
    let mut tally = Tally::new(hosts);
    let mut loads = TokenLoads::new(hosts);
    for (token, &count) in (0u32..).zip(profile.token_counts()).filter(|(_, count)| **count > 0) {
        let token = TokenId::new(token);
        for layer in 0..hosts.layers {
            let id = LayerIdx::new(layer as u16);
            let place = place_of(tables, id, token);
            let row = profile.row(id, token);
            for (&expert, &activations) in row.experts.iter().zip(row.counts) {
                tally.add(hosts, (layer, usize::from(expert)), u64::from(activations), place);
            }
            loads.add(layer, place, count);
        }
    }
    judged(tally, &loads, profile.total_tokens())
}

fn judged(tally: Tally, loads: &TokenLoads, tokens: u64) -> Judged {
    let token_imbalance = loads.imbalance();
    Judged {
        unit: Unit::Token,
        tally,
        token_imbalance,
        tokens,
        policies: None,
        argmax: None,
        windowed: None,
        batch_predicted: None,
        batch_optimum: None,
    }
}
