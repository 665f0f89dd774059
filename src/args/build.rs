//! The arguments of `semmoe profile build` and `merge`.

use std::path::PathBuf;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Args, ValueEnum};
use semmoe_profiler::DomainInput;
use semmoe_tables::Phase;

use super::{OutputArgs, named};

/// Introduction printed by `profile build --help`.
pub(super) const BUILD_ABOUT: &str = "\
Build a profile from traces: how often each token activated each expert, layer by layer.

Traces can be of any size. They are memory-mapped and read in chunks on all cores: once to check them, and then once for every \
group of layers whose counters fit in --memory. The same traces always produce the same bytes, in any order and on any number of threads.

Damaged requests are left out and reported with their file; so are files that are damaged as a whole, which count as the number \
of requests that their size suggests. Above --max-bad nothing is written. With --hold-out a fraction of the requests, chosen by a \
hash of their prompts, is not counted but written as a trace to evaluate on; --solve-trace writes the others as a trace for \
`solve --trace`.

With --weight-by domain each kind of text has the same weight, however much of it was recorded: the counts of a domain are \
multiplied by a small integer, which the report shows. A domain is a file, named by its file name up to the first dot, or by \
NAME=FILE.

Examples:
  semmoe profile build run.trace.safetensors --out run.profile.safetensors
  semmoe profile build run.trace.safetensors --out solve.profile.safetensors --hold-out 0.2 \\
    --hold-out-trace judge.trace.safetensors --solve-trace solve.trace.safetensors
  semmoe profile build --weight-by domain code=a.trace code=b.trace chat=c.trace \\
      --out all.profile.safetensors";

/// Introduction printed by `profile merge --help`.
pub(super) const MERGE_ABOUT: &str = "\
Merge profiles of one model and phase.

Shards can be built anywhere and merged in any order or grouping: the result has the same bytes as one build from all traces. \
With --weight-by domain each domain has the same weight, as in `profile build`; do that last, as weighted counts cannot be \
weighted again.

Example:
  semmoe profile merge monday.profile.safetensors tuesday.profile.safetensors \\
      --out week.profile.safetensors";

/// Parses the phase of the tokens to count.
fn phase() -> impl TypedValueParser<Value = Phase> {
    named([
        (PossibleValue::new("prefill").help("Prompt tokens"), Phase::Prefill),
        (PossibleValue::new("decode").help("Generated tokens"), Phase::Decode),
        (PossibleValue::new("all"), Phase::All),
    ])
}

/// How inputs are weighted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightArg {
    /// Give every domain the same weight.
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
    #[arg(long, value_parser = phase(), default_value = "all")]
    pub(crate) split: Phase,
    /// Give every domain the same weight.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) weight_by: Option<WeightArg>,
    /// Fraction of requests to hold out, chosen by a hash of their prompts.
    #[arg(long, value_name = "SHARE", requires = "hold_out_trace")]
    pub(crate) hold_out: Option<f64>,
    /// The trace to write the held-out requests to, without router weights.
    #[arg(long, help_heading = "Output", value_name = "FILE", requires = "hold_out")]
    pub(crate) hold_out_trace: Option<PathBuf>,
    /// The trace to write the counted requests to, for `solve --trace`, which must not see the held-out ones.
    #[arg(long, help_heading = "Output", value_name = "FILE", requires = "hold_out")]
    pub(crate) solve_trace: Option<PathBuf>,
    /// Maximum fraction of damaged requests.
    #[arg(long, default_value_t = 0.01)]
    pub(crate) max_bad: f64,
    /// Number of threads [default: one per core].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// Memory for counters, in MiB; less memory requires more passes over the traces.
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
    /// Give every domain the same weight.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) weight_by: Option<WeightArg>,
    /// Number of threads [default: one per core].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
