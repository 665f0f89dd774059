//! The worker's counters, read from its `/metrics`.

use std::collections::BTreeMap;

use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient};
use semmoe_engines::metrics::Sample;

use crate::error::CliError;

/// Counters of one unit, summed as the report needs them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct UnitCounters {
    /// Activations of experts on the token's own rank.
    pub(crate) local_activations: u64,
    /// Activations of experts on another rank.
    pub(crate) remote_activations: u64,
    /// Bytes sent to other ranks by dispatch and combine.
    pub(crate) remote_bytes: u64,
    /// Tokens run, by rank. With attention tp rank 0 counts those of all.
    pub(crate) tokens_by_rank: BTreeMap<u16, u64>,
    /// Steps of rank 0, empty ones included.
    pub(crate) steps: u64,
    /// With attention tp: rows (tokens in MoE layers) by the rank that went on with them.
    pub(crate) rows_by_rank: BTreeMap<u16, u64>,
}

impl UnitCounters {
    /// Reads the counters of the unit at `url`.
    pub(crate) async fn read(client: &HttpClient, url: &BaseUrl) -> Result<Self, CliError> {
        let text = client.get_text(url, "/metrics", &AnswerLimits::default()).await.map_err(CliError::failed)?;
        Self::parse(&text)
            .map_err(|line| CliError::failed(format!("{url}/metrics has a line that is no sample: {line:?}")))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut counters = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let sample = Sample::parse(line).ok_or_else(|| line.to_owned())?;
            // Gauges may be fractional; only whole counters are used here.
            let value = sample.value as u64;
            match (sample.name, sample.label("where")) {
                ("semmoe_activations_total", Some("local")) => counters.local_activations += value,
                ("semmoe_activations_total", Some("remote")) => counters.remote_activations += value,
                ("semmoe_dispatch_bytes_total", Some("remote")) => counters.remote_bytes += value,
                ("semmoe_tokens_total", _) => {
                    *counters.tokens_by_rank.entry(rank_of(&sample, line)?).or_default() += value;
                }
                ("semmoe_steps_total", _) if rank_of(&sample, line)? == 0 => counters.steps += value,
                ("semmoe_attention_rows_total", _) => {
                    *counters.rows_by_rank.entry(rank_of(&sample, line)?).or_default() += value;
                }
                _ => {}
            }
        }
        Ok(counters)
    }

    /// The counts since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            local_activations: self.local_activations - before.local_activations,
            remote_activations: self.remote_activations - before.remote_activations,
            remote_bytes: self.remote_bytes - before.remote_bytes,
            tokens_by_rank: since(&self.tokens_by_rank, &before.tokens_by_rank),
            steps: self.steps - before.steps,
            rows_by_rank: since(&self.rows_by_rank, &before.rows_by_rank),
        }
    }

    /// All tokens run.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens_by_rank.values().sum()
    }

    /// Local activation rate; 0 when nothing was activated.
    pub(crate) fn lar(&self) -> f64 {
        ratio(self.local_activations, self.local_activations + self.remote_activations)
    }

    /// Remote dispatch and combine bytes per token.
    pub(crate) fn remote_bytes_per_token(&self) -> f64 {
        ratio(self.remote_bytes, self.tokens())
    }

    /// Tokens of the busiest rank over the mean; with attention tp rows.
    pub(crate) fn load_max_over_mean(&self) -> f64 {
        let split = self.rows_by_rank.values().any(|rows| *rows > 0);
        let by_rank = if split { &self.rows_by_rank } else { &self.tokens_by_rank };
        let busiest = by_rank.values().max().copied().unwrap_or(0);
        ratio(busiest * by_rank.len() as u64, by_rank.values().sum())
    }
}

fn since(now: &BTreeMap<u16, u64>, before: &BTreeMap<u16, u64>) -> BTreeMap<u16, u64> {
    now.iter().map(|(rank, count)| (*rank, count - before.get(rank).copied().unwrap_or(0))).collect()
}

fn rank_of(sample: &Sample<'_>, line: &str) -> Result<u16, String> {
    sample.label("rank").and_then(|rank| rank.parse().ok()).ok_or_else(|| line.to_owned())
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_over_layers_and_kept_by_rank() {
        let text = "# HELP x\n\
            semmoe_activations_total{rank=\"0\",layer=\"0\",where=\"local\"} 3\n\
            semmoe_activations_total{rank=\"1\",layer=\"0\",where=\"local\"} 1\n\
            semmoe_activations_total{rank=\"1\",layer=\"1\",where=\"remote\"} 12\n\
            semmoe_dispatch_bytes_total{rank=\"0\",where=\"local\"} 9\n\
            semmoe_dispatch_bytes_total{rank=\"0\",where=\"remote\"} 80\n\
            semmoe_tokens_total{rank=\"0\",phase=\"prefill\"} 5\n\
            semmoe_tokens_total{rank=\"0\",phase=\"decode\"} 1\n\
            semmoe_tokens_total{rank=\"1\",phase=\"prefill\"} 2\n";
        let counters = UnitCounters::parse(text).expect("valid samples");
        assert_eq!((counters.local_activations, counters.remote_activations, counters.remote_bytes), (4, 12, 80));
        assert_eq!(counters.lar(), 0.25);
        assert_eq!(counters.remote_bytes_per_token(), 10.0);
        assert_eq!(counters.load_max_over_mean(), 1.5);
        let rows = "semmoe_attention_rows_total{rank=\"0\",by=\"tables\"} 2\n\
            semmoe_attention_rows_total{rank=\"1\",by=\"tables\"} 5\n\
            semmoe_attention_rows_total{rank=\"1\",by=\"even\"} 1\n";
        let split = UnitCounters::parse(&format!("{text}{rows}")).expect("valid samples");
        assert_eq!(split.load_max_over_mean(), 1.5, "of rows: 6 over 4");
        assert_eq!(counters.since(&counters).tokens(), 0);
        assert!(UnitCounters::parse("semmoe_tokens_total{rank=\"x\"} 5").is_err());
    }
}
