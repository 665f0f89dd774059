//! The report of `up --check`.

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

/// The prediction of `evaluate` for tables, from the recorded routing of the same held-out prompts.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Predicted {
    /// Local activation rate under `affinity`; with attention tp of rows in even parts.
    pub(crate) lar: f64,
    /// Local activation rate if each token were by itself on its best rank; with attention tp as `lar`.
    pub(crate) token_lar: f64,
    /// Activations that the busiest rank's experts compute over the mean, mean over layers.
    pub(crate) expert_load_max_over_mean: f64,
}

/// The same with replicas.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct WithReplicas {
    /// Slots of a layer beyond one for each expert.
    pub(crate) redundant: u16,
    pub(crate) measured: Measured,
    pub(crate) predicted: Predicted,
}

/// Contiguous placement with round robin against solved tables with affinity.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CheckReport {
    /// The titles of the two, for readers.
    #[serde(skip)]
    pub(crate) titles: [&'static str; 2],
    /// Contiguous placement, `round_robin`; with attention tp rows in their order.
    pub(crate) baseline: Measured,
    /// The solved placement, `affinity`; with attention tp rows shuffled by the tables.
    pub(crate) affinity: Measured,
    /// `predicted.lar`.
    pub(crate) predicted_lar: f64,
    /// Of `affinity`.
    pub(crate) predicted: Predicted,
    /// The solved placement with replicas, `affinity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) replicas: Option<WithReplicas>,
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (b, a) = (&self.baseline, &self.affinity);
        let [b_title, a_title] = self.titles;
        writeln!(f, "{} held-out requests, {} and {} tokens", a.requests, b.tokens, a.tokens)?;
        write!(f, "{:<26} {:>24} {:>20} {:>8}", "", b_title, a_title, "ratio")?;
        if let Some(replicas) = &self.replicas {
            write!(f, " {:>20} {:>8}", format!("{} more slots", replicas.redundant), "ratio")?;
        }
        writeln!(f)?;
        let mut row = |name: &str, of: fn(&Measured) -> f64, digits: usize| {
            let before = of(b);
            write!(f, "{name:<26} {before:>24.digits$}")?;
            for after in std::iter::once(a).chain(self.replicas.as_ref().map(|replicas| &replicas.measured)).map(of) {
                write!(f, " {after:>20.digits$}")?;
                // One rank sends nothing to others, with or without tables.
                if before > 0.0 { write!(f, " {:>8.2}", after / before)? } else { write!(f, " {:>8}", "-")? }
            }
            writeln!(f)
        };
        row("local activation rate", |measured| measured.lar, 4)?;
        row("remote bytes per token", |measured| measured.remote_bytes_per_token, 0)?;
        row("load, max over mean", |measured| measured.load_max_over_mean, 3)?;
        row("tokens per second", |measured| measured.tokens_per_second, 0)?;
        let mut row = |name: &str, of: fn(&Predicted) -> f64, last: &str| {
            write!(f, "{name:<26} {:>24} {:>20.4}", "", of(&self.predicted))?;
            if let Some(replicas) = &self.replicas {
                write!(f, " {:>8} {:>20.4}", "", of(&replicas.predicted))?;
            }
            f.write_str(last)
        };
        row("predicted rate", |predicted| predicted.lar, "\n")?;
        row("predicted, token by token", |predicted| predicted.token_lar, "\n")?;
        row("predicted expert load", |predicted| predicted.expert_load_max_over_mean, "")
    }
}
