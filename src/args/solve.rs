//! Arguments of `semmoe solve` and `evaluate`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{ArgGroup, Args, ValueEnum};
use semmoe_solver::Objective;
use semmoe_tables::Attention;

use super::{OutputArgs, attention, named, number, seconds};

/// Parses the objective of a solve.
fn objective() -> impl TypedValueParser<Value = Objective> {
    let activations = "Maximize activations on the token's own rank: the local activation rate";
    let ranks = "Minimize the remote ranks that a token is sent to, for kernels that send a token once to each rank. Needs \
                 --trace, as a profile does not have the experts that a token activates together";
    named([
        (PossibleValue::new("activations").help(activations), Objective::Activations),
        (PossibleValue::new("ranks").help(ranks), Objective::Ranks),
    ])
}

/// Algorithms of `solve`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SolverArg {
    /// Alternating exact steps from many starting points.
    Exact,
    /// Algorithm 1 of the Sem-MoE paper, a greedy baseline to compare with.
    Paper,
}

/// Introduction printed by `solve --help`.
pub(super) const SOLVE_ABOUT: &str = "\
Solve the tables T, A and E from a profile.

In a mixture-of-experts model every token activates a few experts per layer, and with expert parallelism each rank holds only \
some of them: activating an expert on another rank costs network traffic. The experts that a token activates depend strongly on \
the token itself. So experts that the same tokens activate are placed on one rank, and requests with such tokens are sent there.

  E   the group (rank) of every expert: engines load it, see `tables export` and `tables permute`
  T   the share of a token's activations that is local on each rank: the gateway scores requests with it
  A   the group that follows the groups of the two previous layers (attention tp, with --trace; where it helps)

The figure of merit is the local activation rate (LAR): the share of activations on the token's own rank. With G groups and no \
solved placement it is about 1/G. All groups get the same number of experts, and loads stay balanced: the report shows how well. \
LAR on the data used for the solve is too optimistic: with --trace some of the requests are held out, and the tables are \
evaluated on these. For other traffic use `semmoe evaluate`.

From nothing to tables in three commands:
  semmoe profile record --engine sglang --url http://127.0.0.1:30000 --model-config DIR \\
      --prompts prompts.jsonl --out run.trace.safetensors
  semmoe profile build run.trace.safetensors --out run.profile.safetensors
  semmoe solve --profile run.profile.safetensors --trace run.trace.safetensors --groups 8 \\
      --out m.tables.safetensors

Record your own traffic: tables solved on other kinds of text gain less.";

#[derive(Debug, Args)]
pub(crate) struct SolveArgs {
    /// The profile to solve from.
    #[arg(long, help_heading = "Input", value_name = "FILE")]
    pub(crate) profile: PathBuf,
    /// A trace of the same traffic, to cluster requests (attention dp) and to count A (attention tp).
    ///
    /// A profile only counts tokens. Attention dp routes whole requests, which the solver cannot see without a trace:
    /// pass a trace whenever possible.
    #[arg(long, help_heading = "Input", value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// The model's `tokenizer.json` or its directory: rare and unseen tokens are then expected to behave like tokens
    /// with similar spelling, which matters most for traffic unlike the profile's.
    #[arg(long, help_heading = "Input", value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// The model's weights: rare and unseen tokens are expected to behave like tokens with similar input embeddings. A
    /// safetensors file, the index of several, or a directory with either; best combined with --tokenizer.
    #[arg(long, help_heading = "Input", value_name = "PATH")]
    pub(crate) embeddings: Option<PathBuf>,
    /// Name of the input embedding tensor, if it does not end with `embed_tokens.weight`.
    #[arg(long, help_heading = "Input", value_name = "NAME", requires = "embeddings")]
    pub(crate) embeddings_tensor: Option<String>,
    /// Number of expert-parallel groups (ranks); must divide the number of experts, or of slots with --redundant,
    /// unless --pad is set.
    ///
    /// More groups spread the experts over more memory, but fewer activations are local.
    #[arg(long, help_heading = "Deployment", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) groups: u16,
    /// How attention is parallelized, which determines what is routed and therefore what is optimized.
    #[arg(long, help_heading = "Deployment", value_parser = attention(), default_value = "dp")]
    pub(crate) attention: Attention,
    /// The algorithm that places tokens and experts.
    #[arg(long, help_heading = "Search", value_enum, default_value_t = SolverArg::Exact)]
    pub(crate) solver: SolverArg,
    /// The objective to optimize; the report contains the figures for both.
    #[arg(long, help_heading = "Search", value_parser = objective(), default_value = "activations")]
    pub(crate) objective: Objective,
    /// The tables to write.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Also write the solver's report (JSON).
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Fraction of the trace's requests to hold out, 0 to 0.5: half of them to choose the strength of T's prior and the
    /// layers of A, half to evaluate the tables. With 0 the prior is not fitted and there is no A.
    ///
    /// Their counts are subtracted from the profile if it contains them. The choice depends only on the prompts: equal
    /// prompts stay together, and runs with other options are evaluated on the same requests.
    #[arg(long, help_heading = "Search", value_name = "SHARE", default_value_t = 0.1, value_parser = number(0.0..=0.5, "expected a fraction from 0 to 0.5"))]
    pub(crate) hold_out: f64,
    /// Random seed: the same seed and input give the same tables.
    #[arg(long, help_heading = "Search", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Extra slots per layer, in total over all groups, for replicas of experts that several groups activate often.
    /// Experts plus slots must be divisible by the number of groups. Only with attention dp.
    #[arg(long, help_heading = "Deployment", value_name = "R", default_value_t = 0)]
    pub(crate) redundant: u16,
    /// If the number of groups does not divide the number of experts: give every group as many slots as the largest
    /// needs, and leave some empty.
    ///
    /// For engines that distribute experts unevenly. SGLang requires an expert in every slot, so `tables export`
    /// rejects padding.
    #[arg(long, help_heading = "Deployment")]
    pub(crate) pad: bool,
    /// Keep the experts where they are and solve only T (and A, and prices): `linear` (blocks of N/G experts),
    /// `round_robin` (expert e on group e mod G), or a file with a placement: tables, or the JSON that SGLang reads and
    /// `tables export` writes.
    ///
    /// For engines that accept no placement, or already run one. A placement that exceeds the limit on expert load is
    /// reported, not rejected.
    #[arg(long, help_heading = "Input", value_name = "linear|round_robin|FILE")]
    pub(crate) placement: Option<PathBuf>,
    /// The deployed tables, for the same model and groups: adds a start from their placement, and moves an expert only
    /// if the gain is worth it. For traffic that has drifted; the report contains the number of moved experts and the
    /// previous rate.
    #[arg(long, help_heading = "Input", value_name = "TABLES")]
    pub(crate) warm_start: Option<PathBuf>,
    /// The gain in local activations required to move an expert, as a multiple of an average expert's activations in
    /// its layer.
    ///
    /// With 0 experts move for any gain, with 1 only for the activations of a whole average expert. If the old
    /// placement exceeds the limit on expert load, experts move at any cost.
    #[arg(long, help_heading = "Deployment", value_name = "C", requires = "warm_start", default_value_t = semmoe_solver::WarmStart::DEFAULT_COST)]
    pub(crate) migration_cost: f64,
    /// Number of nodes, each with G/M consecutive groups: an activation on another group of the node costs 1, one on
    /// another node --inter-cost. Must divide the number of groups.
    ///
    /// The solver then minimizes this cost instead of maximizing the local rate; the report contains the fraction of
    /// activations that stay on their node.
    #[arg(long, help_heading = "Deployment", value_name = "M", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) nodes: Option<u16>,
    /// The cost of an activation on another node, relative to one on another group of the same node.
    ///
    /// About the ratio of NVLink to network bandwidth per GPU: 3.2 on H800, up to 9 on H100 and H200 nodes.
    #[arg(long, help_heading = "Deployment", value_name = "X", requires = "nodes", default_value_t = semmoe_solver::Nodes::DEFAULT_INTER_COST)]
    pub(crate) inter_cost: f64,
    /// `n_group` in the model's config.json (DeepSeek-V2 and -V3). Its router limits each token to a few groups of
    /// consecutive experts, and so to at most as many nodes if every group stays on one node.
    ///
    /// With --nodes every gating group stays on one node. Without it they are placed so that `tables permute` can keep
    /// them whole, as it must.
    #[arg(long, help_heading = "Deployment", value_name = "N_GROUP", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) gating_groups: u16,
    /// Stop after this time, such as 90s or 5m, with the best result so far, as Ctrl-C does; the tables then depend on
    /// the machine's speed.
    ///
    /// Both end with exit code 0, as the tables are valid; a second Ctrl-C writes nothing and exits with 130.
    #[arg(long, help_heading = "Search", value_name = "TIME", value_parser = seconds)]
    pub(crate) time_limit: Option<Duration>,
    /// Print all figures under their `--json` names, not just the summary.
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Examples at the end of `evaluate --help`.
pub(super) const EVALUATE_EXAMPLES: &str = "\
Examples:
  semmoe evaluate --tables m.tables.safetensors --trace held-out.trace.safetensors
  semmoe evaluate --tables m.tables.safetensors --trace held-out.trace.safetensors \\
      --html tables.html --verbose
  semmoe evaluate --tables m.tables.safetensors --profile other.profile.safetensors --json";

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("traffic").required(true).args(["trace", "profile"]))]
pub(crate) struct EvaluateArgs {
    /// The tables to evaluate.
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: PathBuf,
    /// Evaluate on this trace (including request policies).
    #[arg(long, help_heading = "Input", value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Evaluate on this profile.
    #[arg(long, help_heading = "Input", value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
    /// Number of nodes, each with G/M consecutive groups, for inter-node traffic figures [default: the nodes that the
    /// tables were solved for].
    #[arg(long, help_heading = "Deployment", value_name = "M", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) nodes: Option<u16>,
    /// Attention tp: evaluate in steps of this many trace tokens, whose rows are split evenly in each layer, as in the
    /// worker. Without it each token goes to its most likely group independently, which is the upper bound for T and A.
    /// Attention dp: prompt tokens that a rank computes per step [default: 2048].
    #[arg(long, value_name = "N", conflicts_with = "profile", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) step_tokens: Option<u32>,
    /// Attention dp: sequences in flight during the policy replay; a new request arrives whenever one ends.
    #[arg(long, value_name = "N", conflicts_with = "profile", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) in_flight: u32,
    /// Attention dp: tokens that a request generates if the trace records none.
    #[arg(long, value_name = "N", conflicts_with = "profile", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) output_tokens: u32,
    /// Assume that each rank's prefix cache holds this many blocks of 64 tokens, for policies that consider it; 0: no
    /// cache.
    #[arg(long, value_name = "B", conflicts_with = "profile", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub(crate) prefix_blocks: u32,
    /// Also write a self-contained HTML page with charts.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Print all figures under their `--json` names, not just the summary.
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
