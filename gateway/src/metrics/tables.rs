//! Reloads of tables: how they end, and how long the swap itself takes.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::OutcomeLabels;

/// Swaps take microseconds; what shows in requests begins at a millisecond.
const SWAP_SECONDS: [f64; 9] = [1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0];

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
    /// CPU time taken. Readers take no lock and never sleep for the state, so this is their whole cost.
    pub(crate) cpu: Histogram,
}

impl Default for TablesMetrics {
    fn default() -> Self {
        Self {
            reloads: Family::default(),
            swap_seconds: Histogram::new(SWAP_SECONDS),
            wait_seconds: Family::new_with_constructor(|| Histogram::new(SWAP_SECONDS)),
        }
    }
}

impl TablesMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("table_reloads", "Reloads of tables, by outcome", self.reloads.clone());
        registry.register(
            "tables_swap_seconds",
            "Time from the completion of a state with other tables until requests get it; no request waits for it",
            self.swap_seconds.clone(),
        );
        registry.register(
            "swap_wait_seconds",
            "Time that readers took to get the state while another one was built and swapped in, by wall clock and thread clock",
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
