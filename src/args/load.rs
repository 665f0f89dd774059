//! Arguments of `semmoe load`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};

use super::OutputArgs;

/// Routes that `load` can send to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LoadRoute {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
    /// /generate
    Generate,
}

/// The end of `load --help`.
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
    /// https: authorities that may have signed the server's certificate (PEM) [default: those that the system trusts].
    #[arg(long, help_heading = "Target", value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// https: the certificate to show (PEM).
    #[arg(long, help_heading = "Target", value_name = "FILE", requires = "key")]
    pub(crate) cert: Option<PathBuf>,
    /// https: the certificate's key (PEM).
    #[arg(long, help_heading = "Target", value_name = "FILE", requires = "cert")]
    pub(crate) key: Option<PathBuf>,
    /// Prompts: JSON Lines with "messages", "input_ids" or "prompt"; a .txt file has one prompt a line.
    #[arg(long, help_heading = "Requests", value_name = "FILE")]
    pub(crate) prompts: PathBuf,
    /// The model to ask for [default: the only one that /v1/models lists].
    #[arg(long, help_heading = "Requests", value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// Where requests go.
    #[arg(long, help_heading = "Requests", value_enum, default_value_t = LoadRoute::Chat)]
    pub(crate) route: LoadRoute,
    /// Stream the answers; without it there is no time to the first token.
    #[arg(long, help_heading = "Requests")]
    pub(crate) stream: bool,
    /// Tokens to generate at most, per request.
    #[arg(long, help_heading = "Requests", value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Fields for every body, as a JSON object: '{"temperature": 0, "ignore_eos": true}'.
    #[arg(long, help_heading = "Requests", value_name = "JSON")]
    pub(crate) body: Option<String>,
    /// Closed loop: this many clients, each sending its next request when it has its answer.
    #[arg(long, help_heading = "Pace and end", value_name = "N", group = "pace")]
    pub(crate) concurrency: Option<usize>,
    /// Open loop: this many requests per second at random times, whatever the server does.
    #[arg(long, help_heading = "Pace and end", value_name = "PER_SECOND", group = "pace")]
    pub(crate) rate: Option<f64>,
    /// Open loop: the times in a .jsonl file ("timestamp" in ms, as Mooncake's) or a .csv file (seconds or dates, as
    /// Azure's).
    #[arg(long, help_heading = "Pace and end", value_name = "FILE", group = "pace")]
    pub(crate) arrivals: Option<PathBuf>,
    /// With --arrivals: so many times as fast.
    #[arg(long, help_heading = "Pace and end", value_name = "X", default_value_t = 1.0, requires = "arrivals")]
    pub(crate) speed: f64,
    /// End after this many requests; this or --duration, unless --arrivals end it.
    #[arg(long, help_heading = "Pace and end", value_name = "N", group = "end")]
    pub(crate) requests: Option<u64>,
    /// End after this time, as 30s or 5m; requests in flight then are waited for.
    #[arg(long, help_heading = "Pace and end", value_name = "TIME", group = "end", value_parser = humantime::parse_duration)]
    pub(crate) duration: Option<Duration>,
    /// Send this many requests first, which are not measured.
    #[arg(long, help_heading = "Pace and end", value_name = "N", default_value_t = 0)]
    pub(crate) warmup: u64,
    /// Longest time of one request.
    #[arg(long, help_heading = "Pace and end", value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    pub(crate) timeout: Duration,
    /// Open loop: requests in flight at most; later ones wait, and their waiting is measured.
    #[arg(long, help_heading = "Pace and end", value_name = "N", default_value_t = 10_000)]
    pub(crate) max_in_flight: usize,
    /// A header for every request; secrets do not belong here.
    #[arg(long, help_heading = "Target", value_name = "NAME:VALUE")]
    pub(crate) header: Vec<String>,
    /// The environment variable that holds the API key.
    #[arg(long, help_heading = "Target", value_name = "VAR")]
    pub(crate) api_key_env: Option<String>,
    /// Service level: time to the first token, at most.
    #[arg(long, help_heading = "Levels", value_name = "MS", requires = "stream")]
    pub(crate) slo_ttft_ms: Option<f64>,
    /// Service level: mean time between a request's tokens, at most.
    #[arg(long, help_heading = "Levels", value_name = "MS", requires = "stream")]
    pub(crate) slo_itl_ms: Option<f64>,
    /// Service level: time to the end of the answer, at most.
    #[arg(long, help_heading = "Levels", value_name = "MS")]
    pub(crate) slo_e2e_ms: Option<f64>,
    /// Exit with 1 if more than this share of the requests fail [default: if all fail].
    #[arg(long, help_heading = "Levels", value_name = "SHARE")]
    pub(crate) max_errors: Option<f64>,
    /// Seed of the random times.
    #[arg(long, help_heading = "Pace and end", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Threads that send [default: one for each core].
    #[arg(long, help_heading = "Pace and end", value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// A second server: both are measured in turn, block by block, and compared by the ratios of neighbouring blocks.
    #[arg(long, help_heading = "Target", value_name = "URL", conflicts_with = "arrivals")]
    pub(crate) compare: Option<String>,
    /// With --compare: rounds of a block each, over which --requests or --duration (of each server) is shared out.
    #[arg(long, help_heading = "Target", value_name = "N", default_value_t = 10, requires = "compare")]
    pub(crate) rounds: usize,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
