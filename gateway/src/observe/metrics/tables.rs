//! Metrics of table reloads: their outcomes, and the duration of the swap itself.

use std::time::Duration;

use super::labels::{Counter, Family, Histogram, Histograms, OutcomeLabels};

/// Buckets for the swap time. Swaps take microseconds; above a millisecond they affect requests.
const SWAP_SECONDS: [f64; 9] = [1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0];

labels!(ClockLabels { clock: &'static str });

/// How long readers took to obtain the snapshot.
pub(crate) struct Waits {
    /// Wall time, including time when the thread was descheduled.
    pub(crate) wall: Histogram,
    /// CPU time. Readers take no lock and never sleep while obtaining the snapshot, so this is their entire cost.
    pub(crate) cpu: Histogram,
}

metrics! {
    pub(crate) struct TablesMetrics {
        reloads: Family<OutcomeLabels, Counter>, "table_reloads", "Reloads of tables, by outcome";
        swap_seconds: Histogram = Histogram::new(SWAP_SECONDS),
            "tables_swap_seconds",
            "Time from completing a state with new tables until requests use it; no request waits for it";
        wait_seconds: Histograms<ClockLabels> = Family::new_with_constructor(|| Histogram::new(SWAP_SECONDS)),
            "swap_wait_seconds",
            "Time to obtain the state while another one is built and swapped in, by wall clock and thread clock";
    }
}

impl TablesMetrics {
    /// Counts a reload by outcome: `ok`, `unchanged`, `refused` (no match), `invalid`, `denied` (the path), `failed`
    /// (anything else).
    pub(crate) fn reload(&self, outcome: &'static str) {
        self.reloads.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    /// Returns the histograms of the readers' times.
    pub(crate) fn waits(&self) -> Waits {
        let of = |clock| self.wait_seconds.get_or_create_owned(&ClockLabels { clock });
        Waits { wall: of("wall"), cpu: of("cpu") }
    }

    pub(crate) fn swapped(&self, took: Duration) {
        self.swap_seconds.observe(took.as_secs_f64());
    }
}
