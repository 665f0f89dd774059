//! The arguments of `semmoe plan`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use semmoe_planner::shape::Dtype;
use semmoe_worker::TransportChoice;

use super::number;

/// Examples at the end of `plan --help`.
pub(super) const PLAN_EXAMPLES: &str = "\
Examples:
  semmoe plan calibrate --model Qwen3-30B-A3B --out here
  semmoe plan --model config.json --cluster cluster.toml
  semmoe plan --model config.json --cluster cluster.toml --workload workload.toml --html plan.html
  semmoe plan --model config.json --cluster cluster.toml --affinity 0.4 --explain
  semmoe plan --deployment metrics.txt --affinity evaluation.json";

/// Introduction printed by `plan --help`.
pub(super) const PLAN_ABOUT: &str = "\
Choose how to run a mixture-of-experts model on a cluster: the best layout, its performance, and what semmoe could gain.

Evaluates every combination of PP, attention TP and DP, expert TP and EP on units of 1, 2, 4, ... GPUs, lists those that cannot \
run with the reason, and ranks the others: by the requests served within the latency limits if there are any, else by the time \
of a request. All figures come from a model. Without --calibration they are uncalibrated, and the output says so.

cluster.toml:
  gpu = \"H200\"                      # H100, H200, B200, B300, GB200, GB300, H20, A100, MI300X, or a table [gpu] of figures
  usd_per_gpu_hour = 2.5            # optional
  [[levels]]                        # innermost first: GPUs of an NVLink domain, then domains, nodes, data centres
  name = \"nvlink\"
  count = 8
  bandwidth_gb_per_second = 450     # of one GPU, one direction
  latency_us = 3
  [[measured]]                      # optional: times of a collective or a kernel, which replace the figures above
  level = \"nvlink\"
  operator = \"all_reduce\"           # all_reduce, scatter, all_to_all, point_to_point
  ranks = 8
  points = [{ bytes = 65536, us = 9.1 }, { bytes = 1048576, us = 14.2 }]

workload.toml:
  requests_per_second = 8
  input_tokens = 1024               # or [{ tokens = 512, share = 0.7 }, { tokens = 4096, share = 0.3 }]
  output_tokens = 256
  ttft_ms = 1000                    # optional
  itl_ms = 50                       # optional
  [[classes]]                       # optional, highest priority first, shares adding up to 1
  name = \"chat\"
  share = 0.4
  ttft_ms = 500";

/// Examples at the end of `plan calibrate --help`.
const CALIBRATE_EXAMPLES: &str = "\
Examples:
  semmoe plan calibrate --model Qwen3-30B-A3B --out here
  semmoe plan --model Qwen3-30B-A3B --cluster here/cluster.toml --calibration here/calibration.json";

/// Plans a deployment, or measures this machine to calibrate plans.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct PlanCommand {
    #[command(subcommand)]
    pub(crate) action: Option<PlanAction>,
    #[command(flatten)]
    pub(crate) question: PlanArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PlanAction {
    /// Measure ranks of semmoe's worker on this machine for later plans: link speeds by message size, compute, and the
    /// prediction error for layouts that were not measured.
    ///
    /// Writes cluster.toml and calibration.json. Nothing else should run on the machine while it measures.
    #[command(after_long_help = CALIBRATE_EXAMPLES)]
    Calibrate(CalibrateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CalibrateArgs {
    /// Directory of a Hugging Face checkpoint.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// Directory for cluster.toml and calibration.json.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Numbers of ranks to measure with.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) ranks: Vec<u16>,
    /// Transport between the ranks: shm or tcp (over loopback).
    #[arg(long, value_name = "shm|tcp", default_value = "shm", value_parser = carrier)]
    pub(crate) transport: TransportChoice,
    /// Approximate measurement time, excluding the time to load the model.
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = number(1.0..=3600.0, "expected a number of seconds from 1 to 3600"))]
    pub(crate) seconds: f64,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

fn carrier(name: &str) -> Result<TransportChoice, &'static str> {
    match name.parse() {
        Ok(choice @ (TransportChoice::Shm | TransportChoice::Tcp)) => Ok(choice),
        _ => Err("expected shm or tcp"),
    }
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A Hugging Face config.json or its directory.
    #[arg(long, value_name = "PATH", required_unless_present = "deployment")]
    pub(crate) model: Option<PathBuf>,
    /// The cluster: GPUs and links (TOML, see above).
    #[arg(long, value_name = "FILE", required_unless_present = "deployment")]
    pub(crate) cluster: Option<PathBuf>,
    /// The workload: request rate, lengths, latency limits (TOML, see above) [default: 1 request/s of 1024 + 256
    /// tokens, no limits].
    #[arg(long, value_name = "FILE")]
    pub(crate) workload: Option<PathBuf>,
    /// Read lengths from a trace in Mooncake's format (JSON Lines with input_length and output_length), overriding
    /// those of the workload.
    #[arg(long, value_name = "FILE")]
    pub(crate) lengths: Option<PathBuf>,
    /// Data type of the weights [default: the model configuration's].
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub(crate) weights: Option<Dtype>,
    /// Data type of the KV cache: bf16 or fp8 [default: bf16].
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub(crate) cache: Option<Dtype>,
    /// Model constants fitted to measurements, with their errors: fitted:sglang, fitted:trtllm or fitted:vllm for
    /// published measurements of the cluster's GPU and the model's weights, or a file (JSON).
    #[arg(long, value_name = "fitted:ENGINE|FILE")]
    pub(crate) calibration: Option<PathBuf>,
    /// Also show the gain from affinity at this local activation rate: a number, or a file (the output of `semmoe
    /// evaluate --json`, or the gateway's /metrics with semmoe_sampled_activations_total).
    #[arg(long, value_name = "RATE|FILE")]
    pub(crate) affinity: Option<String>,
    /// With --affinity: the current local activation rate [default: the rate of random routing].
    #[arg(long, value_name = "RATE", requires = "affinity")]
    pub(crate) lar_before: Option<f64>,
    /// With --affinity: the uncertainty of the rate.
    #[arg(long, value_name = "RATE", requires = "affinity", default_value_t = 0.02)]
    pub(crate) lar_error: f64,
    /// With --affinity: assume that two micro-batches overlap communication with computation.
    #[arg(long, requires = "affinity")]
    pub(crate) overlap: bool,
    /// With --affinity: evaluate a running deployment instead of a plan, from the /metrics of semmoe's worker saved to
    /// a file, or from a description that ends in .toml (docs/planner.md).
    #[arg(long, value_name = "FILE", requires = "affinity", conflicts_with_all = ["model", "cluster", "html"])]
    pub(crate) deployment: Option<PathBuf>,
    /// Consider only layouts that a single unit of semmoe's worker can run: on all GPUs, without pipeline stages.
    #[arg(long)]
    pub(crate) worker: bool,
    /// Number of rows in the ranked list.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) top: usize,
    /// Also print every term with its source, every reason, each rank's load, and the Pareto front.
    #[arg(long)]
    pub(crate) explain: bool,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
    /// Also write a self-contained HTML page with the Pareto front.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

/// Parses a data type. The error is a string because clap prints it verbatim.
fn dtype(name: &str) -> Result<Dtype, String> {
    let names = || Dtype::NAMES.map(|(name, _)| name).join(", ");
    Dtype::of(name).ok_or_else(|| format!("expected one of {}", names()))
}
