//! The arguments of `semmoe profile record`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// The beginning of `profile record --help`.
pub(super) const RECORD_ABOUT: &str = "\
Send prompts to an engine and write the routing it reports as a trace.

The engine is unmodified and started with --enable-return-routed-experts (SGLang 0.5.8 or later, vLLM); semmoe's worker needs \
nothing. It goes on serving others meanwhile: --rate and --concurrency bound what is sent.

Prompts are JSON Lines (objects with \"messages\", \"input_ids\" or \"prompt\"), ShareGPT's JSON (FILE.json) or plain text, one a \
line (FILE.txt). With --tokenizer they are tokenized here, by the model's template, and sent as ids. With --max-tokens above 1 \
decoding is recorded too; the trace tells both apart, and `profile build --split` counts either.

Every answer is checked: the engine saw the prompt that was sent, there is a route for each of its tokens, the ids are experts \
of the model, distinct, and not the same for every token. What does not hold is left out and told, with file, record and \
reason; above --max-bad the recording ends with exit code 1.

Good answers are kept in OUT.partial as they come. The same command goes on where a recording ended early, also after a crash \
or a lost engine; no prompt counts twice.

Examples:
  semmoe profile record --engine sglang --url http://127.0.0.1:30000 --model-config DIR \\
      --tokenizer DIR \\
      --prompts prompts.jsonl --max-tokens 64 --out run.trace.safetensors
  semmoe profile record --engine vllm --url http://127.0.0.1:8000 --model-config DIR \\
      --prompts ShareGPT.json \\
      --out run.trace.safetensors --tables m.tables.safetensors --groups 8";

/// Engines that `profile record` can drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RecordEngine {
    Semmoe,
    Sglang,
    Vllm,
}

/// The format of a file of prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PromptArg {
    /// By the file's name.
    Auto,
    Jsonl,
    Sharegpt,
    Text,
}

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    /// The engine behind --url.
    #[arg(long, help_heading = "Engine", value_enum)]
    pub(crate) engine: RecordEngine,
    /// Base URL of the engine.
    #[arg(long, help_heading = "Engine")]
    pub(crate) url: String,
    /// File with the key that the engine asks for (its --api-key): one line.
    #[arg(long, help_heading = "Engine", value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Prompts.
    #[arg(long, help_heading = "Requests", value_name = "FILE")]
    pub(crate) prompts: PathBuf,
    /// Format of the prompts.
    #[arg(long, help_heading = "Requests", value_enum, default_value_t = PromptArg::Auto)]
    pub(crate) format: PromptArg,
    /// The trace to write.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Tokenizer file or checkpoint directory; needed for --max-prompt-tokens. Without it the engine tokenizes.
    #[arg(long, help_heading = "Requests", value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// The checkpoint's config.json, or its folder: SGLang and vLLM do not report the model's shape. Not needed
    /// where the engine names a folder that is on this machine.
    #[arg(long, help_heading = "Engine", value_name = "PATH")]
    pub(crate) model_config: Option<PathBuf>,
    /// Tokens to generate per prompt; with 1 only the prompt's routing is recorded.
    #[arg(long, help_heading = "Requests", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Of the generated tokens; 0 takes the likeliest.
    #[arg(long, help_heading = "Requests", default_value_t = 0.0)]
    pub(crate) temperature: f32,
    /// Cut prompts to this many tokens.
    #[arg(long, help_heading = "Requests")]
    pub(crate) max_prompt_tokens: Option<usize>,
    /// Take only the first so many records.
    #[arg(long, help_heading = "Requests", value_name = "N")]
    pub(crate) max_prompts: Option<usize>,
    /// Requests in flight.
    #[arg(long, help_heading = "Pace and failures", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) concurrency: u16,
    /// Requests begun a second, at most.
    #[arg(long, help_heading = "Pace and failures", value_name = "PER_SECOND")]
    pub(crate) rate: Option<f64>,
    /// Further attempts after a failed connection, a 5xx or a 429.
    #[arg(long, help_heading = "Pace and failures", default_value_t = 4, value_parser = clap::value_parser!(u32).range(..=100))]
    pub(crate) retries: u32,
    /// Seconds to wait for one answer.
    #[arg(long, help_heading = "Pace and failures", value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) timeout: u32,
    /// Send to /v1/completions also where the engine has /generate.
    #[arg(long, help_heading = "Engine")]
    pub(crate) openai_routes: bool,
    /// Share of records that may be unusable before the recording is given up.
    #[arg(long, help_heading = "Pace and failures", default_value_t = 0.01)]
    pub(crate) max_bad: f64,
    /// Begin anew where there is a partial recording.
    #[arg(long, help_heading = "Pace and failures")]
    pub(crate) fresh: bool,
    /// Also build the profile (beside --out) and solve these tables from it, with the defaults of `profile build` and
    /// `solve`.
    #[arg(long, help_heading = "Output", value_name = "FILE", requires = "groups")]
    pub(crate) tables: Option<PathBuf>,
    /// Number of groups (EP ranks) to solve --tables for.
    #[arg(long, help_heading = "Output", value_name = "G", requires = "tables", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) groups: Option<u16>,
    /// Print the report as one JSON document.
    #[arg(long, help_heading = "Output", conflicts_with = "tables")]
    pub(crate) json: bool,
}
