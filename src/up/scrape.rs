//! The worker's counters, read from its `/metrics`.

use std::collections::BTreeMap;
use std::time::Duration;

use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient};
use semmoe_engines::metrics::{Growth, NoSample, max_over_mean};

use crate::error::CliError;

/// Sampling interval, and the metrics page that each sample reads.
const SAMPLE_EVERY: Duration = Duration::from_millis(20);
const SAMPLED_PAGE: &str = "/metrics?name[]=semmoe_requests_in_flight&name[]=semmoe_kv_pages";

/// A count for each rank.
pub(crate) type ByRank = BTreeMap<u16, f64>;

/// Fetches the metrics page of the unit at `url`.
pub(crate) async fn page(client: &HttpClient, url: &BaseUrl) -> Result<String, CliError> {
    client.get_text(url, "/metrics", &AnswerLimits::default()).await.map_err(CliError::failed)
}

fn no_sample(error: NoSample) -> CliError {
    CliError::failed(format!("the unit's /metrics has {error}"))
}

/// Counters of one unit, aggregated for the report.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct UnitCounters {
    /// Expert activations on the token's own rank, and all activations.
    local: f64,
    activations: f64,
    /// Dispatch and combine bytes sent to other ranks.
    remote_bytes: f64,
    /// Prompt tokens computed, by rank. With attention tp, rank 0 counts all of them.
    pub(crate) prefill: ByRank,
    /// Generated tokens, by rank.
    pub(crate) decode: ByRank,
    /// Steps by rank, including empty ones; equal on all ranks.
    steps: ByRank,
    /// With attention tp: rows (tokens in MoE layers) by the rank that processed them after attention.
    pub(crate) rows: ByRank,
}

impl UnitCounters {
    /// Computes the difference between two metrics pages of a unit; with an empty `before`, the totals in `after`.
    pub(crate) fn between(before: String, after: String) -> Result<Self, CliError> {
        Growth::between(before, after).and_then(|growth| Self::of(&growth)).map_err(no_sample)
    }

    fn of(growth: &Growth) -> Result<Self, NoSample> {
        let by_rank = |name, labels: &[_]| growth.by("rank", name, labels);
        Ok(Self {
            local: growth.sum("semmoe_activations_total", &[("where", "local")])?,
            activations: growth.sum("semmoe_activations_total", &[])?,
            remote_bytes: growth.sum("semmoe_dispatch_bytes_total", &[("where", "remote")])?,
            prefill: by_rank("semmoe_tokens_total", &[("phase", "prefill")])?,
            decode: by_rank("semmoe_tokens_total", &[("phase", "decode")])?,
            steps: by_rank("semmoe_steps_total", &[])?,
            rows: by_rank("semmoe_attention_rows_total", &[])?,
        })
    }

    /// Mean tokens per step over all ranks.
    pub(crate) fn tokens_per_step(&self) -> f64 {
        ratio(self.tokens(), self.steps.values().copied().fold(0.0, f64::max))
    }

    /// Total tokens computed.
    pub(crate) fn tokens(&self) -> f64 {
        self.prefill.values().chain(self.decode.values()).sum()
    }

    /// Local activation rate; 0 without any activations.
    pub(crate) fn lar(&self) -> f64 {
        ratio(self.local, self.activations)
    }

    /// Remote dispatch and combine bytes per token.
    pub(crate) fn remote_bytes_per_token(&self) -> f64 {
        ratio(self.remote_bytes, self.tokens())
    }
}

/// Running sequences and KV cache usage, sampled during a run.
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
    /// Samples periodically until dropped; returns only on an error.
    pub(crate) async fn go_on(&mut self, client: &HttpClient, url: &BaseUrl) -> CliError {
        loop {
            let page = client.get_text(url, SAMPLED_PAGE, &AnswerLimits::default()).await;
            if let Err(error) = page.map_err(CliError::failed).and_then(|page| self.add(page).map_err(no_sample)) {
                return error;
            }
            tokio::time::sleep(SAMPLE_EVERY).await;
        }
    }

    fn add(&mut self, page: String) -> Result<(), NoSample> {
        let now = Growth::between(String::new(), page)?;
        self.running.add(max_over_mean(&now.by("rank", "semmoe_requests_in_flight", &[])?));
        self.held_pages.add(max_over_mean(&now.by("rank", "semmoe_kv_pages", &[("state", "used")])?));
        Ok(())
    }

    /// Maximum over mean of sequences across ranks, averaged over the samples with any sequences.
    pub(crate) fn running(&self) -> Option<f64> {
        self.running.get()
    }

    /// Maximum over mean of used KV cache pages across ranks, averaged over the samples with any used pages.
    pub(crate) fn held_pages(&self) -> Option<f64> {
        self.held_pages.get()
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(page: &str) -> Result<UnitCounters, CliError> {
        UnitCounters::between(String::new(), page.to_owned())
    }

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
            semmoe_tokens_total{rank=\"1\",phase=\"prefill\"} 2\n\
            semmoe_steps_total{rank=\"0\"} 4\n";
        let counters = whole(text).expect("valid samples");
        assert_eq!((counters.lar(), counters.remote_bytes_per_token()), (0.25, 10.0));
        assert_eq!((counters.tokens(), counters.tokens_per_step()), (8.0, 2.0));
        assert_eq!(max_over_mean(&counters.prefill), Some(10.0 / 7.0));
        assert_eq!(max_over_mean(&counters.decode), Some(1.0), "of the ranks that generate");
        let rows = "semmoe_attention_rows_total{rank=\"0\",by=\"tables\"} 2\n\
            semmoe_attention_rows_total{rank=\"1\",by=\"tables\"} 5\n\
            semmoe_attention_rows_total{rank=\"1\",by=\"even\"} 1\n";
        let split = whole(&format!("{text}{rows}")).expect("valid samples");
        assert_eq!(max_over_mean(&split.rows), Some(1.5), "6 over 4");
        let nothing = UnitCounters::between(text.to_owned(), text.to_owned()).expect("valid samples");
        assert_eq!((nothing.tokens(), nothing.lar()), (0.0, 0.0));
        assert!(whole("semmoe_tokens_total{rank=\"x\",phase=\"decode\"} 5").is_err());
    }

    #[test]
    fn samples_are_averaged_where_anything_runs() {
        let mut samples = Samples::default();
        for running in [3, 0] {
            let page = format!(
                "semmoe_requests_in_flight{{rank=\"0\"}} {running}\nsemmoe_requests_in_flight{{rank=\"1\"}} 0\n\
                 semmoe_kv_pages{{rank=\"0\",state=\"free\"}} 9\nsemmoe_kv_pages{{rank=\"0\",state=\"used\"}} 4\n"
            );
            samples.add(page).expect("valid samples");
        }
        assert_eq!((samples.running(), samples.held_pages()), (Some(2.0), Some(1.0)));
    }
}
