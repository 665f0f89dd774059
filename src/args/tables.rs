//! The arguments of `semmoe tables`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use semmoe_engines::Version;

use super::OutputArgs;

#[derive(Debug, Subcommand)]
pub(crate) enum TablesCommand {
    /// Describe a tables file.
    #[command(
        after_long_help = "Examples:\n  semmoe tables show m.tables.safetensors\n  semmoe tables show m.tables.safetensors --html tables.html"
    )]
    Show(ShowTables),
    /// Check a tables file completely; exits with code 2 if anything is wrong.
    #[command(after_long_help = "Examples:\n  semmoe tables verify m.tables.safetensors")]
    Verify(TablesFile),
    /// Write the placement E in the format that an engine reads, and print the arguments that the engine needs with it.
    #[command(long_about = EXPORT_ABOUT)]
    Export(ExportArgs),
    /// Rewrite a checkpoint so that contiguous placement is E, for engines that accept no placement.
    #[command(long_about = PERMUTE_ABOUT)]
    Permute(PermuteArgs),
}

/// Introduction printed by `tables export --help`.
const EXPORT_ABOUT: &str = "\
Write the placement E in the format that an engine reads, and print the arguments that the engine needs with it.

Every format lists, layer by layer, the expert in each physical slot; slot p is on rank p / (slots / groups). \
Replicas fill the extra slots.

  sglang  --init-expert-location of an unmodified SGLang; a row for each of the model's layers, dense ones included
  eplb    phy2log, log2phy and logcnt of DeepSeek's EPLB; safetensors when --out ends in .safetensors, else JSON
  tensorrt-llm  the YAML of moe_config.load_balancer, which is static: nothing moves while it serves
  ascend  the expert map of vLLM-Ascend
  vllm    the file of an open pull request (49572); no release of vLLM reads it, so it needs --experimental

Without --out the placement goes to standard output and the arguments to standard error. For engines that accept no placement \
at all, `semmoe tables permute` writes a checkpoint in which contiguous placement is E.

Example:
  semmoe tables export --tables qwen3.tables.safetensors --format sglang --out experts.json";

/// File formats for exported placements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormat {
    Sglang,
    Eplb,
    #[value(name = "tensorrt-llm")]
    TensorrtLlm,
    Ascend,
    Vllm,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The tables to export.
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: PathBuf,
    /// The format to write.
    #[arg(long, value_enum)]
    pub(crate) format: ExportFormat,
    /// The file to write [default: standard output].
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// The SGLang version to print arguments for [default: the newest known].
    #[arg(long, value_name = "VERSION", value_parser = engine_version)]
    pub(crate) sglang_version: Option<Version>,
    /// Allow formats that no released engine reads.
    #[arg(long)]
    pub(crate) experimental: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

fn engine_version(text: &str) -> Result<Version, &'static str> {
    Version::parse(text).ok_or("expected a version such as 0.5.21")
}

/// Introduction printed by `tables permute --help`.
const PERMUTE_ABOUT: &str = "\
Rewrite a checkpoint so that contiguous placement is E, for engines that accept no placement.

Engines without a placement option put experts 0 .. N/G-1 on the first rank, the next N/G on the second, and so on. This command \
renumbers the experts of every MoE layer (their tensors, and their rows of the router and its bias), so that contiguous placement \
puts them where the tables want them. The model computes exactly the same results; no weight is changed.

The result is verified: everything written is read back and compared byte by byte with the original under the new numbers. \
config.json is written last: a directory without it is incomplete. The same command resumes an interrupted run. Files are \
memory-mapped, so little memory is needed; the disk must hold a second checkpoint.

Families: DeepSeek-V2 and -V3, Qwen3-MoE, Qwen2-MoE, OLMoE, Mixtral, GPT-OSS, quantized or not. Rejected are tables with replicas \
(a checkpoint holds each expert once: use `tables export`) and, with group-limited gating (n_group > 1), placements that split \
gating groups.

The original tables do not match the new checkpoint, whose experts have other numbers: --out-tables writes matching ones for the \
gateway.

Example:
  semmoe tables permute --tables old.tables.safetensors --checkpoint Qwen3-30B-A3B \\
    --out Qwen3-30B-A3B-ep8 --out-tables new.tables.safetensors";

#[derive(Debug, Args)]
pub(crate) struct PermuteArgs {
    /// The tables whose placement the new checkpoint will have.
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: PathBuf,
    /// Directory of the Hugging Face checkpoint to read; it is not modified.
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoint: PathBuf,
    /// The directory to write to: new, empty, or left by an interrupted run of this command.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Also write tables for the new checkpoint: T and prices unchanged, E contiguous.
    #[arg(long, value_name = "FILE")]
    pub(crate) out_tables: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct TablesFile {
    /// The tables.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ShowTables {
    #[command(flatten)]
    pub(crate) tables: TablesFile,
    /// Also write a self-contained HTML page with charts.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}
