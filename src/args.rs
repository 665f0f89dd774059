//! The command line: the one definition of every argument, its default and its help.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};

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
mod tables;
mod up;
mod worker;

pub(crate) use build::{BuildArgs, MergeArgs, PhaseArg, WeightArg};
pub(crate) use import::{IMPORT_ABOUT, ImportArgs, ImportFormat};
pub(crate) use keys::{KeyName, KeysCommand};
pub(crate) use load::{LoadArgs, LoadRoute};
pub(crate) use plan::PlanArgs;
pub(crate) use record::{PromptArg, RecordArgs, RecordEngine};
pub(crate) use serve::{QuickArgs, ServeArgs, ServeEngine};
pub(crate) use show::ShowArgs;
pub(crate) use tables::{ExportArgs, ExportFormat, PermuteArgs, TablesCommand, TablesFile};
pub(crate) use up::UpArgs;
pub(crate) use worker::{
    ExitAfterLoss, UnitAttention, UnitAttentionArgs, UnitLayoutArgs, WorkerNetworkArgs, WorkerServingArgs,
    WorkerTrustArgs,
};

/// What `--version` prints; `-V` prints its first line.
const LONG_VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\ncommit:   ",
    env!("CLI_COMMIT"),
    "\nfeatures: ",
    env!("CLI_FEATURES"),
    "\ntarget:   ",
    env!("CLI_TARGET")
);

const ABOUT_EXAMPLES: &str = "\
Examples:
  semmoe up                                            try it: a small model over four ranks on this machine
  semmoe serve --engine sglang --url http://127.0.0.1:30000
  semmoe load --url http://127.0.0.1:8080 --prompts prompts.jsonl --stream --concurrency 32 --duration 60s

Exit codes: 0 done, 1 failed, 2 wrong arguments or input, 3 a rank was lost (worker), 130 interrupted.";

/// A token-affinity scheduling gateway for expert-parallel MoE serving.
#[derive(Debug, Parser)]
#[command(name = "semmoe", version, long_version = LONG_VERSION, about, propagate_version = true, max_term_width = 100)]
#[command(after_help = ABOUT_EXAMPLES)]
pub(crate) struct Cli {
    /// How much to log on standard error [default: warn; serve: `[log]` of its configuration].
    #[arg(long, global = true, value_enum, help_heading = "Global options")]
    pub(crate) log: Option<LogLevel>,
    /// Log as JSON, one object a line [serve: `[log]` of its configuration].
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) log_json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Log levels, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model on this machine: rank processes, solved tables and the gateway.
    ///
    /// The first run records a profile from bundled prompts, solves the tables and caches both; later runs start from the cache.
    /// Where --experts is not ep there is no placement to solve: nothing is recorded, and requests go round robin.
    #[command(after_long_help = up::UP_EXAMPLES)]
    Up(UpArgs),
    /// Run the gateway in front of engines.
    #[command(after_long_help = serve::SERVE_EXAMPLES)]
    Serve(ServeArgs),
    /// Make API keys for clients of the gateway, or hash them for its configuration.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Run one expert-parallel rank.
    #[command(after_long_help = worker::WORKER_EXAMPLES)]
    Worker(WorkerArgs),
    /// Record, build, merge and show routing profiles.
    #[command(subcommand)]
    Profile(ProfileCommand),
    /// Solve the tables T, A and E from a profile.
    #[command(long_about = SOLVE_ABOUT)]
    Solve(SolveArgs),
    /// Judge tables on a trace or a profile.
    #[command(after_long_help = EVALUATE_EXAMPLES)]
    Evaluate(EvaluateArgs),
    /// Look at tables, export them to engines, or rewrite a checkpoint for them.
    #[command(subcommand)]
    Tables(TablesCommand),
    /// Choose how to run a model on a cluster, from models of its time and memory.
    #[command(long_about = plan::PLAN_ABOUT, after_long_help = plan::PLAN_EXAMPLES)]
    Plan(PlanArgs),
    /// Send load to a gateway or an engine and measure its answers.
    #[command(after_long_help = load::LOAD_EXAMPLES)]
    Load(LoadArgs),
    /// Print a script that completes this command's options in a shell.
    #[command(after_long_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// The shell to complete in.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages, one for each subcommand.
    #[command(after_long_help = MAN_EXAMPLES)]
    Man {
        /// The folder to write them to, such as one called man1.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

const EVALUATE_EXAMPLES: &str = "\
Examples:
  semmoe evaluate --tables m.tables.safetensors --trace held-out.trace.safetensors
  semmoe evaluate --tables m.tables.safetensors --profile other.profile.safetensors --json";

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
  semmoe profile show run.trace.safetensors --html page.html --tables m.tables.safetensors --tokenizer DIR";

#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// A Hugging Face checkpoint directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// This rank, from 0; rank 0 serves HTTP for the whole unit.
    #[arg(long)]
    pub(crate) rank: u16,
    /// Number of ranks in the unit.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) world: u16,
    /// Where ranks meet: rank 0 binds this address (port 0 takes a free one), the others connect to it.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) rendezvous: SocketAddr,
    /// Rank 0's HTTP address.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:30000")]
    pub(crate) listen: SocketAddr,
    /// Tables whose placement E this unit runs; contiguous placement when absent. Only with --experts ep.
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) attention: UnitAttentionArgs,
    #[command(flatten)]
    pub(crate) layout: UnitLayoutArgs,
    #[command(flatten)]
    pub(crate) serving: WorkerServingArgs,
    #[command(flatten)]
    pub(crate) network: WorkerNetworkArgs,
    #[command(flatten)]
    pub(crate) trust: WorkerTrustArgs,
    /// Leave when standard input closes, so that a rank never outlives the process that started it.
    #[arg(long)]
    pub(crate) exit_on_stdin_eof: bool,
    /// After another rank was lost, rank 0 answers with 503 and the cause for so long, then exits with code 3; never =
    /// until it is asked to stop. The other ranks exit at once.
    #[arg(long, value_name = "SECONDS|never", default_value = "5")]
    pub(crate) exit_after_loss: ExitAfterLoss,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ProfileCommand {
    /// Send prompts to an engine and write the routing it reports as a trace.
    #[command(long_about = record::RECORD_ABOUT)]
    Record(RecordArgs),
    /// Import routing that others recorded: SGLang's recorder, EPLB's counts, NumPy's arrays.
    #[command(long_about = IMPORT_ABOUT)]
    Import(ImportArgs),
    /// Count traces into a profile.
    #[command(long_about = build::BUILD_ABOUT)]
    Build(BuildArgs),
    /// Add profiles of one model and phase up.
    #[command(long_about = build::MERGE_ABOUT)]
    Merge(MergeArgs),
    /// Describe a trace or a profile: the paper's Table 1 for every layer, loads, evidence; with --html as a page with pictures.
    #[command(after_long_help = SHOW_PROFILE_EXAMPLES)]
    Show(ShowArgs),
}

/// How the attention of the deployment is parallel, which decides the unit that is routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AttentionArg {
    /// Data parallel: requests are routed.
    Dp,
    /// Tensor parallel: tokens are routed, layer by layer.
    Tp,
}

/// What a solve makes best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ObjectiveArg {
    /// Most activations on the token's own rank: the local activation rate.
    Activations,
    /// Fewest other ranks that a token is sent to: for kernels that send a token once to each rank. Needs --trace, as a
    /// profile does not say which experts a token activates together.
    Ranks,
}

/// Algorithms that `solve` knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SolverArg {
    /// Alternating exact steps from many starts.
    Exact,
    /// Algorithm 1 of the Sem-MoE paper, greedy: a baseline to compare with.
    Paper,
}

/// What `solve --help` begins with.
const SOLVE_ABOUT: &str = "\
Solve the tables T, A and E from a profile.

In a mixture-of-experts model every token activates a few experts per layer, and with expert parallelism each rank holds only \
some of them: an activation of an expert elsewhere is traffic. Which experts a token activates depends much on the token itself. \
So experts that the same tokens activate are put on one rank, and requests with such tokens are sent there.

  E   the group (rank) of every expert: engines load it, see `tables export` and `tables permute`
  T   how much of a token's activations is local on each rank: the gateway scores requests with it
  A   which group follows on the groups of the two layers before (attention tp, with --trace; where it helps)

The figure of merit is the local activation rate (LAR): the share of activations on the rank where the token is. With G groups \
and no placement at all it is about 1/G. Groups get equally many experts, and loads stay even: the report prints how even. \
LAR on the solving data flatters: with --trace a part of its requests is held out, and the tables are judged on these. On other traffic judge with `semmoe evaluate`.

From nothing to tables in three commands:
  semmoe profile record --engine sglang --url http://127.0.0.1:30000 --prompts prompts.jsonl --out run.trace.safetensors
  semmoe profile build run.trace.safetensors --out run.profile.safetensors
  semmoe solve --profile run.profile.safetensors --trace run.trace.safetensors --groups 8 --out m.tables.safetensors

Record your own traffic: tables solved on other kinds of text are worth less.";

#[derive(Debug, Args)]
pub(crate) struct SolveArgs {
    /// Counts to solve from.
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: PathBuf,
    /// A trace of the same traffic: with it requests are clustered (attention dp) and A is counted (attention tp).
    ///
    /// A profile has counts of tokens only, so without a trace whole requests are not seen, which is what attention dp routes:
    /// give the trace there whenever there is one.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// The model's `tokenizer.json`, or a directory with it: tokens that were seen rarely or never are then expected where
    /// similarly spelt ones go, which matters most for traffic unlike the profile's.
    #[arg(long, value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// The model's weights, for the same purpose: tokens are expected where those with similar input embeddings go. A
    /// safetensors file, the index of several, or a directory with either; both with --tokenizer is best.
    #[arg(long, value_name = "PATH")]
    pub(crate) embeddings: Option<PathBuf>,
    /// The tensor of the input embeddings, where its name does not end with `embed_tokens.weight`.
    #[arg(long, value_name = "NAME", requires = "embeddings")]
    pub(crate) embeddings_tensor: Option<String>,
    /// Expert-parallel groups (ranks); must divide the number of experts, or see --pad.
    ///
    /// More groups spread the experts over more memory, but fewer activations are local.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) groups: u16,
    /// How attention is parallel, which decides what is routed and so what is optimised.
    #[arg(long, value_enum, default_value_t = AttentionArg::Dp)]
    pub(crate) attention: AttentionArg,
    /// Which algorithm places tokens and experts.
    #[arg(long, value_enum, default_value_t = SolverArg::Exact)]
    pub(crate) solver: SolverArg,
    /// What to make best; both figures are reported.
    #[arg(long, value_enum, default_value_t = ObjectiveArg::Activations)]
    pub(crate) objective: ObjectiveArg,
    /// The tables to write.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Also write the solver's report (JSON).
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Share of the trace's requests that are not solved on, 0 to 0.5: half of them to choose the strength of T's prior and the
    /// layers of A with, half to judge the tables on. 0 = none; then the prior is not fitted and there is no A.
    ///
    /// Their counts are taken out of the profile where it contains them. Which requests these are depends on their prompts alone, so
    /// that equal prompts stay together, and runs with other options are judged on the same ones.
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, value_parser = hold_out_share)]
    pub(crate) hold_out: f64,
    /// Seed: the same seed and input give the same tables.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Slots per layer beyond one for each expert, of all groups together: experts wanted in several places get
    /// replicas there. Experts plus slots must be divisible by the groups. Attention dp.
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub(crate) redundant: u16,
    /// Where the groups do not divide the experts: give every group as many slots as the largest needs, and leave some empty.
    ///
    /// For engines that deal out experts unevenly. SGLang wants an expert in every slot: `tables export` refuses padding.
    #[arg(long)]
    pub(crate) pad: bool,
    /// Leave the experts where they are and solve T (and A, and prices) alone: `linear` (blocks of N/G experts), `round_robin`
    /// (expert e on group e mod G), or a file with a placement: tables, or the JSON that SGLang reads and `tables export` writes.
    ///
    /// For engines that accept no placement, or that run one already. Groups of experts that break the limit on load are
    /// reported, not refused.
    #[arg(long, value_name = "linear|round_robin|FILE")]
    pub(crate) placement: Option<PathBuf>,
    /// Tables of the same model and groups that are deployed: one more start begins with their experts, and an expert that
    /// leaves its group must be worth it. For traffic that has drifted; the report has the experts moved, and the rate before.
    #[arg(long, value_name = "TABLES")]
    pub(crate) warm_start: Option<PathBuf>,
    /// What an expert that moves must gain: local activations, in units of all those of its layer's average expert.
    ///
    /// 0 moves experts for any gain, 1 only for as many as an average expert has. Where the old placement breaks the limit on
    /// expert load, experts move whatever they cost.
    #[arg(long, value_name = "C", requires = "warm_start", default_value_t = semmoe_solver::WarmStart::DEFAULT_COST)]
    pub(crate) migration_cost: f64,
    /// Nodes that the groups are on, G/M neighbours each: an activation on another group of the node costs 1, on another node
    /// --inter-cost. Must divide the groups.
    ///
    /// Made best is then the cost, not the local rate alone; the report has the share of activations that stay on their node.
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) nodes: Option<u16>,
    /// What an activation on another node costs, in units of one on another group of the same node.
    ///
    /// About the ratio of NVLink's and the network's bandwidth per GPU: 3.2 on H800, up to 9 on H100 and H200 nodes.
    #[arg(long, value_name = "X", requires = "nodes", default_value_t = semmoe_solver::Nodes::DEFAULT_INTER_COST)]
    pub(crate) inter_cost: f64,
    /// `n_group` of the model's config.json (DeepSeek-V2 and -V3): a router that limits a token to a few of these groups of
    /// neighbouring experts limits it to as many nodes, if whole groups stay on one node.
    ///
    /// With --nodes they stay on one node. Without it they stay where `tables permute` can keep them whole, which it must.
    #[arg(long, value_name = "N_GROUP", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) gating_groups: u16,
    /// Stop after this many seconds with the best found so far, as Ctrl-C does; what is written then depends on the
    /// machine's speed. Both end with exit code 0, as the tables are valid; a second Ctrl-C writes nothing and ends with 130.
    #[arg(long, value_name = "SECONDS", value_parser = positive_seconds)]
    pub(crate) time_limit: Option<f64>,
}

fn hold_out_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=0.5).contains(&share) => Ok(share),
        _ => Err("expected a share from 0 to 0.5".to_owned()),
    }
}

fn positive_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 1e9 => Ok(seconds),
        _ => Err("expected a number of seconds above 0, at most 1e9".to_owned()),
    }
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("traffic").required(true).args(["trace", "profile"]))]
pub(crate) struct EvaluateArgs {
    /// The tables to judge.
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: PathBuf,
    /// Judge on this trace (request policies included).
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Judge on this profile.
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
    /// Nodes that the groups are on, G/M neighbours each: tells what leaves its node [default: those that were solved for].
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) nodes: Option<u16>,
    /// Judge attention tp in steps of this many tokens of the trace, whose rows are split evenly in each layer, as the worker does;
    /// without it each token is by itself on its likeliest group, which is the most that T and A can give.
    #[arg(long, value_name = "N", conflicts_with = "profile", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) step_tokens: Option<u32>,
    /// Believe that each rank's prefix cache holds this many blocks of 64 tokens, so that policies that look there do; 0: none.
    #[arg(long, value_name = "B", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub(crate) prefix_blocks: u32,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}
