//! The arguments of `semmoe profile import`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::OutputArgs;

/// Who wrote the files of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImportFormat {
    /// Dumps of SGLang's expert distribution recorder: per_token becomes a trace, stat and stat_approx become expert
    /// loads.
    Sglang,
    /// Counts [layers, experts] or [steps, layers, experts], as EPLB takes them (an array, `logical_count`, or JSON):
    /// expert loads.
    Eplb,
    /// Arrays token_ids (n), experts (n x layers x k), and perhaps request_offsets (R + 1) and prompt_lengths (R): a
    /// trace.
    #[value(alias = "npz")]
    Routes,
}

/// The beginning of `profile import --help`.
pub(crate) const IMPORT_ABOUT: &str = "\
Import routing that others recorded.

Files that say which token activated which experts become a trace, for `profile build` and `solve`. Files with counts of experts alone \
cannot: tables are made from the experts of each token. They become a JSON file of expert loads, which shows how even the engine's \
traffic is, and with --against how well a profile stands for it.

Arrays are read from safetensors files. `semmoe-convert FILE...`, a Python script that is installed with this command, writes \
FILE.safetensors from a .pt, .npy or .npz file, which it reads without executing it.

For Hugging Face Transformers see profiler/python/record_routing.py, which writes traces itself.

Example:
  semmoe-convert expert_distribution_recorder_*.pt
  semmoe profile import expert_distribution_recorder_*.safetensors --format sglang \\
      --model-config DIR --model NAME --out run.trace.safetensors";

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The files; of SGLang's recorder those of all ranks.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Who wrote them.
    #[arg(long, value_enum)]
    pub(crate) format: ImportFormat,
    /// The checkpoint's config.json, or its folder: the files do not say the model's shape.
    #[arg(long, value_name = "PATH")]
    pub(crate) model_config: PathBuf,
    /// The model's name, as the engine calls it.
    #[arg(long, value_name = "NAME")]
    pub(crate) model: String,
    /// The model's tokenizer, so that tables for another one are refused later: its file or the checkpoint's folder.
    #[arg(long, value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// The trace to write; of counts the JSON file of loads.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Of counts: a profile of the same model, to compare the loads with.
    #[arg(long, value_name = "PROFILE")]
    pub(crate) against: Option<PathBuf>,
    /// Share of records that may be unusable before the import is given up.
    #[arg(long, default_value_t = 0.01)]
    pub(crate) max_bad: f64,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
