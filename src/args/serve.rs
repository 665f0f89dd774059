//! Arguments of `semmoe serve`.

use std::path::PathBuf;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{ArgGroup, Args};
use semmoe_engines::Engine;

use super::named;

/// Environment variables and examples at the end of `serve --help`.
pub(super) const SERVE_EXAMPLES: &str = "\
Environment variables override any key of the configuration: SEMMOE_SERVER__LISTEN is `listen` in [server], \
SEMMOE_MODELS__0__POLICY the policy of the first model. Variables that match no key are rejected.

Examples:
  semmoe serve --engine sglang --url http://127.0.0.1:30000 --tokenizer Qwen3-30B-A3B \\
      --tables qwen3.tables.safetensors
  semmoe serve --engine vllm --url http://10.0.0.1:8000 --url http://10.0.0.2:8000 --print-config
  semmoe serve --config semmoe.toml --check --probe
  semmoe serve --config semmoe.toml --watch";

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("source").required(true).args(["config", "engine"]))]
pub(crate) struct ServeArgs {
    /// Gateway configuration (TOML); alternatively, use --engine and --url.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Validate the configuration and the files it names, print what would be served, then exit: with code 2 if
    /// anything is wrong. Engines are only contacted with --probe.
    ///
    /// A running gateway reloads the file on SIGHUP, on POST /admin/reload and, with --watch, whenever it changes. If
    /// this check fails, the gateway keeps its current configuration.
    #[arg(long)]
    pub(crate) check: bool,
    /// With --check: query every engine for its version, ranks and placement, and verify pins with one-token requests.
    /// Exits with code 1 if an engine does not respond, does not match its tables or ignores pins.
    #[arg(long, requires = "check")]
    pub(crate) probe: bool,
    /// With --check: print the result as one JSON document.
    #[arg(long, requires = "check")]
    pub(crate) json: bool,
    /// Reload the configuration whenever its file changes.
    #[arg(long, requires = "config", conflicts_with = "check")]
    pub(crate) watch: bool,
    // Must stay last: its help heading applies to all arguments that follow.
    #[command(flatten)]
    pub(crate) quick: QuickArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Without a configuration file")]
pub(crate) struct QuickArgs {
    /// The engine behind --url.
    #[arg(long, value_parser = engine(), requires = "url")]
    pub(crate) engine: Option<Engine>,
    /// Base URL of an engine; repeat the option for several backends.
    #[arg(long, requires = "engine")]
    pub(crate) url: Vec<String>,
    /// The model's directory or tokenizer.json, required to score prompts and to match prefixes.
    #[arg(long, value_name = "PATH", requires = "engine")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// The tables whose placement the engines run.
    #[arg(long, value_name = "FILE", requires = "tokenizer")]
    pub(crate) tables: Option<PathBuf>,
    /// The model name that clients use [default: the name that the first engine lists].
    #[arg(long, value_name = "NAME", requires = "engine")]
    pub(crate) model: Option<String>,
    /// The routing policy [default: affinity with --tables, prefix with --tokenizer, otherwise least_load].
    #[arg(long, value_name = "NAME", requires = "engine")]
    pub(crate) policy: Option<String>,
    /// Address of the data plane; the admin plane listens on the next port of the loopback address.
    #[arg(long, value_name = "ADDRESS", requires = "engine")]
    pub(crate) listen: Option<String>,
    /// Print the equivalent configuration file and exit; use it as a starting point for your own.
    #[arg(long, requires = "engine", conflicts_with = "check")]
    pub(crate) print_config: bool,
}

/// Parses an engine that `serve` supports.
fn engine() -> impl TypedValueParser<Value = Engine> {
    named([
        (PossibleValue::new("sglang"), Engine::Sglang),
        (PossibleValue::new("vllm"), Engine::Vllm),
        (PossibleValue::new("semmoe").help("semmoe's worker"), Engine::Semmoe),
        (PossibleValue::new("openai").help("Any OpenAI-compatible server"), Engine::Openai),
    ])
}
