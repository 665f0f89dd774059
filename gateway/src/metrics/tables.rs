//! Reloads of tables: how they end, and how long the swap itself takes.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use super::OutcomeLabels;

pub(crate) struct TablesMetrics {
    reloads: Family<OutcomeLabels, Counter>,
    swap_seconds: Histogram,
    wait_seconds: Family<ClockLabels, Histogram, fn() -> Histogram>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ClockLabels {
    clock: &'static str,
}

/// How long readers took to get the state.
pub(crate) struct Waits {
    /// As time went by: also while the thread was not running as others were.
    pub(crate) wall: Histogram,
    /// What it took of the processor. Readers take no lock and so never sleep for the state: that is all that it costs them.
    pub(crate) cpu: Histogram,
}

impl Default for TablesMetrics {
    fn default() -> Self {
        // Seconds: 1 us to 1 s, and 0.1 us to 0.8 s, a factor of 2.
        Self {
            reloads: Family::default(),
            swap_seconds: Histogram::new(exponential_buckets(1e-6, 2.0, 21)),
            wait_seconds: Family::new_with_constructor(|| Histogram::new(exponential_buckets(1e-7, 2.0, 24))),
        }
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
        registry.register(
            "swap_wait_seconds",
            "How long readers of the state took to get it while another one was made and swapped in, by the wall's clock and the thread's own",
            self.wait_seconds.clone(),
        );
    }

    /// `ok`, `unchanged`, `refused` (they do not fit), `invalid`, `denied` (the path), `failed` (all else).
    pub(crate) fn reload(&self, outcome: &'static str) {
        self.reloads.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    /// Where the readers' times go.
    pub(crate) fn waits(&self) -> Waits {
        let of = |clock| self.wait_seconds.get_or_create_owned(&ClockLabels { clock });
        Waits { wall: of("wall"), cpu: of("cpu") }
    }

    pub(crate) fn swapped(&self, took: Duration) {
        self.swap_seconds.observe(took.as_secs_f64());
    }
}
