//! The command line.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::Parser;

use crate::figures::Figure;

/// End-to-end benchmark: a model's ranks in network namespaces with limited links, real prompts, recorded arrivals, and
/// two configurations that alternate for each kind of attention.
#[derive(Debug, Parser)]
#[command(name = "bench/e2e/run", version, max_term_width = 100)]
pub(crate) struct Args {
    /// Run all ranks on 127.0.0.1 without link limits: bytes are judged, gains are not. Needs no root.
    #[arg(long)]
    pub(crate) loopback: bool,
    /// Remove namespaces that killed runs left behind, and exit.
    #[arg(long)]
    pub(crate) clean: bool,
    /// A rough run of about three minutes: one link, few and short blocks, fewer prompts.
    #[arg(long, conflicts_with_all = ["limit", "shares", "rounds", "open_rounds", "loads", "seconds"])]
    pub(crate) quick: bool,
    /// `dp` or `tp` alone, or both.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "dp,tp")]
    pub(crate) attention: Vec<AttentionArg>,
    /// A figure of the Sem-MoE paper in place of the proof, over links of the first of --rates: `4` = three systems at
    /// each of --loads (attention dp), `table-2` = three systems at 1 request a second (attention tp), `6d` =
    /// collectives by forced local rates.
    #[arg(long, value_name = "FIGURE")]
    pub(crate) figure: Option<Figure>,
    /// The semmoe program.
    #[arg(long, value_name = "FILE", default_value = "target/release/semmoe")]
    pub(crate) semmoe: PathBuf,
    /// A checkpoint directory.
    #[arg(long, value_name = "DIR", default_value = "assets/tiny-qwen3moe-15m")]
    pub(crate) model: PathBuf,
    /// Prompts to profile and to solve on.
    #[arg(long, value_name = "FILE", default_value = "assets/prompts/profile.jsonl")]
    pub(crate) profile_prompts: PathBuf,
    /// Prompts to serve and to judge on; they should not overlap with those to profile on.
    #[arg(long, value_name = "FILE", default_value = "assets/prompts/heldout.jsonl")]
    pub(crate) prompts: PathBuf,
    /// Use at most this many prompts of each file.
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<usize>,
    /// Arrival times.
    #[arg(long, value_name = "FILE", default_value = "bench/e2e/arrivals.csv")]
    pub(crate) arrivals: PathBuf,
    /// Ranks; must divide the number of experts.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=64))]
    pub(crate) ranks: u16,
    /// Communication shares of a step to find link rates for.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.2,0.4,0.6", value_parser = number(0.05..=0.9))]
    pub(crate) shares: Vec<f64>,
    /// Link rates in Mbit/s, instead of finding them for --shares.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = number(1.0..=1e6), conflicts_with_all = ["shares", "quick", "loopback"])]
    pub(crate) rates: Vec<f64>,
    /// Rounds at saturation.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) rounds: u16,
    /// Open-loop rounds; 0 skips them.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(0..=1000))]
    pub(crate) open_rounds: u16,
    /// Open-loop loads, as shares of the baseline's capacity.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.3,0.6,0.9,1.2", value_parser = number(0.01..=4.0))]
    pub(crate) loads: Vec<f64>,
    /// Length of a saturation block in seconds, after a ramp of a quarter of that. Open-loop blocks are 1.5 times as
    /// long.
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0, value_parser = number(0.2..=3600.0))]
    pub(crate) seconds: f64,
    /// Clients per rank at saturation.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) clients: u16,
    /// Stream answers at saturation too: the gateway then knows which prompts are still waiting and weighs them.
    #[arg(long)]
    pub(crate) streamed: bool,
    /// Tokens generated for each prompt.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_tokens: u32,
    /// Tokens per step on a rank: at saturation every step is full, so all ranks' steps are alike.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) step_tokens: u32,
    /// Element type of rows between ranks, in both configurations.
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = ["f32", "bf16"])]
    pub(crate) wire: String,
    /// Replica slots per layer in the solved tables; attention dp only.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) redundant: u16,
    /// Output folder for tables, pictures and JSON.
    #[arg(long, value_name = "DIR", default_value = "bench/e2e/results")]
    pub(crate) out: PathBuf,
}

impl Args {
    /// Applies the changes that `--quick` stands for.
    pub(crate) fn settled(mut self) -> Self {
        if self.quick {
            (self.limit, self.shares, self.loads) = (Some(400), vec![0.4], vec![0.5, 0.9]);
            (self.rounds, self.open_rounds, self.seconds) = (3, 1, 2.0);
        }
        self
    }
}

/// Kinds of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum AttentionArg {
    /// Data parallel: requests are routed.
    Dp,
    /// Tensor parallel: tokens are routed, layer by layer.
    Tp,
}

fn number(range: RangeInclusive<f64>) -> impl Fn(&str) -> Result<f64, String> + Clone {
    move |text| match text.parse::<f64>() {
        Ok(value) if range.contains(&value) => Ok(value),
        _ => Err(format!("expected a number from {} to {}", range.start(), range.end())),
    }
}
