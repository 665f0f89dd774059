//! Spans of traced requests, and what became of them.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::OutcomeLabels;

/// Cloning shares the counts.
#[derive(Clone, Default)]
pub(crate) struct SpanMetrics {
    spans: Family<OutcomeLabels, Counter>,
}

impl SpanMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("spans", "Spans of traced requests, by outcome", self.spans.clone());
    }

    /// `exported`, `queue_full`, `failed` (the collector did not take them) or `rejected` (it did not want them).
    pub(crate) fn count(&self, outcome: &'static str, spans: usize) {
        if spans > 0 {
            self.spans.get_or_create(&OutcomeLabels { outcome }).inc_by(spans as u64);
        }
    }

    #[cfg(test)]
    pub(crate) fn counted(&self, outcome: &'static str) -> u64 {
        self.spans.get_or_create(&OutcomeLabels { outcome }).get()
    }
}
