//! The arguments of `semmoe profile import`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::OutputArgs;

/// The tool that produced the imported files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImportFormat {
    /// Dumps of SGLang's expert distribution recorder: per_token becomes a trace, stat and stat_approx become expert
    /// loads.
    Sglang,
    /// Counts of shape [layers, experts] or [steps, layers, experts], as EPLB expects them (an array, `logical_count`,
    /// or JSON), which become expert loads.
    Eplb,
    /// Arrays token_ids (n), experts (n x layers x k), and optionally request_offsets (R + 1) and prompt_lengths (R),
    /// which become a trace.
    #[value(alias = "npz")]
    Routes,
}

/// Introduction printed by `profile import --help`.
pub(crate) const IMPORT_ABOUT: &str = "\
Import routing recorded by other tools.

Files with the experts of each token become a trace, for `profile build` and `solve`. Files that only count experts cannot, as \
tables are made from the experts of each token: they become a JSON file of expert loads, which shows how balanced the engine's \
traffic is, and with --against how well a profile represents it.

Arrays are read from safetensors files. `semmoe-convert FILE...`, a Python script that is installed with this command, writes \
FILE.safetensors from a .pt, .npy or .npz file without executing anything in it.

For Hugging Face Transformers use profiler/python/record_routing.py, which writes traces directly.

Example:
  semmoe-convert expert_distribution_recorder_*.pt
  semmoe profile import expert_distribution_recorder_*.safetensors --format sglang \\
      --model-config DIR --model NAME --out run.trace.safetensors";

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The files to import; for SGLang's recorder, the files of all ranks.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// The format of the files.
    #[arg(long, value_enum)]
    pub(crate) format: ImportFormat,
    /// The checkpoint's config.json or its directory, as the imported files do not contain the model's shape.
    #[arg(long, value_name = "PATH")]
    pub(crate) model_config: PathBuf,
    /// The model's name in the engine.
    #[arg(long, value_name = "NAME")]
    pub(crate) model: String,
    /// The model's tokenizer (its file or the checkpoint's directory), so that tables for another tokenizer are
    /// rejected later.
    #[arg(long, value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// The output file: a trace, or for counts a JSON file with expert loads.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// For counts: a profile of the same model to compare the loads with.
    #[arg(long, value_name = "PROFILE")]
    pub(crate) against: Option<PathBuf>,
    /// Maximum fraction of unusable records; above it the import fails.
    #[arg(long, default_value_t = 0.01)]
    pub(crate) max_bad: f64,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
