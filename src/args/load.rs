//! Arguments of `semmoe load`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{ArgGroup, Args};
use semmoe_load::Api;

use super::{OutputArgs, named};

/// Parses a route that `load` supports.
fn route() -> impl TypedValueParser<Value = Api> {
    named([
        (PossibleValue::new("chat").help("/v1/chat/completions"), Api::Chat),
        (PossibleValue::new("completions").help("/v1/completions"), Api::Completions),
        (PossibleValue::new("generate").help("/generate"), Api::Generate),
    ])
}

/// Examples at the end of `load --help`.
pub(super) const LOAD_EXAMPLES: &str = "\
Examples:
  semmoe load --url http://127.0.0.1:8080 --prompts prompts.jsonl --stream --concurrency 32 \\
      --duration 60s
  semmoe load --url http://127.0.0.1:8080 --prompts prompts.jsonl --rate 20 --requests 2000 \\
      --slo-e2e-ms 4000 --json
  semmoe load --url http://127.0.0.1:8080 --compare http://127.0.0.1:9090 --prompts prompts.jsonl \\
      --concurrency 8 --requests 500";

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("pace").required(true), group = ArgGroup::new("end"))]
pub(crate) struct LoadArgs {
    /// Base URL of a gateway or an engine.
    #[arg(long, help_heading = "Target")]
    pub(crate) url: String,
    /// For https: the trusted CA certificates (PEM) [default: the system's].
    #[arg(long, help_heading = "Target", value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// For https: the client certificate (PEM).
    #[arg(long, help_heading = "Target", value_name = "FILE", requires = "key")]
    pub(crate) cert: Option<PathBuf>,
    /// For https: the key of the client certificate (PEM).
    #[arg(long, help_heading = "Target", value_name = "FILE", requires = "cert")]
    pub(crate) key: Option<PathBuf>,
    /// Prompts file: JSON Lines with "messages", "input_ids" or "prompt", or a .txt file with one prompt per line.
    #[arg(long, help_heading = "Requests", value_name = "FILE")]
    pub(crate) prompts: PathBuf,
    /// The model to request [default: the only model that /v1/models lists].
    #[arg(long, help_heading = "Requests", value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// The route to send requests to.
    #[arg(long, help_heading = "Requests", value_parser = route(), default_value = "chat")]
    pub(crate) route: Api,
    /// Stream responses; required to measure the time to first token.
    #[arg(long, help_heading = "Requests")]
    pub(crate) stream: bool,
    /// Maximum tokens to generate per request.
    #[arg(long, help_heading = "Requests", value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Fields to add to every request body, as a JSON object: '{"temperature": 0, "ignore_eos": true}'.
    #[arg(long, help_heading = "Requests", value_name = "JSON")]
    pub(crate) body: Option<String>,
    /// Closed loop: number of clients, each of which sends its next request as soon as it receives a response.
    #[arg(long, help_heading = "Pace and end", value_name = "N", group = "pace")]
    pub(crate) concurrency: Option<usize>,
    /// Open loop: requests per second, sent at random times no matter how fast the server responds.
    #[arg(long, help_heading = "Pace and end", value_name = "PER_SECOND", group = "pace")]
    pub(crate) rate: Option<f64>,
    /// Open loop: arrival times from a .jsonl file ("timestamp" in ms, as in Mooncake's traces) or a .csv file (seconds
    /// or dates, as in Azure's).
    #[arg(long, help_heading = "Pace and end", value_name = "FILE", group = "pace")]
    pub(crate) arrivals: Option<PathBuf>,
    /// With --arrivals: speedup of the replay.
    #[arg(long, help_heading = "Pace and end", value_name = "X", default_value_t = 1.0, requires = "arrivals")]
    pub(crate) speed: f64,
    /// Stop after this many requests. Either this or --duration is required, unless --arrivals ends the run.
    #[arg(long, help_heading = "Pace and end", value_name = "N", group = "end")]
    pub(crate) requests: Option<u64>,
    /// Stop after this time, such as 30s or 5m, and wait for the requests in flight.
    #[arg(long, help_heading = "Pace and end", value_name = "TIME", group = "end", value_parser = humantime::parse_duration)]
    pub(crate) duration: Option<Duration>,
    /// Number of unmeasured warm-up requests to send first.
    #[arg(long, help_heading = "Pace and end", value_name = "N", default_value_t = 0)]
    pub(crate) warmup: u64,
    /// Timeout per request.
    #[arg(long, help_heading = "Pace and end", value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    pub(crate) timeout: Duration,
    /// Open loop: maximum requests in flight; later ones wait, and the wait is measured.
    #[arg(long, help_heading = "Pace and end", value_name = "N", default_value_t = 10_000)]
    pub(crate) max_in_flight: usize,
    /// A header to add to every request; do not put secrets here.
    #[arg(long, help_heading = "Target", value_name = "NAME:VALUE")]
    pub(crate) header: Vec<String>,
    /// The environment variable that contains the API key.
    #[arg(long, help_heading = "Target", value_name = "VAR")]
    pub(crate) api_key_env: Option<String>,
    /// SLO: maximum time to first token.
    #[arg(long, help_heading = "Levels", value_name = "MS", requires = "stream")]
    pub(crate) slo_ttft_ms: Option<f64>,
    /// SLO: maximum mean inter-token latency per request.
    #[arg(long, help_heading = "Levels", value_name = "MS", requires = "stream")]
    pub(crate) slo_itl_ms: Option<f64>,
    /// SLO: maximum end-to-end latency.
    #[arg(long, help_heading = "Levels", value_name = "MS")]
    pub(crate) slo_e2e_ms: Option<f64>,
    /// Exit with code 1 if more than this fraction of requests fail [default: if all fail].
    #[arg(long, help_heading = "Levels", value_name = "SHARE")]
    pub(crate) max_errors: Option<f64>,
    /// Seed for random arrival times.
    #[arg(long, help_heading = "Pace and end", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Number of sending threads [default: one per core].
    #[arg(long, help_heading = "Pace and end", value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// A second server to compare with: both are measured in alternating blocks and compared by the ratios of adjacent
    /// blocks.
    #[arg(long, help_heading = "Target", value_name = "URL", conflicts_with = "arrivals")]
    pub(crate) compare: Option<String>,
    /// With --compare: number of rounds, each with one block per server, into which --requests or --duration is
    /// divided.
    #[arg(long, help_heading = "Target", value_name = "N", default_value_t = 10, requires = "compare")]
    pub(crate) rounds: usize,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
