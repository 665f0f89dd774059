//! The arguments of `semmoe profile record`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, TypedValueParser};
use semmoe_engines::Engine;
use semmoe_profiler::PromptFormat;

use super::named;

/// Introduction printed by `profile record --help`.
pub(super) const RECORD_ABOUT: &str = "\
Send prompts to an engine and record the routing it reports as a trace.

The engine runs unmodified, started with --enable-return-routed-experts (SGLang 0.5.8 or later, vLLM); semmoe's worker needs no \
option. It can serve other clients at the same time: --rate and --concurrency limit the load of the recording.

Prompts are JSON Lines (objects with \"messages\", \"input_ids\" or \"prompt\"), ShareGPT's JSON (FILE.json) or plain text with \
one prompt per line (FILE.txt). With --tokenizer they are tokenized here, using the model's chat template, and sent as token ids. \
With --max-tokens above 1 decoding is recorded too; the trace keeps prefill and decode apart, and `profile build --split` counts \
either.

Every response is checked: the engine saw the prompt that was sent, every token has its routed experts, and these are valid, \
distinct, and not the same for every token. Records that fail are left out and reported with file, record and reason; above \
--max-bad the recording ends with exit code 1. Prompts that the engine refuses, such as one that is too long, are left out, \
counted and reported, however many; only if it refuses all of them is that an error.

Good responses are saved to OUT.partial as they arrive. If a recording ends early, even by a crash or a lost engine, the same \
command resumes it; no prompt counts twice.

Examples:
  semmoe profile record --engine sglang --url http://127.0.0.1:30000 --model-config DIR \\
      --tokenizer DIR \\
      --prompts prompts.jsonl --max-tokens 64 --out run.trace.safetensors
  semmoe profile record --engine vllm --url http://127.0.0.1:8000 --model-config DIR \\
      --prompts ShareGPT.json \\
      --out run.trace.safetensors --tables m.tables.safetensors --groups 8";

/// Parses an engine that `profile record` supports.
fn engine() -> impl TypedValueParser<Value = Engine> {
    named([Engine::Semmoe, Engine::Sglang, Engine::Vllm].map(|engine| (PossibleValue::new(engine.name()), engine)))
}

/// Parses the format of a prompts file.
fn format() -> impl TypedValueParser<Value = PromptFormat> {
    named([
        (PossibleValue::new("auto").help("By the file's extension"), PromptFormat::Auto),
        (PossibleValue::new("jsonl"), PromptFormat::JsonLines),
        (PossibleValue::new("sharegpt"), PromptFormat::ShareGpt),
        (PossibleValue::new("text"), PromptFormat::Text),
    ])
}

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    /// The engine behind --url.
    #[arg(long, help_heading = "Engine", value_parser = engine())]
    pub(crate) engine: Engine,
    /// Base URL of the engine.
    #[arg(long, help_heading = "Engine")]
    pub(crate) url: String,
    /// File that contains the engine's API key (its --api-key) on one line.
    #[arg(long, help_heading = "Engine", value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// File of prompts.
    #[arg(long, help_heading = "Requests", value_name = "FILE")]
    pub(crate) prompts: PathBuf,
    /// Format of the prompts.
    #[arg(long, help_heading = "Requests", value_parser = format(), default_value = "auto")]
    pub(crate) format: PromptFormat,
    /// The trace to write.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Tokenizer file or checkpoint directory, required for --max-prompt-tokens. Without it the engine tokenizes.
    #[arg(long, help_heading = "Requests", value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// The checkpoint's config.json or its directory, as SGLang and vLLM do not report the model's shape. Not needed if
    /// the engine reports a model directory that exists on this machine.
    #[arg(long, help_heading = "Engine", value_name = "PATH")]
    pub(crate) model_config: Option<PathBuf>,
    /// Tokens to generate per prompt; with 1, only the prompt's routing is recorded.
    #[arg(long, help_heading = "Requests", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, help_heading = "Requests", default_value_t = 0.0)]
    pub(crate) temperature: f32,
    /// Truncate prompts to this many tokens.
    #[arg(long, help_heading = "Requests")]
    pub(crate) max_prompt_tokens: Option<usize>,
    /// Use only the first N records.
    #[arg(long, help_heading = "Requests", value_name = "N")]
    pub(crate) max_prompts: Option<usize>,
    /// Maximum requests in flight.
    #[arg(long, help_heading = "Pace and failures", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) concurrency: u16,
    /// Maximum requests started per second.
    #[arg(long, help_heading = "Pace and failures", value_name = "PER_SECOND")]
    pub(crate) rate: Option<f64>,
    /// Maximum retries after a failed connection, a 5xx or a 429.
    #[arg(long, help_heading = "Pace and failures", default_value_t = 4, value_parser = clap::value_parser!(u32).range(..=100))]
    pub(crate) retries: u32,
    /// Timeout per request, in seconds.
    #[arg(long, help_heading = "Pace and failures", value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) timeout: u32,
    /// Use /v1/completions even if the engine has /generate.
    #[arg(long, help_heading = "Engine")]
    pub(crate) openai_routes: bool,
    /// Maximum fraction of unusable records; above it the recording fails. Prompts that the engine rejects do not
    /// count.
    #[arg(long, help_heading = "Pace and failures", default_value_t = 0.01)]
    pub(crate) max_bad: f64,
    /// Discard a partial recording and start over.
    #[arg(long, help_heading = "Pace and failures")]
    pub(crate) fresh: bool,
    /// Also build the profile (next to --out) and solve these tables from it, with the defaults of `profile build` and
    /// `solve`.
    #[arg(long, help_heading = "Output", value_name = "FILE", requires = "groups")]
    pub(crate) tables: Option<PathBuf>,
    /// Number of groups (EP ranks) for --tables.
    #[arg(long, help_heading = "Output", value_name = "G", requires = "tables", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) groups: Option<u16>,
    /// Print the report as one JSON document.
    #[arg(long, help_heading = "Output", conflicts_with = "tables")]
    pub(crate) json: bool,
}
