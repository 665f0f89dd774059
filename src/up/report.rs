//! The report of `up --check`.

use std::fmt;
use std::time::Duration;

use semmoe_engines::metrics::max_over_mean;
use serde::Serialize;

use super::scrape::{ByRank, Samples, UnitCounters};

/// Measurements of one configuration, with and without streaming.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Measured {
    /// Requests served in each mode.
    pub(crate) requests: usize,
    /// Streamed answers.
    #[serde(flatten)]
    pub(crate) streamed: Traffic,
    /// Responses that are not streamed.
    #[serde(rename = "not_streamed")]
    pub(crate) whole: Traffic,
}

/// Measurements of one kind of traffic from the worker's counters. `max_over_mean` is the maximum over ranks divided by
/// the mean.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Traffic {
    /// Local activation rate.
    pub(crate) lar: f64,
    /// Dispatch and combine bytes sent to other ranks per token.
    pub(crate) remote_bytes_per_token: f64,
    /// Balance of prompt tokens, or of rows with attention tp.
    pub(crate) prefill_max_over_mean: f64,
    /// Balance of generated tokens, or of rows with attention tp.
    pub(crate) decode_max_over_mean: f64,
    /// Sequences running or waiting, averaged over time.
    pub(crate) running_max_over_mean: f64,
    /// KV cache pages used by sequences, averaged over time.
    pub(crate) kv_max_over_mean: f64,
    /// Tokens computed (prefill and decode) per second of wall time.
    pub(crate) tokens_per_second: f64,
    /// Tokens run.
    pub(crate) tokens: u64,
    /// Mean tokens per step over all ranks.
    pub(crate) tokens_per_step: f64,
}

impl Traffic {
    /// Computes the figures for a run that took `took`.
    pub(crate) fn of(counters: &UnitCounters, samples: &Samples, took: Duration) -> Self {
        let even = |by_rank: &ByRank| max_over_mean(&counters.rows).or(max_over_mean(by_rank)).unwrap_or(1.0);
        Self {
            lar: counters.lar(),
            remote_bytes_per_token: counters.remote_bytes_per_token(),
            prefill_max_over_mean: even(&counters.prefill),
            decode_max_over_mean: even(&counters.decode),
            running_max_over_mean: samples.running().unwrap_or(1.0),
            kv_max_over_mean: samples.held_pages().unwrap_or(1.0),
            tokens_per_second: counters.tokens() / took.as_secs_f64(),
            tokens: counters.tokens() as u64,
            tokens_per_step: counters.tokens_per_step(),
        }
    }
}

/// The figures that `evaluate` predicts for tables, from the recorded routing of the same held-out prompts.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Predicted {
    /// Local activation rate with the `affinity` policy or, with attention tp, with rows split evenly.
    pub(crate) lar: f64,
    /// Local activation rate if each token could be routed to its best rank independently; equal to `lar` with
    /// attention tp.
    pub(crate) token_lar: f64,
    /// Maximum over mean of expert activations across ranks, averaged over layers.
    pub(crate) expert_load_max_over_mean: f64,
}

/// Measurement and prediction for tables with replicas.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct WithReplicas {
    /// Slots per layer in addition to one per expert.
    pub(crate) redundant: u16,
    pub(crate) measured: Measured,
    pub(crate) predicted: Predicted,
}

/// The report: contiguous placement with round robin compared with solved tables and affinity.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CheckReport {
    /// Titles of the two configurations.
    #[serde(skip)]
    pub(crate) titles: [&'static str; 2],
    /// Contiguous placement with `round_robin` or, with attention tp, rows in order.
    pub(crate) baseline: Measured,
    /// Solved placement with `affinity` or, with attention tp, rows shuffled by the tables.
    pub(crate) affinity: Measured,
    /// `predicted.lar`.
    pub(crate) predicted_lar: f64,
    /// Prediction for the `affinity` run.
    pub(crate) predicted: Predicted,
    /// Solved placement with replicas, with `affinity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) replicas: Option<WithReplicas>,
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [b_title, a_title] = self.titles;
        write!(f, "{:<32} {:>24} {:>20} {:>8}", "", b_title, a_title, "ratio")?;
        if let Some(replicas) = &self.replicas {
            write!(f, " {:>20} {:>8}", format!("{} more slots", replicas.redundant), "ratio")?;
        }
        writeln!(f)?;
        self.traffic(f, "streamed", |measured| &measured.streamed)?;
        self.traffic(f, "not streamed", |measured| &measured.whole)?;
        let mut row = |name: &str, of: fn(&Predicted) -> f64, last: &str| {
            write!(f, "{name:<32} {:>24} {:>20.4}", "", of(&self.predicted))?;
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

impl CheckReport {
    fn traffic(&self, f: &mut fmt::Formatter<'_>, kind: &str, of: fn(&Measured) -> &Traffic) -> fmt::Result {
        let b = of(&self.baseline);
        let after = || std::iter::once(&self.affinity).chain(self.replicas.as_ref().map(|with| &with.measured)).map(of);
        writeln!(
            f,
            "{} requests, {kind}, {} and {} tokens",
            self.affinity.requests,
            b.tokens,
            of(&self.affinity).tokens
        )?;
        let mut row = |name: &str, of: fn(&Traffic) -> f64, digits: usize| {
            let before = of(b);
            write!(f, "  {name:<30} {before:>24.digits$}")?;
            for after in after().map(of) {
                write!(f, " {after:>20.digits$}")?;
                // The baseline is zero with a single rank, which sends no bytes to others.
                if before > 0.0 { write!(f, " {:>8.2}", after / before)? } else { write!(f, " {:>8}", "-")? }
            }
            writeln!(f)
        };
        row("local activation rate", |traffic| traffic.lar, 4)?;
        row("remote bytes per token", |traffic| traffic.remote_bytes_per_token, 0)?;
        row("prompt tokens, max/mean", |traffic| traffic.prefill_max_over_mean, 3)?;
        row("generated tokens, max/mean", |traffic| traffic.decode_max_over_mean, 3)?;
        row("running sequences, max/mean", |traffic| traffic.running_max_over_mean, 3)?;
        row("KV cache in use, max/mean", |traffic| traffic.kv_max_over_mean, 3)?;
        row("tokens per second", |traffic| traffic.tokens_per_second, 0)
    }
}
