//! The columns of the paper's Table 1, and the kurtosis of its figure 6 (b).

use serde::Serialize;

use super::rows::{Rows, activations};
use crate::LayerSummary;

/// The figures for one layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerTable {
    /// The model's layer number.
    pub layer_id: u16,
    /// F1 of predicting a token's k hottest experts, on held-out data; quartiles over tokens. The prediction has as
    /// many experts as a token activates, so precision, recall and F1 are equal.
    pub f1: Quartiles,
    /// Mean F1 over occurrences; `None` if no token was both counted and held out.
    pub f1_mean: Option<f64>,
    /// Share of a token's activations on its hottest top-k.
    pub cumulative_hotness: Quartiles,
    /// Share of a token's activations on its hottest expert outside the top-k.
    pub hottest_other: Quartiles,
    /// Kurtosis of a token's activations over the experts (3 for a normal distribution); high if a few experts receive
    /// all of them.
    pub kurtosis: Quartiles,
    /// Entropy of the expert loads relative to balanced loads, 0..1.
    pub load_entropy: f64,
    /// Skewness of the expert loads; above 0 if only a few experts are busy.
    pub load_skewness: f64,
    /// Load of the busiest expert over the mean.
    pub load_max_over_mean: f64,
}

/// Quartiles over tokens; 0 without tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Quartiles {
    /// First quartile.
    pub p25: f64,
    /// Median.
    pub p50: f64,
    /// Third quartile.
    pub p75: f64,
}

impl Quartiles {
    /// Computes quartiles with linear interpolation, like NumPy.
    pub(super) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * (values.len().saturating_sub(1)) as f64;
            let (low, high) = (values.get(place.floor() as usize), values.get(place.ceil() as usize));
            let (low, high) = (low.copied().unwrap_or(0.0), high.copied().unwrap_or(0.0));
            low + (high - low) * place.fract()
        };
        Self { p25: at(0.25), p50: at(0.5), p75: at(0.75) }
    }
}

/// Computes one layer's figures: hotness from all counts, and F1 of predicting `judged` from `counted` for tokens that
/// occur at least `least` times.
pub(super) fn layer(layer: usize, all: &Rows, counted: &Rows, judged: &Rows, least: u64) -> LayerTable {
    let (mut hot, mut others, mut kurtosis) = (Vec::new(), Vec::new(), Vec::new());
    for token in 0..all.vocabulary() {
        let row = all.row(layer, token);
        let total = activations(row);
        if total > 0.0 {
            let order = hottest(row);
            let share = |entry: &(u16, u32)| f64::from(entry.1) / total;
            hot.push(order.iter().take(all.top_k).map(share).sum());
            others.push(order.get(all.top_k).map_or(0.0, share));
            kurtosis.push(kurtosis_of(row, all.experts));
        }
    }
    let (f1, f1_mean) = f1(layer, counted, judged, least);
    let loads = all.loads(layer);
    let even = LayerSummary::of(all.layer_ids[layer], &loads);
    let shares: Vec<f64> = loads.iter().map(|load| *load as f64).collect();
    let (deviation, third) = (moment(&shares, 2).sqrt(), moment(&shares, 3));
    LayerTable {
        layer_id: even.layer_id,
        f1,
        f1_mean,
        cumulative_hotness: Quartiles::of(hot),
        hottest_other: Quartiles::of(others),
        kurtosis: Quartiles::of(kurtosis),
        load_entropy: even.entropy,
        load_skewness: if deviation > 0.0 { third / deviation.powi(3) } else { 0.0 },
        load_max_over_mean: even.max_over_mean,
    }
}

/// Returns a row's experts and counts, hottest first; ties go to the lowest id.
pub(crate) fn hottest(row: &[(u16, u32)]) -> Vec<(u16, u32)> {
    let mut order = row.to_vec();
    order.sort_by_key(|(expert, count)| (std::cmp::Reverse(*count), *expert));
    order
}

/// Returns F1 quartiles over tokens that occur often enough in both parts, and the mean over their occurrences, if any.
fn f1(layer: usize, counted: &Rows, judged: &Rows, least: u64) -> (Quartiles, Option<f64>) {
    let (mut each, mut hit, mut all) = (Vec::new(), 0.0, 0.0);
    for token in 0..judged.vocabulary() {
        let total = activations(judged.row(layer, token));
        let known = counted.row(layer, token);
        if total == 0.0 || known.is_empty() || judged.tokens[token] < least {
            continue;
        }
        let predicted: Vec<u16> = hottest(known).iter().take(counted.top_k).map(|(expert, _)| *expert).collect();
        let hits = judged.row(layer, token).iter().filter(|(expert, _)| predicted.contains(expert));
        let hits: f64 = hits.map(|(_, count)| f64::from(*count)).sum();
        each.push(hits / total);
        hit += hits;
        all += total;
    }
    (Quartiles::of(each), (all > 0.0).then(|| hit / all))
}

/// Computes the kurtosis of a token's counts over all experts, including zeros.
fn kurtosis_of(row: &[(u16, u32)], experts: usize) -> f64 {
    let mut counts = vec![0.0; experts];
    row.iter().for_each(|(expert, count)| counts[usize::from(*expert)] = f64::from(*count));
    let variance = moment(&counts, 2);
    if variance > 0.0 { moment(&counts, 4) / (variance * variance) } else { 0.0 }
}

/// Central moment.
fn moment(values: &[f64], power: i32) -> f64 {
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    values.iter().map(|value| (value - mean).powi(power)).sum::<f64>() / count
}
