//! Evaluates tokens independently: each token is computed at the best place according to T. Module `steps` evaluates
//! whole steps of a unit.

use semmoe_tables::{Attention, GroupId, LayerIdx, Profile, Tables, TokenId, Trace};

use crate::input::Unit;
use crate::judge::evaluate::Evaluation;
use crate::judge::hosts::Hosts;
use crate::judge::tally::Tally;
use crate::tables::{MainGroups, PrintedRule};

/// Returns a token's place in a layer according to T and, with attention tp, also A if its groups in the two previous
/// layers are given; `None` if neither has evidence.
fn place_of(tables: &Tables, layer: LayerIdx, token: TokenId, before: Option<(GroupId, GroupId)>) -> Option<usize> {
    match tables.attention() {
        Attention::Tp => tables.likeliest_group(layer, token, before).map(|likely| likely.group.index()),
        Attention::Dp => {
            let row = tables.token_row(token)?;
            let best = likeliest(row);
            row.iter().any(|share| *share != row[best]).then_some(best)
        }
    }
}

/// Returns the index of the largest share, the first one on ties.
pub(crate) fn likeliest<T: PartialOrd>(row: &[T]) -> usize {
    (1..row.len()).fold(0, |best, rank| if row[rank] > row[best] { rank } else { best })
}

/// Evaluates every token of a trace, layer by layer. With attention tp, uses the true groups in the two previous
/// layers, because their routers have run by the time a token is placed.
pub(crate) fn judge_trace(tables: &Tables, hosts: &Hosts, trace: &Trace, printed: &PrintedRule<'_>) -> Evaluation {
    let mut tally = Tally::new(hosts);
    let (mut tokens, mut local_t_only, mut local_paper_rule) = (0, 0.0, 0.0);
    let mut main = MainGroups::new(tables.placement());
    for request in trace.iter() {
        let half = printed.half(request);
        for (position, token) in request.tokens() {
            main.set(tables.placement(), request, position);
            for (id, route) in request.routes(position) {
                let by_t = place_of(tables, id, token, None);
                let before = main.before(id.index()).map(|(older, newer)| (GroupId::new(older), GroupId::new(newer)));
                let place = if before.is_some() { place_of(tables, id, token, before) } else { by_t };
                let by_paper = printed.labels(half, id, token, before);
                let by_paper = by_paper.map(|labels| usize::from(labels.groups[0]));
                local_t_only += hosts.local_of(id, route, by_t);
                local_paper_rule += hosts.local_of(id, route, by_paper);
                tally.add_route(hosts, id.index(), route, place);
                tally.add_tokens(id.index(), place, 1);
            }
            tokens += u64::from(request.is_routed(position));
        }
    }
    let judged = judged(tables, hosts, &tally, tokens);
    let of_tp = |local: f64| (tables.attention() == Attention::Tp).then(|| local / judged.activations as f64);
    Evaluation { lar_t_only: of_tp(local_t_only), lar_paper_rule: of_tp(local_paper_rule), ..judged }
}

/// Evaluates every token of a profile by its counts, which do not include a token's groups in the previous layers.
pub(crate) fn judge_profile(tables: &Tables, hosts: &Hosts, profile: &Profile) -> Evaluation {
    let mut tally = Tally::new(hosts);
    for (token, count) in profile.seen() {
        for layer in LayerIdx::all(hosts.layers) {
            let place = place_of(tables, layer, token, None);
            for (expert, activations) in profile.row(layer, token).iter() {
                tally.add(hosts, layer.index(), usize::from(expert), u64::from(activations), place);
            }
            tally.add_tokens(layer.index(), place, count);
        }
    }
    let judged = judged(tables, hosts, &tally, profile.total_tokens());
    Evaluation { lar_t_only: (tables.attention() == Attention::Tp).then_some(judged.lar), ..judged }
}

/// Builds the figures common to all evaluations of tokens.
pub(crate) fn judged(tables: &Tables, hosts: &Hosts, tally: &Tally, tokens: u64) -> Evaluation {
    Evaluation::new(tables, hosts, Unit::Token, tally, tally.token_imbalance(), tokens)
}
