//! Arguments of `semmoe solve` and `evaluate`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};

use super::{AttentionArg, OutputArgs};

/// The objective of a solve.
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

/// The beginning of `solve --help`.
pub(super) const SOLVE_ABOUT: &str = "\
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
  semmoe profile record --engine sglang --url http://127.0.0.1:30000 --model-config DIR \\
      --prompts prompts.jsonl --out run.trace.safetensors
  semmoe profile build run.trace.safetensors --out run.profile.safetensors
  semmoe solve --profile run.profile.safetensors --trace run.trace.safetensors --groups 8 \\
      --out m.tables.safetensors

Record your own traffic: tables solved on other kinds of text are worth less.";

#[derive(Debug, Args)]
pub(crate) struct SolveArgs {
    /// Counts to solve from.
    #[arg(long, help_heading = "Input", value_name = "FILE")]
    pub(crate) profile: PathBuf,
    /// A trace of the same traffic: with it requests are clustered (attention dp) and A is counted (attention tp).
    ///
    /// A profile has counts of tokens only, so without a trace whole requests are not seen, which is what attention dp
    /// routes: give the trace there whenever there is one.
    #[arg(long, help_heading = "Input", value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// The model's `tokenizer.json`, or a directory with it: tokens that were seen rarely or never are then expected
    /// where similarly spelt ones go, which matters most for traffic unlike the profile's.
    #[arg(long, help_heading = "Input", value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// The model's weights, for the same purpose: tokens are expected where those with similar input embeddings go. A
    /// safetensors file, the index of several, or a directory with either; both with --tokenizer is best.
    #[arg(long, help_heading = "Input", value_name = "PATH")]
    pub(crate) embeddings: Option<PathBuf>,
    /// The tensor of the input embeddings, where its name does not end with `embed_tokens.weight`.
    #[arg(long, help_heading = "Input", value_name = "NAME", requires = "embeddings")]
    pub(crate) embeddings_tensor: Option<String>,
    /// Expert-parallel groups (ranks); must divide the number of experts, or see --pad.
    ///
    /// More groups spread the experts over more memory, but fewer activations are local.
    #[arg(long, help_heading = "Deployment", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) groups: u16,
    /// How attention is parallel, which decides what is routed and so what is optimised.
    #[arg(long, help_heading = "Deployment", value_enum, default_value_t = AttentionArg::Dp)]
    pub(crate) attention: AttentionArg,
    /// Which algorithm places tokens and experts.
    #[arg(long, help_heading = "Search", value_enum, default_value_t = SolverArg::Exact)]
    pub(crate) solver: SolverArg,
    /// The objective to optimize; the report has both figures.
    #[arg(long, help_heading = "Search", value_enum, default_value_t = ObjectiveArg::Activations)]
    pub(crate) objective: ObjectiveArg,
    /// The tables to write.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Also write the solver's report (JSON).
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Share of the trace's requests that are not solved on, 0 to 0.5: half of them to choose the strength of T's prior
    /// and the layers of A with, half to judge the tables on. 0 = none; then the prior is not fitted and there is no A.
    ///
    /// Their counts are taken out of the profile where it contains them. Which requests these are depends on their
    /// prompts alone, so that equal prompts stay together, and runs with other options are judged on the same ones.
    #[arg(long, help_heading = "Search", value_name = "SHARE", default_value_t = 0.1, value_parser = hold_out_share)]
    pub(crate) hold_out: f64,
    /// Seed: the same seed and input give the same tables.
    #[arg(long, help_heading = "Search", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Slots per layer beyond one for each expert, of all groups together: experts wanted in several places get
    /// replicas there. Experts plus slots must be divisible by the groups. Attention dp.
    #[arg(long, help_heading = "Deployment", value_name = "R", default_value_t = 0)]
    pub(crate) redundant: u16,
    /// Where the groups do not divide the experts: give every group as many slots as the largest needs, and leave some
    /// empty.
    ///
    /// For engines that deal out experts unevenly. SGLang wants an expert in every slot: `tables export` refuses
    /// padding.
    #[arg(long, help_heading = "Deployment")]
    pub(crate) pad: bool,
    /// Leave the experts where they are and solve T (and A, and prices) alone: `linear` (blocks of N/G experts),
    /// `round_robin` (expert e on group e mod G), or a file with a placement: tables, or the JSON that SGLang reads and
    /// `tables export` writes.
    ///
    /// For engines that accept no placement, or that run one already. Groups of experts that break the limit on load
    /// are reported, not refused.
    #[arg(long, help_heading = "Input", value_name = "linear|round_robin|FILE")]
    pub(crate) placement: Option<PathBuf>,
    /// Tables of the same model and groups that are deployed: one more start begins with their experts, and an expert
    /// that leaves its group must be worth it. For traffic that has drifted; the report has the experts moved, and the
    /// rate before.
    #[arg(long, help_heading = "Input", value_name = "TABLES")]
    pub(crate) warm_start: Option<PathBuf>,
    /// The gain required to move an expert: local activations, as a multiple of those of an average expert of its
    /// layer.
    ///
    /// 0 moves experts for any gain, 1 only for as many as an average expert has. Where the old placement breaks the
    /// limit on expert load, experts move whatever they cost.
    #[arg(long, help_heading = "Deployment", value_name = "C", requires = "warm_start", default_value_t = semmoe_solver::WarmStart::DEFAULT_COST)]
    pub(crate) migration_cost: f64,
    /// Nodes that the groups are on, G/M neighbours each: an activation on another group of the node costs 1, on
    /// another node
    /// --inter-cost. Must divide the groups.
    ///
    /// Made best is then the cost, not the local rate alone; the report has the share of activations that stay on their
    /// node.
    #[arg(long, help_heading = "Deployment", value_name = "M", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) nodes: Option<u16>,
    /// The cost of an activation on another node, relative to one on another group of the same node.
    ///
    /// About the ratio of NVLink's and the network's bandwidth per GPU: 3.2 on H800, up to 9 on H100 and H200 nodes.
    #[arg(long, help_heading = "Deployment", value_name = "X", requires = "nodes", default_value_t = semmoe_solver::Nodes::DEFAULT_INTER_COST)]
    pub(crate) inter_cost: f64,
    /// `n_group` of the model's config.json (DeepSeek-V2 and -V3): a router that limits a token to a few of these
    /// groups of neighbouring experts limits it to as many nodes, if whole groups stay on one node.
    ///
    /// With --nodes they stay on one node. Without it they stay where `tables permute` can keep them whole, which it
    /// must.
    #[arg(long, help_heading = "Deployment", value_name = "N_GROUP", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) gating_groups: u16,
    /// Stop after this many seconds with the best found so far, as Ctrl-C does; what is written then depends on the
    /// machine's speed. Both end with exit code 0, as the tables are valid; a second Ctrl-C writes nothing and ends
    /// with 130.
    #[arg(long, help_heading = "Search", value_name = "SECONDS", value_parser = positive_seconds)]
    pub(crate) time_limit: Option<f64>,
    /// Print all figures, not only the outcome.
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
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

/// The end of `evaluate --help`.
pub(super) const EVALUATE_EXAMPLES: &str = "\
Examples:
  semmoe evaluate --tables m.tables.safetensors --trace held-out.trace.safetensors
  semmoe evaluate --tables m.tables.safetensors --trace held-out.trace.safetensors \\
      --html tables.html --verbose
  semmoe evaluate --tables m.tables.safetensors --profile other.profile.safetensors --json";

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("traffic").required(true).args(["trace", "profile"]))]
pub(crate) struct EvaluateArgs {
    /// The tables to judge.
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: PathBuf,
    /// Judge on this trace (request policies included).
    #[arg(long, help_heading = "Input", value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Judge on this profile.
    #[arg(long, help_heading = "Input", value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
    /// Nodes that the groups are on, G/M neighbours each, for figures of what leaves a node [default: those that were
    /// solved for].
    #[arg(long, help_heading = "Deployment", value_name = "M", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) nodes: Option<u16>,
    /// Judge attention tp in steps of this many tokens of the trace, whose rows are split evenly in each layer, as the
    /// worker does; without it each token is by itself on its likeliest group, which is the most that T and A can give.
    #[arg(long, value_name = "N", conflicts_with = "profile", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) step_tokens: Option<u32>,
    /// Believe that each rank's prefix cache holds this many blocks of 64 tokens, so that policies that look there do;
    /// 0: none.
    #[arg(long, value_name = "B", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub(crate) prefix_blocks: u32,
    /// Also write a self-contained page with pictures.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Print all figures and every policy, not only the outcome.
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
