//! Options for solving and evaluating.

use std::fmt;
use std::sync::Arc;

use semmoe_routing::{PrefixSettings, Settings};
use semmoe_tables::{Attention, Embeddings, Placement, Provenance, Replicas, Tables};
use serde::Serialize;

use crate::input::error::{SolveError, check_groups};
use crate::input::padding::padded_slots;
use crate::input::strings::TokenStrings;

/// T's row for a token that was never seen and does not resemble any seen token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnseenTokens {
    /// Equal shares for all groups (attention dp), or no label (tp).
    #[default]
    Neutral,
    /// The layer's own shares.
    LayerShare,
}

/// The objective to optimize. The report contains the figures for both objectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// Maximizes the activations on the token's own rank: the paper's local activation rate.
    #[default]
    Activations,
    /// Minimizes the ranks per token, i.e. the traffic of kernels that send a token once to each rank. Needs a trace.
    Ranks,
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A division of the groups into M nodes of G/M consecutive groups each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nodes {
    /// M; must divide G.
    pub nodes: u16,
    /// X: the cost of an activation on another node, relative to one on another group of the same node.
    pub inter_cost: f64,
}

impl Nodes {
    /// A value between the bandwidth ratio in DeepSeek-V3's report for H800 nodes (NVLink 160 GB/s, InfiniBand 50 GB/s:
    /// 3.2) and that in the data sheets of H100 and H200 nodes (NVLink 450 GB/s each way, 400 Gb/s adapters: 9), where
    /// kernels reach less of NVLink's peak.
    pub const DEFAULT_INTER_COST: f64 = 4.0;
}

/// The unit of assignment or evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Whole requests: one group over all layers.
    Request,
    /// Tokens of the vocabulary.
    Token,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A fixed placement of the experts, for an engine that supports no other or already runs this one.
#[derive(Clone, Debug)]
pub enum GivenPlacement {
    /// Contiguous blocks of N/G experts, the engines' default; with padding, the first N mod G groups have one more.
    Linear,
    /// Expert e on group e mod G.
    RoundRobin,
    /// Any placement with one copy of each expert.
    Experts(Arc<Placement>),
    /// Any placement with replicas or padding.
    Slots(Arc<Replicas>),
}

impl GivenPlacement {
    /// The name written to the tables' `solver` field.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            GivenPlacement::Linear => "linear",
            GivenPlacement::RoundRobin => "round_robin",
            GivenPlacement::Experts(_) | GivenPlacement::Slots(_) => "given",
        }
    }
}

/// Initial tables for a solve that should move few experts.
#[derive(Clone, Debug)]
pub struct WarmStart {
    /// Tables for the same model and number of groups, without replicas; only E is used.
    pub tables: Arc<Tables>,
    /// C: the gain required to move an expert, in local activations relative to the activations of its layer's average
    /// expert. With C = 0.05, a move must make at least 5% of an average expert's activations local.
    pub migration_cost: f64,
}

impl WarmStart {
    /// With this cost, small gains and differences between local optima do not move experts.
    pub const DEFAULT_COST: f64 = 0.05;
}

/// Maximum excess of a rank's load over the mean.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Margins {
    /// Excess tokens, as a fraction of the mean.
    pub tokens: f64,
    /// Excess sequences, as a fraction of the mean.
    pub sequences: f64,
}

impl Margins {
    /// Treats loads of up to 1.05 times the mean tokens and 1.10 times the mean sequences as even.
    pub const EVEN: Margins = Margins { tokens: 0.05, sequences: 0.10 };
}

/// Work limits for computing a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundOptions {
    /// Maximum rounds of the SDP bound (each with 21 eigendecompositions); it stops earlier once gains are small. With
    /// zero rounds it is about as good as the spectral bound.
    pub iterations: u32,
    /// If layers share labels, B2 bounds all of them together up to this many columns (L * N); time grows with their
    /// cube.
    pub joint_columns: usize,
    /// If layers share labels, B1 with B2's first iterate bounds all of them together up to this many columns. Beyond
    /// that, the sum of the per-layer bounds is used, which is valid but weaker.
    pub joint_spectral_columns: usize,
}

impl Default for BoundOptions {
    fn default() -> Self {
        BoundOptions { iterations: 15, joint_columns: 256, joint_spectral_columns: 1024 }
    }
}

/// Parameters of the regression. This crate's README explains the defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RidgeOptions {
    /// Penalty on the squared coefficients; rows have unit length, and a token seen once has weight one.
    pub penalty: f64,
    /// Cap on the occurrences that count towards a token's weight.
    pub occurrences_cap: f64,
}

impl Default for RidgeOptions {
    fn default() -> Self {
        RidgeOptions { penalty: 3.0, occurrences_cap: 2.0 }
    }
}

/// Options of [`solve`](crate::solve).
#[derive(Clone, Debug)]
pub struct SolveOptions {
    /// G: groups of experts, i.e. EP ranks. Must divide the number of experts or, with redundant slots, the number of
    /// slots.
    pub groups: u16,
    /// The unit of routing: requests (dp; one group for all layers) or tokens layer by layer (tp).
    pub attention: Attention,
    /// The objective to optimize.
    pub objective: Objective,
    /// Seed for all randomness. Equal seeds give equal tables regardless of `threads`.
    pub seed: u64,
    /// Number of independent starts of the alternation; the best result is kept.
    pub starts: u32,
    /// Number of threads that run the starts.
    pub threads: usize,
    /// eps: a group gets at most (1 + eps) times the mean number of tokens.
    pub token_margin: f64,
    /// eps for sequences: if the units are requests, a group gets at most (1 + eps) times the mean.
    pub sequence_margin: f64,
    /// Maximum ratio of a group's activations to its layer's mean.
    pub expert_load_limit: f64,
    /// Maximum consecutive rounds of the unit step and the expert step.
    pub iterations: u32,
    /// Maximum swap passes per start; zero disables swaps.
    pub swap_passes: u32,
    /// R: replica slots per layer in addition to one slot per expert, over all groups. Attention dp only; G must divide
    /// N + R.
    pub redundant: u16,
    /// Whether groups may have ceil(N/G) slots each, some of them empty, if G does not divide N.
    pub pad: bool,
    /// A fixed placement of the experts; the solver then assigns only the units.
    pub placement: Option<GivenPlacement>,
    /// Tables used as an additional start; moving an expert to a different group than in these tables has a cost.
    pub warm_start: Option<WarmStart>,
    /// The division of the groups into nodes; `None` = all other groups cost the same.
    pub nodes: Option<Nodes>,
    /// The router's `n_group`. Each gating group of N / `n_group` consecutive experts stays together on one node or,
    /// without nodes, within groups such that `tables permute` can keep it together. 1 = no constraint.
    pub gating_groups: u16,
    /// Pseudo-occurrences of the prior (the expectation from similar tokens, or the layer's shares) added to every
    /// token's evidence in T.
    pub prior_occurrences: f64,
    /// Fraction of the trace's requests to hold out, 0 to 0.5. Half of them determine the strength of the prior and the
    /// layers of A, the other half serve to evaluate the result. With 0, the solve uses all requests, the prior is
    /// unchanged, and there is no A.
    pub hold_out: f64,
    /// Work limits for the bounds over all placements; `None` = no bounds.
    pub bounds: Option<BoundOptions>,
    /// The tokens' strings, through which similarly spelled tokens inform each other's rows of T; at most one per token
    /// of the vocabulary.
    pub token_strings: Option<Arc<TokenStrings>>,
    /// The model's input embeddings, also used to relate similar tokens; they must cover the vocabulary.
    pub embeddings: Option<Arc<Embeddings>>,
    /// Weights of the regression over strings and embeddings.
    pub ridge: RidgeOptions,
    /// T's row for tokens without evidence.
    pub unseen: UnseenTokens,
    /// The origin of the profile and the creation time of the tables (RFC 3339).
    pub provenance: Provenance,
}

impl SolveOptions {
    /// The defaults for `groups` groups.
    pub fn new(groups: u16, attention: Attention, provenance: Provenance) -> Self {
        SolveOptions {
            groups,
            attention,
            objective: Objective::default(),
            seed: 0,
            starts: 32,
            threads: 1,
            token_margin: 0.02,
            sequence_margin: Margins::EVEN.sequences,
            expert_load_limit: 1.10,
            iterations: 60,
            swap_passes: 12,
            redundant: 0,
            pad: false,
            placement: None,
            warm_start: None,
            nodes: None,
            gating_groups: 1,
            prior_occurrences: 2.0,
            hold_out: 0.0,
            bounds: Some(BoundOptions::default()),
            token_strings: None,
            embeddings: None,
            ridge: RidgeOptions::default(),
            unseen: UnseenTokens::default(),
            provenance,
        }
    }

    /// Returns the limits for dividing requests over ranks, which must leave some slack.
    pub(crate) fn margins(&self) -> Margins {
        Margins { tokens: self.token_margin.max(1e-6), sequences: self.sequence_margin.max(1e-6) }
    }

    /// The sources of token similarity, by name.
    pub(crate) fn priors(&self) -> Vec<&'static str> {
        let embeddings = self.embeddings.as_ref().map(|_| "embeddings");
        embeddings.into_iter().chain(self.token_strings.as_ref().map(|_| "strings")).collect()
    }

    /// Returns the number of slots per layer to fill, including empty ones: N, or more with padding.
    pub(crate) fn slots(&self, experts: u16) -> usize {
        if self.pad { padded_slots(experts, self.groups) } else { usize::from(experts) }
    }

    /// Checks that the groups divide the slots (one per expert plus redundant ones), or that padding is allowed.
    pub(crate) fn check_groups(&self, experts: u16) -> Result<(), SolveError> {
        match self.groups {
            1.. if self.redundant > 0 => self.check_redundant(experts),
            1.. if self.pad && self.groups <= experts => check_groups(1, experts),
            _ => check_groups(self.groups, experts),
        }
    }

    /// Returns the number of slots per group in a layer.
    pub(crate) fn slots_per_group(&self, experts: u16) -> u16 {
        ((u32::from(experts) + u32::from(self.redundant)) / u32::from(self.groups.max(1))) as u16
    }

    /// Checks that all slots, including redundant ones, can be divided evenly among the groups, with at most one slot
    /// per expert in each group.
    ///
    /// # Errors
    /// [`SolveError::RedundantDoesNotDivide`] lists valid numbers.
    pub fn check_redundant(&self, experts: u16) -> Result<(), SolveError> {
        let (redundant, groups) = (self.redundant, self.groups);
        if redundant == 0 {
            return Ok(());
        }
        let most = u32::from(experts) * (u32::from(groups) - 1);
        let fits = |r: u32| r <= most && (u32::from(experts) + r).is_multiple_of(u32::from(groups));
        if fits(redundant.into()) {
            return Ok(());
        }
        let valid = (1..=most).filter(|&r| fits(r)).take(8).collect();
        Err(SolveError::RedundantDoesNotDivide { redundant, experts, groups, most, valid })
    }

    pub(crate) fn validate(&self) -> Result<(), SolveError> {
        at_least_one("starts", self.starts as usize)?;
        at_least_one("threads", self.threads)?;
        at_least_one("iterations", self.iterations as usize)?;
        within("token_margin", self.token_margin, 0.0, 1000.0, "a number from 0 to 1000")?;
        within("sequence_margin", self.sequence_margin, 0.0, 1000.0, "a number from 0 to 1000")?;
        within("expert_load_limit", self.expert_load_limit, 1.0, 65535.0, "a number from 1 to 65535")?;
        within("prior_occurrences", self.prior_occurrences, 1e-6, 1e9, "a number above 0, at most 1e9")?;
        within("hold_out", self.hold_out, 0.0, 0.5, "a fraction from 0 to 0.5")?;
        within("ridge.penalty", self.ridge.penalty, 1e-3, 1e9, "a number from 0.001 to 1e9")?;
        within("ridge.occurrences_cap", self.ridge.occurrences_cap, 1e-6, 1e6, "a number above 0, at most 1e6")
    }
}

/// Options of [`evaluate`](crate::evaluate).
#[derive(Clone, Debug)]
pub struct EvalOptions {
    /// Sequences in flight during the replay of a policy: a new request arrives whenever one finishes.
    pub concurrency: usize,
    /// Tokens that a request generates if the trace does not record any.
    pub output_tokens: u64,
    /// Names of the policies to simulate, as registered.
    pub policies: Vec<String>,
    /// Settings of the policies.
    pub routing: Settings,
    /// M: number of nodes, each with G/M consecutive groups; `None` = read from the tables' `solver` field, if present
    /// there.
    pub nodes: Option<u16>,
    /// Settings of the ranks' simulated prefix caches. By default there are none, so only experts and loads matter.
    pub prefix: PrefixSettings,
    /// Tokens per step, for a trace. With attention tp: tokens per step of the unit, which splits their rows evenly in
    /// each layer; `None` = no steps, every token on its likeliest group. With dp: prompt tokens that a rank computes
    /// per step of the replay; `None` = 2,048.
    pub step_tokens: Option<usize>,
    /// eps of the batch optimum: a rank gets at most (1 + eps) times the mean number of tokens.
    pub token_margin: f64,
    /// Margins of the bound that policies are compared with; neither may be zero.
    pub bound: Margins,
}

impl Default for EvalOptions {
    fn default() -> Self {
        EvalOptions {
            concurrency: 64,
            output_tokens: 64,
            policies: semmoe_routing::NAMES.into_iter().filter(is_simulated).map(str::to_owned).collect(),
            routing: Settings::default(),
            nodes: None,
            prefix: PrefixSettings { blocks_per_rank: 0, ..PrefixSettings::default() },
            step_tokens: None,
            token_margin: 0.02,
            bound: Margins::EVEN,
        }
    }
}

/// Whether a trace is enough to evaluate this policy: it needs no key from clients and does not shadow another policy.
fn is_simulated(name: &&str) -> bool {
    semmoe_routing::policy(name).is_ok_and(|policy| !policy.needs().key && policy.watched().is_none())
}

impl EvalOptions {
    pub(crate) fn validate(&self) -> Result<(), SolveError> {
        at_least_one("concurrency", self.concurrency)?;
        at_least_one("output_tokens", self.output_tokens as usize)?;
        self.step_tokens.map_or(Ok(()), |tokens| at_least_one("step_tokens", tokens))?;
        within("token_margin", self.token_margin, 0.0, 1000.0, "a number from 0 to 1000")?;
        let expected = "a number from 1e-6 to 1000";
        within("bound.tokens", self.bound.tokens, 1e-6, 1000.0, expected)?;
        within("bound.sequences", self.bound.sequences, 1e-6, 1000.0, expected)
    }
}

pub(crate) fn at_least_one(option: &'static str, value: usize) -> Result<(), SolveError> {
    if value > 0 {
        return Ok(());
    }
    Err(SolveError::BadOption { option, found: value.to_string(), expected: "at least 1" })
}

pub(crate) fn within(
    option: &'static str,
    value: f64,
    least: f64,
    most: f64,
    expected: &'static str,
) -> Result<(), SolveError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(SolveError::BadOption { option, found: value.to_string(), expected })
}
