//! Metrics of pins: whether requests run on the ranks they are pinned to.

use super::labels::{BackendLabels, Counter, Family, Gauge, of_backend};

/// Labels for the reasons not to pin a backend's requests.
const UNPINNED: [&str; 8] =
    ["ranks", "ranks unknown", "layout", "placement", "placement unproven", "tokenizer", "tables", "file"];

labels!(RoundLabels { backend: String, outcome: &'static str });
labels!(ReasonLabels { backend: String, reason: &'static str });

metrics! {
    pub(crate) struct PinMetrics {
        contradicted: Family<BackendLabels, Counter>,
            "pin_ignored", "Requests that ran on a rank other than the pinned one";
        ignored: Family<BackendLabels, Gauge>,
            "backend_pins_ignored", "1 if the backend ignores pins, so that requests are routed by load";
        unpinned: Family<ReasonLabels, Gauge>,
            "backend_unpinned",
            "1 while requests to the backend are routed by load, by what is unknown or does not match: its ranks, layout, placement, tokenizer, tables or a file";
        refused: Family<BackendLabels, Counter>,
            "pins_refused",
            "Requests and probes that the backend refused because it has no such rank; requests are resent unpinned";
        rounds: Family<RoundLabels, Counter>,
            "pin_rounds", "Rounds of pin probes, by outcome: agreed, contradicted, refused, inconclusive";
    }
}

impl PinMetrics {
    /// Counts requests that ran on a rank other than the pinned one.
    pub(crate) fn contradicted(&self, backend: &str, requests: u64) {
        if requests > 0 {
            self.contradicted.get_or_create(&of_backend(backend)).inc_by(requests);
        }
    }

    /// Sets whether pins are ignored.
    pub(crate) fn ignored(&self, backend: &str, ignored: bool) {
        self.ignored.get_or_create(&of_backend(backend)).set(i64::from(ignored));
    }

    /// Sets why requests to the backend are not pinned.
    pub(crate) fn unpinned(&self, backend: &str, reason: Option<&'static str>) {
        for reason in UNPINNED {
            self.unpinned.remove(&ReasonLabels { backend: backend.to_owned(), reason });
        }
        if let Some(reason) = reason {
            self.unpinned.get_or_create(&ReasonLabels { backend: backend.to_owned(), reason }).set(1);
        }
    }

    /// Counts a pin to a rank that does not exist.
    pub(crate) fn refused(&self, backend: &str) {
        self.refused.get_or_create(&of_backend(backend)).inc();
    }

    /// Counts a round of probes.
    pub(crate) fn round(&self, backend: &str, outcome: &'static str) {
        self.rounds.get_or_create(&RoundLabels { backend: backend.to_owned(), outcome }).inc();
    }

    /// Removes the gauges of a departed backend; its counters remain.
    pub(super) fn forget(&self, labels: &BackendLabels) {
        self.ignored.remove(labels);
        self.unpinned(&labels.backend, None);
    }
}
