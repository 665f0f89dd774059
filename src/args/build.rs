//! The arguments of `semmoe profile build` and `merge`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use semmoe_profiler::DomainInput;

use super::OutputArgs;

/// The beginning of `profile build --help`.
pub(super) const BUILD_ABOUT: &str = "\
Count traces into a profile: how often each token activated each expert, layer by layer.

Traces may be of any size. They are mapped and read in pieces, once to check them and then once for as many layers as --memory \
has counters for, on all cores. The same traces give the same bytes, in whatever order and on however many threads.

A request that is damaged is left out, and told with its file; so is a file that is damaged as a whole, which counts as many \
requests as its size lets expect. Above --max-bad nothing is written. With --hold-out a share of \
the requests, chosen by the hash of their prompts, is not counted but written as a trace to judge with; --solve-trace writes \
the others as a trace for `solve --trace`.

With --weight-by domain each kind of text counts alike, however much of it was recorded: the counts of a domain are multiplied \
by a small whole number (the report tells which). A domain is a file, by its name up to the first dot, or what NAME=FILE says.

Examples:
  semmoe profile build run.trace.safetensors --out run.profile.safetensors
  semmoe profile build run.trace.safetensors --out solve.profile.safetensors --hold-out 0.2 \\
    --hold-out-trace judge.trace.safetensors --solve-trace solve.trace.safetensors
  semmoe profile build --weight-by domain code=a.trace code=b.trace chat=c.trace \\
      --out all.profile.safetensors";

/// The beginning of `profile merge --help`.
pub(super) const MERGE_ABOUT: &str = "\
Add profiles of one model and phase up.

Shards can be built anywhere and merged in any order or grouping: the bytes are the same, and those of one build from all the \
traces. With --weight-by domain each domain counts alike, as in `profile build`; that is the last step, as multiplied counts \
are not to be weighted again.

Example:
  semmoe profile merge monday.profile.safetensors tuesday.profile.safetensors \\
      --out week.profile.safetensors";

/// Which tokens of a trace count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PhaseArg {
    /// Tokens of prompts.
    Prefill,
    /// Generated tokens.
    Decode,
    All,
}

/// How inputs are weighted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightArg {
    /// Each domain alike.
    Domain,
}

#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// Traces of one model; NAME=TRACE names the domain.
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) traces: Vec<DomainInput>,
    /// The profile to write.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Which tokens to count.
    #[arg(long, value_enum, default_value_t = PhaseArg::All)]
    pub(crate) split: PhaseArg,
    /// Let every domain count alike.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) weight_by: Option<WeightArg>,
    /// About this share of the requests is not counted, by the hash of their prompts.
    #[arg(long, value_name = "SHARE", requires = "hold_out_trace")]
    pub(crate) hold_out: Option<f64>,
    /// The trace to write the held-out requests to, without router weights.
    #[arg(long, help_heading = "Output", value_name = "FILE", requires = "hold_out")]
    pub(crate) hold_out_trace: Option<PathBuf>,
    /// The trace to write the counted requests to, for `solve --trace`, which must not see those held out.
    #[arg(long, help_heading = "Output", value_name = "FILE", requires = "hold_out")]
    pub(crate) solve_trace: Option<PathBuf>,
    /// Share of requests that may be damaged.
    #[arg(long, default_value_t = 0.01)]
    pub(crate) max_bad: f64,
    /// Threads [default: one for each core].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// MiB of counters; fewer take more passes over the traces.
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) memory: u32,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// Profiles of one model and phase; NAME=PROFILE names the domain.
    #[arg(required = true, value_name = "PROFILE")]
    pub(crate) profiles: Vec<DomainInput>,
    /// The profile to write.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Let every domain count alike.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) weight_by: Option<WeightArg>,
    /// Threads [default: one for each core].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
