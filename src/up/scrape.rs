//! The worker's counters, read from its `/metrics`.

use std::collections::BTreeMap;
use std::time::Duration;

use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient};
use semmoe_engines::metrics::Sample;

use crate::error::CliError;

/// Interval between samples, and the page that they read.
const SAMPLE_EVERY: Duration = Duration::from_millis(20);
const SAMPLED_PAGE: &str = "/metrics?name[]=semmoe_requests_in_flight&name[]=semmoe_kv_pages";

/// Counters of one unit, summed as the report needs them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct UnitCounters {
    /// Activations of experts on the token's own rank.
    pub(crate) local_activations: u64,
    /// Activations of experts on another rank.
    pub(crate) remote_activations: u64,
    /// Bytes sent to other ranks by dispatch and combine.
    pub(crate) remote_bytes: u64,
    /// Prompt tokens run, by rank. With attention tp rank 0 counts all of them.
    pub(crate) prefill: ByRank,
    /// Generated tokens, by rank.
    pub(crate) decode: ByRank,
    /// Steps, including empty ones; equal for all ranks.
    pub(crate) steps: ByRank,
    /// With attention tp: rows (tokens in MoE layers) by the rank that continued with them.
    pub(crate) rows: ByRank,
    /// Sequences currently running or waiting, by rank.
    pub(crate) running: ByRank,
    /// Pages of the key-value cache currently held by sequences, by rank.
    pub(crate) held_pages: ByRank,
}

/// One count per rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ByRank(BTreeMap<u16, u64>);

impl ByRank {
    fn add(&mut self, rank: u16, count: u64) {
        *self.0.entry(rank).or_default() += count;
    }

    fn sum(&self) -> u64 {
        self.0.values().sum()
    }

    fn since(&self, before: &Self) -> Self {
        Self(self.0.iter().map(|(rank, count)| (*rank, count - before.0.get(rank).copied().unwrap_or(0))).collect())
    }

    /// The largest count over the mean; `None` if all are zero.
    pub(crate) fn max_over_mean(&self) -> Option<f64> {
        let most = self.0.values().max().copied().unwrap_or(0);
        (most > 0).then(|| ratio(most * self.0.len() as u64, self.sum()))
    }
}

impl UnitCounters {
    /// Reads the counters of the unit at `url`.
    pub(crate) async fn read(client: &HttpClient, url: &BaseUrl) -> Result<Self, CliError> {
        Self::read_page(client, url, "/metrics").await
    }

    async fn read_page(client: &HttpClient, url: &BaseUrl, page: &str) -> Result<Self, CliError> {
        let text = client.get_text(url, page, &AnswerLimits::default()).await.map_err(CliError::failed)?;
        Self::parse(&text)
            .map_err(|line| CliError::failed(format!("{url}/metrics has a line that is no sample: {line:?}")))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut counters = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let sample = Sample::parse(line).ok_or_else(|| line.to_owned())?;
            // Gauges may be fractional; only integer counters are used here.
            let value = sample.value as u64;
            let kind =
                ["where", "phase", "state"].into_iter().find_map(|label| sample.label(label)).unwrap_or_default();
            if let Some(total) = counters.total(sample.name, kind) {
                *total += value;
            } else if let Some(by_rank) = counters.by_rank(sample.name, kind) {
                by_rank.add(rank_of(&sample, line)?, value);
            }
        }
        Ok(counters)
    }

    fn total(&mut self, name: &str, kind: &str) -> Option<&mut u64> {
        match (name, kind) {
            ("semmoe_activations_total", "local") => Some(&mut self.local_activations),
            ("semmoe_activations_total", "remote") => Some(&mut self.remote_activations),
            ("semmoe_dispatch_bytes_total", "remote") => Some(&mut self.remote_bytes),
            _ => None,
        }
    }

    fn by_rank(&mut self, name: &str, kind: &str) -> Option<&mut ByRank> {
        match (name, kind) {
            ("semmoe_tokens_total", "prefill") => Some(&mut self.prefill),
            ("semmoe_tokens_total", "decode") => Some(&mut self.decode),
            ("semmoe_steps_total", _) => Some(&mut self.steps),
            ("semmoe_attention_rows_total", _) => Some(&mut self.rows),
            ("semmoe_requests_in_flight", _) => Some(&mut self.running),
            ("semmoe_kv_pages", "used") => Some(&mut self.held_pages),
            _ => None,
        }
    }

    /// The counts since `before`; gauges are unchanged.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            local_activations: self.local_activations - before.local_activations,
            remote_activations: self.remote_activations - before.remote_activations,
            remote_bytes: self.remote_bytes - before.remote_bytes,
            steps: self.steps.since(&before.steps),
            prefill: self.prefill.since(&before.prefill),
            decode: self.decode.since(&before.decode),
            rows: self.rows.since(&before.rows),
            ..self.clone()
        }
    }

    /// Mean tokens of all ranks per step.
    pub(crate) fn tokens_per_step(&self) -> f64 {
        ratio(self.tokens(), self.steps.0.values().max().copied().unwrap_or(0))
    }

    /// Total tokens run.
    pub(crate) fn tokens(&self) -> u64 {
        self.prefill.sum() + self.decode.sum()
    }

    /// Local activation rate; 0 if nothing was activated.
    pub(crate) fn lar(&self) -> f64 {
        ratio(self.local_activations, self.local_activations + self.remote_activations)
    }

    /// Remote dispatch and combine bytes per token.
    pub(crate) fn remote_bytes_per_token(&self) -> f64 {
        ratio(self.remote_bytes, self.tokens())
    }
}

/// Running sequences and the KV cache, sampled during a run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples {
    running: Mean,
    held_pages: Mean,
}

#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    sum: f64,
    count: u32,
}

impl Mean {
    fn add(&mut self, value: Option<f64>) {
        self.sum += value.unwrap_or(0.0);
        self.count += u32::from(value.is_some());
    }

    fn get(self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}

impl Samples {
    /// Samples until the caller drops it; returns only on an error.
    pub(crate) async fn go_on(&mut self, client: &HttpClient, url: &BaseUrl) -> CliError {
        loop {
            match UnitCounters::read_page(client, url, SAMPLED_PAGE).await {
                Ok(counters) => self.add(&counters),
                Err(error) => return error,
            }
            tokio::time::sleep(SAMPLE_EVERY).await;
        }
    }

    fn add(&mut self, counters: &UnitCounters) {
        self.running.add(counters.running.max_over_mean());
        self.held_pages.add(counters.held_pages.max_over_mean());
    }

    /// Sequences of the fullest rank over the mean, averaged over the samples that found any.
    pub(crate) fn running(&self) -> Option<f64> {
        self.running.get()
    }

    /// Held pages of the fullest rank over the mean, averaged over the samples that found any.
    pub(crate) fn held_pages(&self) -> Option<f64> {
        self.held_pages.get()
    }
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
        assert_eq!(counters.prefill.max_over_mean(), Some(10.0 / 7.0));
        assert_eq!(counters.decode.max_over_mean(), Some(1.0), "of the ranks that generate");
        let rows = "semmoe_attention_rows_total{rank=\"0\",by=\"tables\"} 2\n\
            semmoe_attention_rows_total{rank=\"1\",by=\"tables\"} 5\n\
            semmoe_attention_rows_total{rank=\"1\",by=\"even\"} 1\n";
        let split = UnitCounters::parse(&format!("{text}{rows}")).expect("valid samples");
        assert_eq!(split.rows.max_over_mean(), Some(1.5), "6 over 4");
        let held = "semmoe_requests_in_flight{rank=\"0\"} 3\nsemmoe_requests_in_flight{rank=\"1\"} 0\n\
            semmoe_kv_pages{rank=\"0\",state=\"free\"} 9\nsemmoe_kv_pages{rank=\"0\",state=\"used\"} 4\n";
        let held = UnitCounters::parse(held).expect("valid samples");
        assert_eq!((held.running.max_over_mean(), held.held_pages.max_over_mean()), (Some(2.0), Some(1.0)));
        assert_eq!(held.since(&held).running, held.running, "a gauge");
        assert_eq!(counters.since(&counters).tokens(), 0);
        assert!(UnitCounters::parse("semmoe_tokens_total{rank=\"x\",phase=\"decode\"} 5").is_err());
    }
}
