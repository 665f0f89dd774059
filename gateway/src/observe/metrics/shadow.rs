//! Gauges of a shadow policy's gain so far.

use std::sync::atomic::AtomicU64;

use semmoe_routing::{Report, ReportSide};

use super::labels::{Family, Gauge};

// One side of a comparison.
labels!(ShadowLabels { model: String, policy: &'static str });

type Shares = Family<ShadowLabels, Gauge<f64, AtomicU64>>;

metrics! {
    pub(crate) struct ShadowMetrics {
        requests: Family<ShadowLabels, Gauge<u64, AtomicU64>>,
            "shadow_requests", "Requests placed by both the acting and the shadow policy";
        local_share: Shares, "shadow_local_share", "Expected local share of the scored tokens, by policy";
        cached_share: Shares,
            "shadow_cached_share", "Fraction of prompt tokens assumed to be cached on the chosen rank, by policy";
        imbalance: Shares, "shadow_tokens_max_over_mean", "Busiest rank's tokens relative to the mean, by policy";
    }
}

impl ShadowMetrics {
    pub(crate) fn set(&self, model: &str, acting: &'static str, watched: &'static str, report: &Report) {
        for (policy, side) in [(acting, report.acting), (watched, report.watched)] {
            let labels = ShadowLabels { model: model.to_owned(), policy };
            self.requests.get_or_create(&labels).set(report.requests);
            let ReportSide { local_share, cached_share, tokens_max_over_mean } = side;
            self.imbalance.get_or_create(&labels).set(tokens_max_over_mean);
            for (family, share) in [(&self.local_share, local_share), (&self.cached_share, cached_share)] {
                if let Some(share) = share {
                    family.get_or_create(&labels).set(share);
                }
            }
        }
    }
}
