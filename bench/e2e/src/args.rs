//! The command line.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::Parser;

/// The proof, end to end: a model's ranks in network namespaces with limited links, real prompts, arrivals of a trace,
/// and two configurations in turn for each kind of attention.
#[derive(Debug, Parser)]
#[command(name = "bench/e2e/run", version, max_term_width = 100)]
pub(crate) struct Args {
    /// All ranks on 127.0.0.1, without limits on links: bytes are judged, gains are not. Needs no root.
    #[arg(long)]
    pub(crate) loopback: bool,
    /// Remove namespaces that killed runs left behind, and exit.
    #[arg(long)]
    pub(crate) clean: bool,
    /// A trial of some three minutes: one link, few and short blocks, fewer prompts. Its figures are rough.
    #[arg(long, conflicts_with_all = ["limit", "shares", "rounds", "open_rounds", "loads", "seconds"])]
    pub(crate) quick: bool,
    /// `dp` or `tp` alone, or both.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "dp,tp")]
    pub(crate) attention: Vec<AttentionArg>,
    /// The semmoe program.
    #[arg(long, value_name = "FILE", default_value = "target/release/semmoe")]
    pub(crate) semmoe: PathBuf,
    /// A checkpoint directory.
    #[arg(long, value_name = "DIR", default_value = "assets/tiny-qwen3moe-15m")]
    pub(crate) model: PathBuf,
    /// Prompts to profile and to solve on.
    #[arg(long, value_name = "FILE", default_value = "assets/prompts/profile.jsonl")]
    pub(crate) profile_prompts: PathBuf,
    /// Prompts to serve and to judge on; none of them should be among the others.
    #[arg(long, value_name = "FILE", default_value = "assets/prompts/heldout.jsonl")]
    pub(crate) prompts: PathBuf,
    /// Only so many prompts of each file.
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<usize>,
    /// Times of arrivals.
    #[arg(long, value_name = "FILE", default_value = "bench/e2e/arrivals.csv")]
    pub(crate) arrivals: PathBuf,
    /// Ranks; must divide the number of experts.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=64))]
    pub(crate) ranks: u16,
    /// Shares of communication in a step to find links for.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.2,0.4,0.6", value_parser = number(0.05..=0.9))]
    pub(crate) shares: Vec<f64>,
    /// Rates of the links in Mbit/s, in place of those that --shares looks for.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = number(1.0..=1e6), conflicts_with_all = ["shares", "quick", "loopback"])]
    pub(crate) rates: Vec<f64>,
    /// Rounds at saturation.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) rounds: u16,
    /// Rounds of the open loop; 0 leaves it out.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(0..=1000))]
    pub(crate) open_rounds: u16,
    /// Loads of the open loop, as shares of what the baseline keeps up with.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.3,0.6,0.9,1.2", value_parser = number(0.01..=4.0))]
    pub(crate) loads: Vec<f64>,
    /// Length of a block at saturation in seconds, after a quarter of that as a ramp. Blocks of the open loop are half
    /// as long again.
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0, value_parser = number(0.2..=3600.0))]
    pub(crate) seconds: f64,
    /// Clients at saturation for each rank.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) clients: u16,
    /// Answers at saturation are streamed, too: the gateway then knows which prompts still wait, and weighs them.
    #[arg(long)]
    pub(crate) streamed: bool,
    /// Tokens generated for each prompt.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_tokens: u32,
    /// Tokens of one step on a rank: at saturation every step is full, so that steps of all ranks are alike.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) step_tokens: u32,
    /// Elements of rows between ranks, on both sides.
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = ["f32", "bf16"])]
    pub(crate) wire: String,
    /// Slots of each layer for replicas in the solved tables; attention dp alone.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) redundant: u16,
    /// Folder for tables, pictures and JSON.
    #[arg(long, value_name = "DIR", default_value = "bench/e2e/results")]
    pub(crate) out: PathBuf,
}

impl Args {
    /// With what `--quick` stands for.
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
