//! The arguments of `semmoe plan`.

use std::path::PathBuf;

use clap::Args;
use semmoe_planner::shape::Dtype;

/// What `plan --help` ends with.
pub(super) const PLAN_EXAMPLES: &str = "\
Examples:
  semmoe plan --model config.json --cluster cluster.toml
  semmoe plan --model config.json --cluster cluster.toml --workload workload.toml --html plan.html
  semmoe plan --model config.json --cluster cluster.toml --affinity 0.4 --explain";

/// What `plan --help` begins with.
pub(super) const PLAN_ABOUT: &str = "\
Choose how to run a mixture-of-experts model on a cluster: which layout, what it does, and what semmoe could gain.

Looks at every strategy of PP, attention TP and DP, expert TP and EP on units of 1, 2, 4, ... GPUs, names those that cannot run \
with the reason, and ranks the others: with limits on latency by the requests served within them, else by the time of a request. \
Figures are modelled. Without --calibration they are uncalibrated, and the answer says so.

cluster.toml:
  gpu = \"H200\"                      # H100, H200, B200, H20, A100, MI300X, or a table [gpu] of figures
  usd_per_gpu_hour = 2.5            # optional
  [[levels]]                        # innermost first: GPUs of an NVLink domain, then domains, nodes, data centres
  name = \"nvlink\"
  count = 8
  bandwidth_gb_per_second = 450     # of one GPU, one direction
  latency_us = 3
  [[measured]]                      # optional: times of a collective that count in place of these figures
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

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A Hugging Face config.json, or its folder.
    #[arg(long, value_name = "PATH")]
    pub(crate) model: PathBuf,
    /// GPUs and links (TOML).
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster: PathBuf,
    /// Rates, lengths, limits on latency (TOML) [default: 1 request/s of 1024 + 256 tokens, no limits].
    #[arg(long, value_name = "FILE")]
    pub(crate) workload: Option<PathBuf>,
    /// Lengths from a trace in Mooncake's form (JSON Lines with input_length and output_length) in place of the
    /// workload's.
    #[arg(long, value_name = "FILE")]
    pub(crate) lengths: Option<PathBuf>,
    /// Element type of the weights [default: the configuration's].
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub(crate) weights: Option<Dtype>,
    /// Element type of cached keys and values: bf16 or fp8 [default: bf16].
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub(crate) cache: Option<Dtype>,
    /// Constants fitted to measurements, with their errors (JSON).
    #[arg(long, value_name = "FILE")]
    pub(crate) calibration: Option<PathBuf>,
    /// Also say what affinity would gain at this local activation rate: a number, or a file: what `semmoe evaluate
    /// --json` printed, or the gateway's /metrics with semmoe_observed_lar.
    #[arg(long, value_name = "RATE|FILE")]
    pub(crate) affinity: Option<String>,
    /// With --affinity: the local activation rate now [default: that of random ranks].
    #[arg(long, value_name = "RATE", requires = "affinity")]
    pub(crate) lar_before: Option<f64>,
    /// With --affinity: how far the rate may be off.
    #[arg(long, value_name = "RATE", requires = "affinity", default_value_t = 0.02)]
    pub(crate) lar_error: f64,
    /// With --affinity: two micro-batches hide communication behind computation.
    #[arg(long, requires = "affinity")]
    pub(crate) overlap: bool,
    /// With --affinity: milliseconds of a step as measured, all of it, in place of the modelled ones.
    #[arg(long, value_name = "MS", requires_all = ["affinity", "communication_ms"])]
    pub(crate) step_ms: Option<f64>,
    /// With --step-ms: milliseconds of it in dispatch and combine, hidden ones included.
    #[arg(long, value_name = "MS", requires = "step_ms")]
    pub(crate) communication_ms: Option<f64>,
    /// With --step-ms: milliseconds of the communication that do not grow with the bytes.
    #[arg(long, value_name = "MS", requires = "step_ms", default_value_t = 0.0)]
    pub(crate) latency_ms: f64,
    /// Rows of the ranked list.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) top: usize,
    /// Also print every term with its source, every reason, what each rank loads, and the Pareto front.
    #[arg(long)]
    pub(crate) explain: bool,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
    /// Also write a self-contained page with the Pareto front.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

fn dtype(name: &str) -> Result<Dtype, String> {
    let names = || Dtype::NAMES.map(|(name, _)| name).join(", ");
    Dtype::of(name).ok_or_else(|| format!("expected one of {}", names()))
}
