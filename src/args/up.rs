//! Arguments of `semmoe up`.

use std::path::PathBuf;

use clap::Args;

use super::{UnitAttentionArgs, UnitLayoutArgs};

/// Examples at the end of `up --help`.
pub(super) const UP_EXAMPLES: &str = "\
Examples:
  semmoe up
  semmoe up --ranks 8 --port 9000
  semmoe up --plan auto
  semmoe up --check
  semmoe up --model Qwen3-30B-A3B --data /var/cache/semmoe";

/// Source of the deployment plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PlanSource {
    /// Computed at startup for this machine.
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
    /// Port of the gateway on 127.0.0.1; the admin plane uses the next one. 0 picks free ports.
    #[arg(long, default_value_t = 8080)]
    pub(crate) port: u16,
    /// Directory of a Hugging Face checkpoint to serve [default: the bundled model].
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Read ranks, attention, experts and wire from a plan: auto measures this machine once, for a few seconds, and
    /// starts the layout with the fastest responses; a file is the output of `semmoe plan --json` for this model.
    #[arg(long, value_name = "auto|FILE", conflicts_with_all = ["ranks", "attention", "attention_groups", "experts", "wire"])]
    pub(crate) plan: Option<PlanSource>,
    #[command(flatten)]
    pub(crate) attention: UnitAttentionArgs,
    #[command(flatten)]
    pub(crate) layout: UnitLayoutArgs,
    /// Extra slots per layer, in total over all ranks, for replicas of experts that several ranks activate often.
    /// Experts plus slots must be divisible by the number of ranks. Only with --attention dp and --experts ep.
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub(crate) redundant: u16,
    /// Directory that caches traces, profiles and tables [default: semmoe in the user's cache directory].
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Serve held-out prompts with contiguous placement + round robin and with tables + affinity (with attention tp:
    /// plain and shuffled), print both results, and exit. With --redundant also with replicas.
    #[arg(long)]
    pub(crate) check: bool,
    /// With --check: print one JSON document on standard output.
    #[arg(long, help_heading = "Output", requires = "check")]
    pub(crate) json: bool,
}
