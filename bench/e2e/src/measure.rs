//! One block of load on one configuration: at saturation, or open loop.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use semmoe_engines::http::BaseUrl;
use semmoe_gateway::Running;
use semmoe_load::{Api, LatencySummary, Limit, LoadOptions, Pace, Report, Slo};
use serde::Serialize;
use serde_json::json;
use tokio::time::sleep;

use crate::configs::Config;
use crate::counters::{Counters, ratio};
use crate::error::BenchError;
use crate::unit::Unit;

/// A request that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Length of an open-loop block in saturation blocks.
pub(crate) const OPEN: f64 = 1.5;

/// How load is generated.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    /// JSON Lines: chats, or ids where requests go to a unit itself.
    pub(crate) prompts: PathBuf,
    /// The route that takes them.
    pub(crate) api: Api,
    /// Arrival times, and their mean rate per second.
    pub(crate) arrivals: PathBuf,
    pub(crate) arrivals_per_second: f64,
    /// Tokens generated at most for each prompt.
    pub(crate) max_tokens: u32,
    /// Whether answers at saturation are streamed.
    pub(crate) streamed: bool,
    /// Clients of a closed loop that keep every rank busy.
    pub(crate) concurrency: usize,
    /// Length of a saturation block, and of its ramp. An open-loop block is [`OPEN`] times as long.
    pub(crate) seconds: f64,
    pub(crate) ramp: f64,
}

/// A running configuration.
#[derive(Debug)]
pub(crate) struct Contestant {
    pub(crate) config: Config,
    pub(crate) unit: Unit,
    /// Stops when dropped; without one requests go to the unit itself.
    pub(crate) gateway: Option<Running>,
    pub(crate) url: BaseUrl,
}

/// The figures of one block.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Block {
    pub(crate) seconds: f64,
    pub(crate) requests: u64,
    /// Tokens of the model's steps, prompts and answers together.
    pub(crate) tokens_per_second: f64,
    pub(crate) tokens_per_request: f64,
    /// Arrivals per second offered; `None` at saturation.
    pub(crate) offered: Option<f64>,
    pub(crate) requests_per_second: f64,
    pub(crate) ttft_ms: Option<LatencySummary>,
    pub(crate) e2e_ms: Option<LatencySummary>,
    /// Requests per second within the service level, if there is one.
    pub(crate) goodput: Option<f64>,
    /// The unit's counts during the block.
    pub(crate) counters: Counters,
}

impl Contestant {
    /// Saturates all ranks with a closed loop. Counters and throughput exclude the ramp. Streamed answers show the
    /// gateway which prompts are still waiting, and it weighs them against locality.
    pub(crate) async fn saturate(&self, traffic: &Traffic) -> Result<Block, BenchError> {
        let length = Duration::from_secs_f64(traffic.ramp + traffic.seconds);
        let pace = Pace::Closed { concurrency: traffic.concurrency };
        let first = self.unit.read().await?;
        let window = async {
            sleep(Duration::from_secs_f64(traffic.ramp)).await;
            let (before, began) = (self.unit.read().await?, Instant::now());
            sleep(Duration::from_secs_f64(traffic.seconds)).await;
            let counters = self.unit.counters(&before).await?;
            Ok::<_, BenchError>((counters, began.elapsed().as_secs_f64()))
        };
        let options = LoadOptions { stream: traffic.streamed, ..self.options(traffic, pace, length, 0, None) };
        let (report, window) = tokio::join!(self.run(options), window);
        let (report, (counters, seconds)) = (report?, window?);
        let whole = self.unit.counters(&first).await?;
        let tokens_per_request = ratio(whole.tokens, report.requests.ok as f64);
        let tokens_per_second = counters.tokens / seconds;
        Ok(Block {
            seconds,
            requests: report.requests.ok,
            tokens_per_second,
            tokens_per_request,
            offered: None,
            requests_per_second: ratio(tokens_per_second, tokens_per_request),
            ttft_ms: report.ttft_ms,
            e2e_ms: report.e2e_ms,
            goodput: None,
            counters,
        })
    }

    /// Replays the trace's arrivals, scaled to `per_second`; good requests finish within `slo_ms`.
    pub(crate) async fn arrive(
        &self,
        traffic: &Traffic,
        per_second: f64,
        slo_ms: Option<f64>,
    ) -> Result<Block, BenchError> {
        let pace =
            Pace::Recorded { arrivals: traffic.arrivals.clone(), speed: per_second / traffic.arrivals_per_second };
        let length = Duration::from_secs_f64(OPEN * traffic.seconds);
        let warmup = (per_second * traffic.ramp) as u64;
        let before = self.unit.read().await?;
        let report = self.run(self.options(traffic, pace, length, warmup, slo_ms)).await?;
        let counters = self.unit.counters(&before).await?;
        let requests = report.requests.ok + report.requests.warmup;
        let tokens_per_request = ratio(counters.tokens, requests as f64);
        Ok(Block {
            seconds: report.seconds,
            requests: report.requests.ok,
            tokens_per_second: report.requests_per_second * tokens_per_request,
            tokens_per_request,
            offered: Some(per_second),
            requests_per_second: report.requests_per_second,
            ttft_ms: report.ttft_ms,
            e2e_ms: report.e2e_ms,
            goodput: report.goodput.map(|goodput| goodput.requests_per_second),
            counters,
        })
    }

    fn options(
        &self,
        traffic: &Traffic,
        pace: Pace,
        length: Duration,
        warmup: u64,
        slo_ms: Option<f64>,
    ) -> LoadOptions {
        let prompts = traffic.prompts.clone();
        let extra = match traffic.api {
            Api::Chat | Api::Completions => ("temperature", 0.into()),
            // Forced local rates make answers wrong, so that any may end at once.
            Api::Generate => {
                let params = json!({"temperature": 0, "ignore_eos": true, "max_new_tokens": traffic.max_tokens});
                ("sampling_params", params)
            }
        };
        LoadOptions {
            api: traffic.api,
            stream: true,
            max_tokens: traffic.max_tokens,
            extra: [(extra.0.to_owned(), extra.1)].into_iter().collect(),
            warmup,
            timeout: TIMEOUT,
            slo: Slo { e2e_ms: slo_ms, ..Slo::default() },
            threads: Some(1),
            ..LoadOptions::new(self.url.clone(), prompts, pace, Limit::Duration(length))
        }
    }

    /// Ends the gateway and the ranks.
    pub(crate) async fn stop(self) -> Result<(), BenchError> {
        if let Some(gateway) = self.gateway {
            gateway.shutdown(Duration::from_secs(1)).await;
        }
        self.unit.stop().await
    }

    /// A failed request fails the measurement.
    async fn run(&self, options: LoadOptions) -> Result<Report, BenchError> {
        let report = semmoe_load::run(options, &|_| {}, std::future::pending()).await.map_err(BenchError::failed)?;
        match report.errors.first() {
            Some(error) => Err(BenchError::failed(format!(
                "{}: {} of {} requests failed: {}",
                self.config.name, report.requests.failed, report.requests.sent, error.kind
            ))),
            None if report.requests.ok == 0 => {
                Err(BenchError::failed(format!("{}: no request was answered", self.config.name)))
            }
            None => Ok(report),
        }
    }
}
