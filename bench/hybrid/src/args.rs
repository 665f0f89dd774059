//! The command line.

use std::path::PathBuf;

use clap::Parser;

/// Expert layouts on two nodes of two ranks whose links are limited at both levels, measured in turn: throughput, the
/// time of a layer's exchange from the ranks' own time stamps, and the planner's predictions.
#[derive(Debug, Parser)]
#[command(name = "bench/hybrid/run", version, max_term_width = 100)]
pub(crate) struct Args {
    /// Remove namespaces that killed runs left behind, and exit.
    #[arg(long)]
    pub(crate) clean: bool,
    /// The semmoe program.
    #[arg(long, value_name = "FILE", default_value = "target/release/semmoe")]
    pub(crate) semmoe: PathBuf,
    /// A checkpoint directory.
    #[arg(long, value_name = "DIR", default_value = "assets/tiny-qwen3moe-15m")]
    pub(crate) model: PathBuf,
    /// Prompts to serve.
    #[arg(long, value_name = "FILE", default_value = "assets/prompts/heldout.jsonl")]
    pub(crate) prompts: PathBuf,
    /// Mbit/s of a rank's link to other nodes, in each direction.
    #[arg(long, value_name = "N", default_value_t = 40.0, value_parser = positive)]
    pub(crate) between: f64,
    /// Ratios of the link rate inside a node to that between nodes.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,8", value_parser = positive)]
    pub(crate) ratios: Vec<f64>,
    /// Rounds over all layouts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(crate) rounds: u16,
    /// Length of a measurement, after a second of warm-up.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = positive)]
    pub(crate) seconds: f64,
    /// Tokens per step and rank.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(16..=4096))]
    pub(crate) step_tokens: u32,
    /// Chunks of the fused layout.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) chunks: u16,
    /// Output folder for results and charts.
    #[arg(long, value_name = "DIR", default_value = "bench/hybrid/results")]
    pub(crate) out: PathBuf,
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|value: &f64| value.is_finite() && *value > 0.0)
        .ok_or_else(|| "expected a number above 0".into())
}
