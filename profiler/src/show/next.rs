//! Experts of one layer, given the experts of the previous layer: the paper's inter-layer expert-expert affinity.

use semmoe_tables::{LayerIdx, Trace};
use serde::Serialize;

use super::rows::{Rows, activations};
use super::{Input, Study};

/// Maximum number of tokens to examine in a trace, enough for three significant digits.
const MAX_TOKENS: usize = 500_000;

/// Figures for two consecutive layers.
#[derive(Clone, Debug, Serialize)]
pub struct NextLayer {
    /// The first layer's number in the model.
    pub from_layer: u16,
    /// The second layer's number in the model.
    pub to_layer: u16,
    /// Fraction of the second layer's activations on the top-k experts that most often follow the token's expert in the
    /// first layer.
    pub share: f64,
    /// That fraction by chance, without knowledge of the first layer.
    pub by_chance: f64,
    /// Whether pairs were observed token by token, in a trace. Otherwise they are estimated from each token's counts in
    /// both layers, as a profile does not record which experts occurred together.
    pub seen_together: bool,
    /// [N][N]: how often each expert of the second layer followed one of the first.
    #[serde(skip)]
    pub(crate) pairs: Vec<Vec<f64>>,
}

/// Maximum number of expert pairs over all layers, which take half a gigabyte. The largest published model, with 94
/// layers of 512 experts, has 24 million pairs.
const MAX_PAIRS: usize = 1 << 26;

impl Study {
    /// Returns why the figures for consecutive layers are omitted, if they are.
    pub(super) fn next_left_out(&self) -> Option<String> {
        let (experts, layers) = (self.rows.experts, self.rows.layers());
        let left_out = self.next.is_empty() && layers > 1;
        left_out.then(|| format!("omitted, as {experts} experts in {layers} layers make more than {MAX_PAIRS} pairs"))
    }
}

/// Computes the figures for all pairs of consecutive layers, unless there are too many.
pub(super) fn all(input: &Input, rows: &Rows) -> Vec<NextLayer> {
    if rows.experts.saturating_mul(rows.experts).saturating_mul(rows.layers() - 1) > MAX_PAIRS {
        return Vec::new();
    }
    let pair = |layer: usize| {
        let (pairs, seen_together) = match input {
            Input::Trace(trace) => (of_trace(trace, layer, rows.experts), true),
            Input::Profile(_) => (of_rows(rows, layer), false),
        };
        summarise(pairs, rows, layer, seen_together)
    };
    (1..rows.layers()).map(|layer| pair(layer - 1)).collect()
}

fn of_trace(trace: &Trace, layer: usize, experts: usize) -> Vec<Vec<f64>> {
    let mut pairs = vec![vec![0.0; experts]; experts];
    let (first, second) = (LayerIdx::new(layer as u16), LayerIdx::new(layer as u16 + 1));
    let positions = trace.iter().flat_map(|request| (0..request.token_ids().len()).map(move |at| (request, at)));
    for (request, at) in positions.take(MAX_TOKENS) {
        let (Some(from), Some(to)) = (request.route(at, first), request.route(at, second)) else { continue };
        for one in from.experts() {
            to.experts().for_each(|other| pairs[one.index()][other.index()] += 1.0);
        }
    }
    pairs
}

fn of_rows(rows: &Rows, layer: usize) -> Vec<Vec<f64>> {
    let mut pairs = vec![vec![0.0; rows.experts]; rows.experts];
    for token in 0..rows.vocabulary() {
        let (from, to) = (rows.row(layer, token), rows.row(layer + 1, token));
        let total = activations(to);
        for (one, count) in from {
            for (other, share) in to {
                pairs[usize::from(*one)][usize::from(*other)] +=
                    f64::from(*count) * f64::from(*share) / total * rows.top_k as f64;
            }
        }
    }
    pairs
}

fn summarise(pairs: Vec<Vec<f64>>, rows: &Rows, layer: usize, seen_together: bool) -> NextLayer {
    let top = |values: &[f64]| {
        let mut sorted = values.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted.iter().take(rows.top_k).sum::<f64>()
    };
    let total: f64 = pairs.iter().flatten().sum();
    let columns: Vec<f64> = (0..rows.experts).map(|to| pairs.iter().map(|row| row[to]).sum()).collect();
    let share = |hits: f64| if total > 0.0 { hits / total } else { 0.0 };
    NextLayer {
        from_layer: rows.layer_ids[layer],
        to_layer: rows.layer_ids[layer + 1],
        share: share(pairs.iter().map(|row| top(row)).sum()),
        by_chance: share(top(&columns)),
        seen_together,
        pairs,
    }
}
