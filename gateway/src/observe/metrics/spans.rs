//! Metrics of the spans of traced requests.

use super::labels::{Counter, Family, OutcomeLabels};

metrics! {
    /// Clones share the counters.
    #[derive(Clone)]
    pub(crate) struct SpanMetrics {
        spans: Family<OutcomeLabels, Counter>, "spans", "Spans of traced requests, by outcome";
    }
}

impl SpanMetrics {
    /// Counts spans by outcome: `exported`, `queue_full`, `failed` (the collector was unable to accept them) or
    /// `rejected` (it refused them).
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
