//! Arguments of `semmoe up`.

use std::path::PathBuf;

use clap::Args;

use super::{UnitAttentionArgs, UnitLayoutArgs};

/// The end of `up --help`.
pub(super) const UP_EXAMPLES: &str = "\
Examples:
  semmoe up
  semmoe up --ranks 8 --port 9000
  semmoe up --plan auto
  semmoe up --check
  semmoe up --model Qwen3-30B-A3B --data /var/cache/semmoe";

/// Where the plan comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PlanSource {
    /// Made now, for this machine.
    Auto,
    /// The output of `semmoe plan --json`.
    File(PathBuf),
}

impl From<&str> for PlanSource {
    fn from(text: &str) -> Self {
        if text == "auto" { Self::Auto } else { Self::File(text.into()) }
    }
}

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Number of rank processes; must divide the number of experts.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) ranks: u16,
    /// Port of the gateway on 127.0.0.1; the admin listener takes the next one. 0 takes any free ports.
    #[arg(long, default_value_t = 8080)]
    pub(crate) port: u16,
    /// A Hugging Face checkpoint directory in place of the bundled model.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Ranks, attention, experts and wire as planned: auto measures this machine for some seconds, once, and starts the
    /// layout that answers soonest; a file is what `semmoe plan --json` printed for this model.
    #[arg(long, value_name = "auto|FILE", conflicts_with_all = ["ranks", "attention", "experts", "wire"])]
    pub(crate) plan: Option<PlanSource>,
    #[command(flatten)]
    pub(crate) attention: UnitAttentionArgs,
    #[command(flatten)]
    pub(crate) layout: UnitLayoutArgs,
    /// Slots per layer beyond one for each expert, of all ranks together, for replicas of experts that are wanted in
    /// several places. Experts plus slots must be divisible by the ranks. Only with --attention dp and --experts ep.
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub(crate) redundant: u16,
    /// Where traces, profiles and tables are cached [default: semmoe in the user's cache folder].
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Serve held-out prompts under contiguous + round robin and under tables + affinity (with attention tp: plain and
    /// shuffled), print both, and exit. With --redundant also under tables with replicas.
    #[arg(long)]
    pub(crate) check: bool,
    /// With --check: print one JSON document on standard output.
    #[arg(long, help_heading = "Output", requires = "check")]
    pub(crate) json: bool,
}
