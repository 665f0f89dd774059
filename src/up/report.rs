//! What `up --check` prints.

use std::fmt;

use serde::Serialize;

/// One configuration, as measured.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Measured {
    /// Local activation rate, from the worker's counters.
    pub(crate) lar: f64,
    /// Dispatch and combine bytes to other ranks per token run.
    pub(crate) remote_bytes_per_token: f64,
    /// Tokens of the busiest rank over the mean.
    pub(crate) load_max_over_mean: f64,
    /// Tokens run (prefill and decode) per second of wall time.
    pub(crate) tokens_per_second: f64,
    /// Requests served.
    pub(crate) requests: usize,
    /// Tokens run.
    pub(crate) tokens: u64,
}

/// Contiguous placement with round robin against solved tables with affinity.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CheckReport {
    /// What the two are called for readers.
    #[serde(skip)]
    pub(crate) titles: [&'static str; 2],
    /// Contiguous placement, `round_robin`; with attention tp rows in their order.
    pub(crate) baseline: Measured,
    /// The solved placement, `affinity`; with attention tp rows shuffled by the tables.
    pub(crate) affinity: Measured,
    /// What `evaluate` predicts for `affinity` from the recorded routing of the same held-out prompts.
    pub(crate) predicted_lar: f64,
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (b, a) = (&self.baseline, &self.affinity);
        let [b_title, a_title] = self.titles;
        writeln!(f, "{} held-out requests, {} and {} tokens", a.requests, b.tokens, a.tokens)?;
        writeln!(f, "{:<26} {:>24} {:>20} {:>8}", "", b_title, a_title, "ratio")?;
        let mut row = |name: &str, before: f64, after: f64, digits: usize| {
            write!(f, "{name:<26} {before:>24.digits$} {after:>20.digits$}")?;
            // One rank sends nothing to others, with or without tables.
            if before > 0.0 { writeln!(f, " {:>8.2}", after / before) } else { writeln!(f, " {:>8}", "-") }
        };
        row("local activation rate", b.lar, a.lar, 4)?;
        row("remote bytes per token", b.remote_bytes_per_token, a.remote_bytes_per_token, 0)?;
        row("load, max over mean", b.load_max_over_mean, a.load_max_over_mean, 3)?;
        row("tokens per second", b.tokens_per_second, a.tokens_per_second, 0)?;
        write!(f, "{:<26} {:>24} {:>20.4}", "predicted rate", "", self.predicted_lar)
    }
}
