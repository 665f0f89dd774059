//! The command-line interface: the single definition of all arguments, their defaults and their help.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use semmoe_tables::Attention;
use tracing_subscriber::filter::LevelFilter;

mod build;
#[cfg(test)]
mod examples;
mod import;
mod keys;
mod load;
mod plan;
mod record;
mod serve;
mod show;
mod solve;
mod tables;
mod template;
mod up;
mod worker;

pub(crate) use build::{BuildArgs, MergeArgs, WeightArg};
pub(crate) use import::{IMPORT_ABOUT, ImportArgs, ImportFormat};
pub(crate) use keys::{KeyName, KeysCommand};
pub(crate) use load::LoadArgs;
pub(crate) use plan::{CalibrateArgs, PlanAction, PlanArgs, PlanCommand};
pub(crate) use record::RecordArgs;
pub(crate) use serve::{QuickArgs, ServeArgs};
pub(crate) use show::ShowArgs;
pub(crate) use solve::{EvaluateArgs, SolveArgs, SolverArg};
pub(crate) use tables::{ExportArgs, ExportFormat, PermuteArgs, ShowTables, TablesCommand, TablesFile};
pub(crate) use template::{TemplateCheckArgs, TemplateCommand};
pub(crate) use up::{PlanSource, UpArgs};
pub(crate) use worker::{UnitAttention, UnitAttentionArgs, UnitLayoutArgs, WorkerArgs};

/// Printed by `--version`; `-V` prints its first line.
static LONG_VERSION: LazyLock<String> = LazyLock::new(|| {
    let [version, commit] = [env!("CARGO_PKG_VERSION"), env!("CLI_COMMIT")];
    let [features, target] = [env!("CLI_FEATURES"), env!("CLI_TARGET")];
    let kernels = match (cfg!(feature = "cuda"), semmoe_worker::gpu_kernels()) {
        (false, _) => String::new(),
        (true, targets) if targets.is_empty() => "\nkernels:  none, compiled by NVRTC on first start".to_owned(),
        (true, targets) => format!("\nkernels:  {}", targets.join(" ")),
    };
    format!("{version}\ncommit:   {commit}\nfeatures: {features}\ntarget:   {target}{kernels}")
});

const ABOUT_EXAMPLES: &str = "\
Examples:
  semmoe up                                    try it: a small model on four ranks of this machine
  semmoe serve --engine sglang --url http://127.0.0.1:30000
  semmoe load --url http://127.0.0.1:8080 --prompts prompts.jsonl --stream --concurrency 32 \\
      --duration 60s

Exit codes: 0 done, 1 failed, 2 wrong arguments or input, 3 a rank was lost (worker), 130 interrupted.";

/// A token-affinity scheduling gateway for expert-parallel MoE serving.
#[derive(Debug, Parser)]
#[command(name = "semmoe", version, long_version = LONG_VERSION.as_str(), about, propagate_version = true, max_term_width = 100)]
#[command(after_help = ABOUT_EXAMPLES)]
pub(crate) struct Cli {
    /// Log level on standard error [default: warn; for serve: `[log]` in the configuration].
    #[arg(long, global = true, value_parser = log_level(), help_heading = "Global options")]
    pub(crate) log: Option<LevelFilter>,
    /// Log as JSON, one object per line [for serve: `[log]` in the configuration].
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) log_json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

fn log_level() -> impl TypedValueParser<Value = LevelFilter> {
    let least_first = ["off", "error", "warn", "info", "debug", "trace"];
    PossibleValuesParser::new(least_first).try_map(|level| level.parse::<LevelFilter>())
}

/// Parses an option with a fixed set of named values.
fn named<T: Clone + Send + Sync + 'static, const N: usize>(
    values: [(PossibleValue, T); N],
) -> impl TypedValueParser<Value = T> {
    let names = values.clone().map(|(name, _)| name);
    PossibleValuesParser::new(names).map(move |given| {
        let found = values.iter().find(|(name, _)| name.matches(&given, false));
        found.expect("the parser accepts only these names").1.clone()
    })
}

/// Parses a number within `range`; `expected` is the error otherwise.
fn number(range: RangeInclusive<f64>, expected: &'static str) -> impl Fn(&str) -> Result<f64, &'static str> + Clone {
    move |text| match text.parse::<f64>() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(expected),
    }
}

/// Parses a positive duration such as `90s` or `5m`; a plain number means seconds.
fn seconds(text: &str) -> Result<Duration, &'static str> {
    let time = match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => humantime::parse_duration(text).ok(),
    };
    time.filter(|time| !time.is_zero()).ok_or("expected a positive duration such as 90s or 5m, or a number of seconds")
}

/// Parses how a deployment parallelizes attention, which determines whether requests or tokens are routed.
fn attention() -> impl TypedValueParser<Value = Attention> {
    named([
        (PossibleValue::new("dp").help("Data parallel: requests are routed"), Attention::Dp),
        (PossibleValue::new("tp").help("Tensor parallel: tokens are routed, layer by layer"), Attention::Tp),
    ])
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model on this machine: start the ranks, solve the tables and run the gateway.
    ///
    /// The first run records a profile from bundled prompts, solves the tables and caches both; later runs start from
    /// the cache. With --experts tp or hybrid there is no placement to solve: nothing is recorded, and requests are
    /// routed round robin.
    #[command(after_long_help = up::UP_EXAMPLES)]
    Up(UpArgs),
    /// Run the gateway in front of engines.
    #[command(after_long_help = serve::SERVE_EXAMPLES)]
    Serve(ServeArgs),
    /// Generate API keys for clients of the gateway, or hash existing ones for its configuration.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Run one expert-parallel rank.
    #[command(after_long_help = worker::WORKER_EXAMPLES)]
    Worker(WorkerArgs),
    /// Record, import, build, merge and show routing profiles.
    #[command(subcommand)]
    Profile(ProfileCommand),
    /// Solve the tables T, A and E from a profile.
    #[command(long_about = solve::SOLVE_ABOUT)]
    Solve(SolveArgs),
    /// Evaluate tables on a trace or a profile.
    #[command(after_long_help = solve::EVALUATE_EXAMPLES)]
    Evaluate(EvaluateArgs),
    /// Inspect tables, export them to engines, or rewrite a checkpoint for them.
    #[command(subcommand)]
    Tables(TablesCommand),
    /// Test a model's chat template before serving the model.
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Choose how to run a model on a cluster, based on time and memory models.
    #[command(long_about = plan::PLAN_ABOUT, after_long_help = plan::PLAN_EXAMPLES)]
    Plan(PlanCommand),
    /// Send load to a gateway or an engine and measure the responses.
    #[command(after_long_help = load::LOAD_EXAMPLES)]
    Load(LoadArgs),
    /// Print a shell completion script.
    #[command(after_long_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// The shell that runs the script.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages, one per subcommand.
    #[command(after_long_help = MAN_EXAMPLES)]
    Man {
        /// The directory to write to, usually named man1.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  semmoe completions bash > /etc/bash_completion.d/semmoe
  semmoe completions zsh > ~/.zfunc/_semmoe
  semmoe completions fish > ~/.config/fish/completions/semmoe.fish";

const MAN_EXAMPLES: &str = "\
Examples:
  semmoe man /usr/local/share/man/man1";

const SHOW_PROFILE_EXAMPLES: &str = "\
Examples:
  semmoe profile show run.profile.safetensors
  semmoe profile show run.trace.safetensors --html page.html --tables m.tables.safetensors \\
      --tokenizer DIR";

/// Output options, shared by all subcommands that print a result.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct OutputArgs {
    /// Print the result as one JSON document.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ProfileCommand {
    /// Send prompts to an engine and record the routing it reports as a trace.
    #[command(long_about = record::RECORD_ABOUT)]
    Record(RecordArgs),
    /// Import routing recorded by other tools: SGLang's recorder, EPLB counts, NumPy arrays.
    #[command(long_about = IMPORT_ABOUT)]
    Import(ImportArgs),
    /// Build a profile from traces.
    #[command(long_about = build::BUILD_ABOUT)]
    Build(BuildArgs),
    /// Merge profiles of one model and phase.
    #[command(long_about = build::MERGE_ABOUT)]
    Merge(MergeArgs),
    /// Describe a trace or a profile: the paper's Table 1 for every layer, loads and token coverage; --html writes a
    /// page with charts.
    #[command(after_long_help = SHOW_PROFILE_EXAMPLES)]
    Show(ShowArgs),
}
