//! Latencies in bounded memory: a histogram with three significant digits, plus the exact sum and extremes.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Cap for histogram entries; sum and maximum stay exact.
const MAX_NS: u64 = 3_600_000_000_000;
const SIGNIFICANT_DIGITS: u8 = 3;

/// A collection of durations.
#[derive(Clone, Debug)]
pub(crate) struct Latencies {
    histogram: Histogram<u64>,
    sum_ns: u128,
    max_ns: u64,
}

/// Summary of durations, in milliseconds. Percentiles are at most 0.1% too high; mean and maximum are exact.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LatencySummary {
    /// Number of durations.
    pub count: u64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    #[serde(rename = "p99.9")]
    pub p999: f64,
    /// Maximum.
    pub max: f64,
}

impl Default for Latencies {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, MAX_NS, SIGNIFICANT_DIGITS)
            .expect("the constant bounds are valid: low >= 1, high >= 2 * low, digits <= 5");
        Self { histogram, sum_ns: 0, max_ns: 0 }
    }
}

impl Latencies {
    pub(crate) fn record(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.histogram.saturating_record(ns);
        self.sum_ns += u128::from(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.histogram.add(&other.histogram).expect("histograms with equal bounds can be added");
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Returns the `quantile` of the durations, in milliseconds.
    fn quantile_ms(&self, quantile: f64) -> f64 {
        ms(self.histogram.value_at_quantile(quantile).min(self.max_ns))
    }

    /// Returns the summary; `None` if there are no durations.
    pub(crate) fn summary(&self) -> Option<LatencySummary> {
        let count = self.histogram.len();
        (count > 0).then(|| LatencySummary {
            count,
            mean: self.sum_ns as f64 / count as f64 / 1e6,
            p50: self.quantile_ms(0.5),
            p90: self.quantile_ms(0.9),
            p99: self.quantile_ms(0.99),
            p999: self.quantile_ms(0.999),
            max: ms(self.max_ns),
        })
    }
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The smallest of the sorted values that at least a share `quantile` does not exceed.
    fn plain(sorted: &[u64], quantile: f64) -> f64 {
        let rank = (quantile * sorted.len() as f64).ceil().max(1.0) as usize;
        ms(sorted[rank - 1])
    }

    proptest! {
        #[test]
        fn summaries_equal_a_plain_sort(
            mut values in proptest::collection::vec(prop_oneof![0u64..5_000, 0u64..1_000_000_000, 0u64..MAX_NS], 1..400),
            split in 0usize..400,
        ) {
            let (mut one, mut other) = (Latencies::default(), Latencies::default());
            for (index, value) in values.iter().enumerate() {
                (if index < split { &mut one } else { &mut other }).record(Duration::from_nanos(*value));
            }
            one.merge(&other);
            values.sort_unstable();
            let summary = one.summary().unwrap();
            let mean = values.iter().map(|value| *value as f64).sum::<f64>() / values.len() as f64 / 1e6;
            prop_assert!((summary.mean - mean).abs() <= 1e-9 * mean);
            prop_assert_eq!(summary.max, ms(values[values.len() - 1]));
            prop_assert_eq!(summary.count, values.len() as u64);
            for (found, quantile) in [(summary.p50, 0.5), (summary.p90, 0.9), (summary.p99, 0.99), (summary.p999, 0.999)] {
                let expected = plain(&values, quantile);
                prop_assert!(found >= expected && found <= expected * 1.001 + 1e-6, "{found} for {expected} at {quantile}");
            }
        }
    }

    #[test]
    fn nothing_and_too_much() {
        assert_eq!(Latencies::default().summary(), None);
        let mut latencies = Latencies::default();
        latencies.record(Duration::MAX);
        latencies.record(Duration::from_secs(7200));
        assert_eq!(latencies.summary().unwrap().max, u64::MAX as f64 / 1e6);
    }
}
