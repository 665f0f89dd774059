//! Reliability curves: how well the shares expected by T match the observed ones.

use semmoe_tables::{Attention, ExpertId, LayerIdx, Profile, Tables, TokenId, Trace};
use serde::Serialize;

use crate::judge::hosts::Hosts;
use crate::judge::tokens::likeliest;

/// Number of bins of a reliability curve, evenly spaced over [0, 1].
const BINS: usize = 10;

/// Reliability curves of T's shares.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Calibration {
    /// Per token: the share of activations expected on the likeliest rank (attention dp) or group of each layer (tp),
    /// and the share observed there.
    pub tokens: Option<Reliability>,
    /// Per request, for a trace and attention dp: the mean share of the prompt on its likeliest rank, and the share of
    /// the whole request that was local there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<Reliability>,
}

/// Expected shares compared with observed ones.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reliability {
    /// Number of predictions compared: occurrences of tokens (in every layer with attention tp), or requests.
    pub count: u64,
    /// Mean of |predicted - observed| over the bins, weighted by count.
    pub expected_calibration_error: f64,
    /// The nonempty bins, out of ten bins of predicted share.
    pub bins: Vec<ReliabilityBin>,
}

/// One bin of predictions with similar shares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReliabilityBin {
    /// Lower end of the bin, which is 0.1 wide.
    pub from: f64,
    /// Number of predictions.
    pub count: u64,
    /// Mean predicted share.
    pub predicted: f64,
    /// Mean observed share.
    pub observed: f64,
}

/// A bin's predictions, with the sums of their shares.
#[derive(Clone, Copy, Debug, Default)]
struct BinSum {
    count: u64,
    predicted: f64,
    observed: f64,
}

/// Accumulates predictions.
#[derive(Debug, Default)]
pub(crate) struct ReliabilitySum {
    bins: [BinSum; BINS],
}

impl ReliabilitySum {
    /// Adds `count` predictions with the same predicted and observed share.
    pub(crate) fn add(&mut self, predicted: f64, observed: f64, count: u64) {
        let bin = &mut self.bins[((predicted * BINS as f64) as usize).min(BINS - 1)];
        bin.count += count;
        bin.predicted += predicted * count as f64;
        bin.observed += observed * count as f64;
    }

    /// Returns the curve, or `None` without predictions.
    pub(crate) fn finish(&self) -> Option<Reliability> {
        let count: u64 = self.bins.iter().map(|bin| bin.count).sum();
        let error: f64 = self.bins.iter().map(|bin| (bin.predicted - bin.observed).abs()).sum();
        let bins = self.bins.iter().enumerate().filter(|(_, bin)| bin.count > 0).map(|(at, bin)| ReliabilityBin {
            from: at as f64 / BINS as f64,
            count: bin.count,
            predicted: bin.predicted / bin.count as f64,
            observed: bin.observed / bin.count as f64,
        });
        (count > 0).then(|| Reliability {
            count,
            expected_calibration_error: error / count as f64,
            bins: bins.collect(),
        })
    }

    /// Adds `count` occurrences of a token. `local` returns the number of its activations in a layer that are local at
    /// a place, and their total.
    fn add_token(
        &mut self,
        tables: &Tables,
        layers: usize,
        token: TokenId,
        count: u64,
        local: impl Fn(LayerIdx, usize) -> (u64, u64),
    ) {
        let layers = LayerIdx::all(layers);
        let top_k = u64::from(tables.model().top_k);
        if tables.attention() == Attention::Tp {
            for layer in layers {
                let Some(labels) = tables.token_groups(layer, token) else { continue };
                let (local, all) = local(layer, usize::from(labels.groups[0]));
                if all > 0 {
                    self.add(labels.probs[0].to_f64(), local as f64 / all as f64, all / top_k);
                }
            }
            return;
        }
        let Some(row) = tables.token_row(token) else { return };
        let best = likeliest(row);
        let (local, all) =
            layers.map(|layer| local(layer, best)).fold((0, 0), |sum, layer| (sum.0 + layer.0, sum.1 + layer.1));
        if all > 0 && row.iter().any(|share| *share != row[best]) {
            self.add(row[best].to_f64(), local as f64 / all as f64, count);
        }
    }
}

/// Compares T's share for each token's likeliest rank (or group in each layer) with the share observed in a trace.
/// Tokens without a preference in T are skipped.
pub(crate) fn trace_reliability(tables: &Tables, hosts: &Hosts, trace: &Trace) -> Option<Reliability> {
    let mut sum = ReliabilitySum::default();
    for request in trace.iter() {
        for (position, token) in request.tokens() {
            sum.add_token(tables, hosts.layers, token, 1, |layer, place| {
                let experts = || request.route(position, layer).into_iter().flat_map(|route| route.experts());
                let is_local = |expert: ExpertId| hosts.is_local(hosts.column(layer.index(), expert.index()), place);
                (experts().filter(|&expert| is_local(expert)).count() as u64, experts().count() as u64)
            });
        }
    }
    sum.finish()
}

/// Compares T's share for each token's likeliest rank (or group in each layer) with the counts of a profile.
pub(crate) fn profile_reliability(tables: &Tables, hosts: &Hosts, profile: &Profile) -> Option<Reliability> {
    let mut sum = ReliabilitySum::default();
    for (token, count) in profile.seen() {
        sum.add_token(tables, hosts.layers, token, count, |layer, place| {
            let row = profile.row(layer, token);
            let is_local = |expert: u16| hosts.is_local(hosts.column(layer.index(), usize::from(expert)), place);
            let counts = row.iter().filter(|(expert, _)| is_local(*expert));
            (counts.map(|(_, count)| u64::from(count)).sum(), row.activations())
        });
    }
    sum.finish()
}
