//! Reloads of tables: how they end, and how long the swap itself takes.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use super::OutcomeLabels;

pub(crate) struct TablesMetrics {
    reloads: Family<OutcomeLabels, Counter>,
    swap_seconds: Histogram,
}

impl Default for TablesMetrics {
    fn default() -> Self {
        // Seconds: 1 us to 1 s, a factor of 2.
        Self { reloads: Family::default(), swap_seconds: Histogram::new(exponential_buckets(1e-6, 2.0, 21)) }
    }
}

impl TablesMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("table_reloads", "Reloads of tables, by outcome", self.reloads.clone());
        registry.register(
            "tables_swap_seconds",
            "From the next state with other tables being complete to requests getting it; none waits for that",
            self.swap_seconds.clone(),
        );
    }

    /// `ok`, `unchanged`, `refused` (they do not fit), `invalid`, `denied` (the path), `failed` (all else).
    pub(crate) fn reload(&self, outcome: &'static str) {
        self.reloads.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    pub(crate) fn swapped(&self, took: Duration) {
        self.swap_seconds.observe(took.as_secs_f64());
    }
}
