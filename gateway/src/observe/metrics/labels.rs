//! Labels and metric types shared by several groups.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::histogram::linear_buckets;
pub(super) use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram};

// One backend.
labels!(BackendLabels { backend: String });

labels!(OutcomeLabels { outcome: &'static str });

labels!(ModelLabels { model: String });

labels!(ReasonLabels { reason: &'static str });

/// Sums expected values, which are not integers.
pub(super) type RealCounter = Counter<f64, AtomicU64>;

/// Histograms with custom buckets.
pub(super) type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// Creates a histogram of fractions, in steps of 5%.
pub(super) fn shares() -> Histogram {
    Histogram::new(linear_buckets(0.05, 0.05, 20))
}

pub(super) fn of_backend(backend: &str) -> BackendLabels {
    BackendLabels { backend: backend.to_owned() }
}

/// Formats a rank as a label.
pub(crate) fn rank_label(rank: Option<u16>) -> String {
    rank.map_or_else(|| "any".to_owned(), |rank| rank.to_string())
}
