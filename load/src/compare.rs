//! Compares two servers, measured in alternating blocks, by the ratios of adjacent blocks.
//!
//! The speed of a machine under other load changes from minute to minute. Consecutive blocks run under nearly the same
//! conditions, so their ratio is more reliable than a comparison of two long runs, and the spread of the ratios shows
//! how reliable it is.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::Report;

/// One round: a block of the first server and one of the second, in either order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Round {
    /// The block of `--url`.
    pub first: Report,
    /// The block of `--compare`.
    pub second: Report,
}

/// The rounds of a comparison, and the ratios computed from them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Whether the user stopped the run; an incomplete round is excluded.
    pub stopped: bool,
    /// Ratios for each figure that all rounds measured.
    pub ratios: Vec<Ratio>,
    /// The rounds themselves.
    pub rounds: Vec<Round>,
}

/// One figure of the second server divided by that of the first, round by round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// The figure's name.
    pub figure: &'static str,
    /// The median of the first server's blocks.
    pub first: f64,
    /// The median of the second server's blocks.
    pub second: f64,
    /// The median of the rounds' ratios.
    pub median: f64,
    /// The smallest ratio.
    pub least: f64,
    /// The largest ratio.
    pub greatest: f64,
    /// Number of rounds in which the second server's figure was larger.
    pub rounds_above: usize,
}

/// Reads a figure from a report; `None` if the run did not measure it.
type Figure = fn(&Report) -> Option<f64>;

const FIGURES: [(&str, Figure); 12] = [
    ("requests/s", |report| Some(report.requests_per_second)),
    ("output tokens/s", |report| Some(report.output_tokens.per_second)),
    ("goodput, requests/s", |report| report.goodput.map(|goodput| goodput.requests_per_second)),
    ("first token, mean ms", |report| report.ttft_ms.map(|ms| ms.mean)),
    ("first token, p50 ms", |report| report.ttft_ms.map(|ms| ms.p50)),
    ("first token, p99 ms", |report| report.ttft_ms.map(|ms| ms.p99)),
    ("inter-token, mean ms", |report| report.inter_token_ms.map(|ms| ms.mean)),
    ("inter-token, p99 ms", |report| report.inter_token_ms.map(|ms| ms.p99)),
    ("longest gap, p99 ms", |report| report.longest_gap_ms.map(|ms| ms.p99)),
    ("end to end, mean ms", |report| report.e2e_ms.map(|ms| ms.mean)),
    ("end to end, p50 ms", |report| report.e2e_ms.map(|ms| ms.p50)),
    ("end to end, p99 ms", |report| report.e2e_ms.map(|ms| ms.p99)),
];

impl Comparison {
    pub(crate) fn new(rounds: Vec<Round>, stopped: bool) -> Self {
        let ratios = FIGURES.iter().filter_map(|(name, figure)| ratio(name, *figure, &rounds)).collect();
        Self { stopped, ratios, rounds }
    }

    /// Completed and failed requests of each server.
    pub fn ok_and_failed(&self) -> [(u64, u64); 2] {
        let sum = |side: fn(&Round) -> &Report| {
            self.rounds
                .iter()
                .map(side)
                .fold((0, 0), |(ok, failed), report| (ok + report.requests.ok, failed + report.requests.failed))
        };
        [sum(|round| &round.first), sum(|round| &round.second)]
    }

    /// Failed requests of each server, by kind.
    pub(crate) fn errors(&self) -> [BTreeMap<&str, u64>; 2] {
        let mut sums = [BTreeMap::new(), BTreeMap::new()];
        for round in &self.rounds {
            for (sum, report) in sums.iter_mut().zip([&round.first, &round.second]) {
                for error in &report.errors {
                    *sum.entry(error.kind.as_str()).or_default() += error.count;
                }
            }
        }
        sums
    }
}

/// Computes a figure's ratios; `None` unless every round has a positive figure for both servers.
fn ratio(name: &'static str, figure: Figure, rounds: &[Round]) -> Option<Ratio> {
    let pairs: Option<Vec<(f64, f64)>> = rounds
        .iter()
        .map(|round| figure(&round.first).zip(figure(&round.second)).filter(|(a, b)| *a > 0.0 && *b > 0.0))
        .collect();
    let pairs = pairs.filter(|pairs| !pairs.is_empty())?;
    let ratios: Vec<f64> = pairs.iter().map(|(a, b)| b / a).collect();
    Some(Ratio {
        figure: name,
        first: median(pairs.iter().map(|(a, _)| *a).collect()),
        second: median(pairs.iter().map(|(_, b)| *b).collect()),
        least: ratios.iter().copied().fold(f64::INFINITY, f64::min),
        greatest: ratios.iter().copied().fold(0.0, f64::max),
        rounds_above: ratios.iter().filter(|ratio| **ratio > 1.0).count(),
        median: median(ratios),
    })
}

/// Returns the median of at least one value; for an even count, the mean of the middle two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) { f64::midpoint(values[middle - 1], values[middle]) } else { values[middle] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        for (values, expected) in [(vec![3.0], 3.0), (vec![9.0, 1.0, 2.0], 2.0), (vec![4.0, 1.0, 2.0, 9.0], 3.0)] {
            assert_eq!(median(values), expected);
        }
    }
}
