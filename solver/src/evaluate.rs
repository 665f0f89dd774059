//! The value of given tables on given traffic.

use std::collections::BTreeMap;

use semmoe_tables::{Attention, Profile, Tables, Trace};
use serde::Serialize;

use crate::balance::{Spread, spread_of};
use crate::calibration::{Calibration, profile_reliability, trace_reliability};
use crate::error::SolveError;
use crate::hosts::Hosts;
use crate::options::{EvalOptions, Margins, Unit};
use crate::printed::PrintedRule;
use crate::replay::Evenness;
use crate::tally::Tally;
use crate::topology::check_nodes;
use crate::{eval_requests, eval_steps, eval_tokens};

/// The traffic to judge tables on; better not the one they were solved on.
#[derive(Clone, Copy, Debug)]
pub enum EvalInput<'a> {
    /// Recorded requests.
    Trace(&'a Trace),
    /// Counts by token.
    Profile(&'a Profile),
}

/// The figures of `semmoe evaluate --json`.
#[derive(Clone, Debug, Serialize)]
pub struct Evaluation {
    /// The unit assigned to ranks or groups in `lar` and the figures that go with it. Requests, by the `affinity`
    /// policy, for a trace and attention dp; otherwise tokens, each on the best place that T knows.
    pub unit: Unit,
    /// Local activation rate over all tokens and layers.
    pub lar: f64,
    /// With attention tp the same by T alone; `lar` itself is by T and A, where the tables have A and the groups in the
    /// two layers before are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lar_t_only: Option<f64>,
    /// The same by the paper's printed rule, Algorithm 3, line 2, `cond(T_p > A_p)`: by T or by the paper's A, the one
    /// that is surer of its group, A where they are equal; for a trace. A is that of the tables if they are of the
    /// paper's algorithm; else it is counted in the requests that were solved on or, where these are not known, in the
    /// half of the requests judged that a request is not in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lar_paper_rule: Option<f64>,
    /// `lar` for each MoE layer; null for a layer without known routes.
    pub lar_per_layer: Vec<Option<f64>>,
    /// The same with every token or request on a random rank: the expected value.
    pub lar_random: f64,
    /// Share of activations on the own node; where nodes are known, from the options or the tables' solver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_local_rate: Option<f64>,
    /// Activations on other nodes, mean over tokens and layers; of the top-k.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inter_node_activations_per_token: Option<f64>,
    /// Ranks other than its own that a token is sent to, mean over tokens and layers; null for a profile, whose
    /// counts do not say which experts were activated together.
    pub remote_ranks_per_token: Option<f64>,
    /// The same with every token or request on a random rank: the expected value.
    pub remote_ranks_random: Option<f64>,
    /// The same with experts in blocks of neighbours too, which is how engines place them by themselves.
    pub remote_ranks_blocks: Option<f64>,
    /// Greatest activations of a group over the mean, mean over layers.
    pub expert_load_imbalance: f64,
    /// The paper's figure: greatest over median, mean over layers.
    pub expert_load_imbalance_max_over_median: f64,
    /// Greatest tokens of a rank (group) over the mean; with attention tp mean over layers.
    pub token_imbalance: f64,
    /// The figures of steps, if asked for: `lar` and its companions are then those of tokens in even parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<StepFigures>,
    /// Tokens judged (with a known route).
    pub tokens: u64,
    /// Activations judged.
    pub activations: u64,
    /// Whether T's shares come true.
    pub calibration: Calibration,
    /// Each routing policy, simulated request by request; for a trace and attention dp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policies: Option<BTreeMap<String, RequestFigures>>,
    /// All requests known in advance and assigned exactly by their scores with T: what is missing to the optimum is
    /// T's error, what a policy misses to this is the price of not knowing the future.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_predicted: Option<RequestFigures>,
    /// Every request on the rank of its greatest share, whatever the load: what an online policy gives up for balance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argmax: Option<RequestFigures>,
    /// Every [`WINDOW`](crate::WINDOW) requests assigned together and exactly by their scores, so that the tokens of
    /// the ranks stay even so far: what waiting for a window would gain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub windowed: Option<RequestFigures>,
    /// All requests known in advance and assigned exactly by their true routing; for a trace and attention dp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_optimum: Option<RequestFigures>,
    /// No policy that keeps tokens and sequences even exceeds it; for a trace and attention dp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<OfflineBound>,
}

/// All requests known in advance, divided among ranks at will, with tokens and sequences within limits: a linear
/// program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OfflineBound {
    /// The limits.
    pub margins: Margins,
    /// Local activation rate of the best division by true routing.
    pub lar: f64,
    /// The same of the best division by T's shares: what is in reach of a policy that knows T only.
    pub lar_by_t: f64,
    /// Relative gap between these divisions and what their prices prove; the larger of the two.
    pub gap: f64,
}

/// The value of an assignment of requests to ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RequestFigures {
    /// Local activation rate.
    pub request_lar: f64,
    /// Ranks other than its own that a token is sent to, mean over tokens and layers.
    pub remote_ranks_per_token: f64,
    /// Greatest tokens of a rank over the mean.
    pub request_imbalance: f64,
    /// The same within any [`BURST`](crate::BURST) consecutive requests, the greatest of all.
    pub burst_imbalance: f64,
    /// Mean of that figure.
    pub burst_imbalance_mean: f64,
    /// Prompt tokens that their rank is believed to hold in its prefix cache already, over all; null where this
    /// was not simulated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_share: Option<f64>,
    /// How even the ranks were over time; for a policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evenness: Option<Evenness>,
    /// The gain over random ranks, over that of [`OfflineBound::lar_by_t`]; for a policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_bound: Option<f64>,
}

/// Steps of a unit with attention tp, whose rows are split evenly in each layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepFigures {
    /// Tokens of a step; the last one may have fewer.
    pub step_tokens: usize,
    /// Rows (a token in a layer) of the fullest group over the mean, of all steps and layers together.
    pub fullest_group: f64,
    /// The same if every token were on its likeliest group.
    pub fullest_group_wanted: f64,
    /// Share of the rows that are not on their likeliest group.
    pub moved: f64,
    /// Rows that pass the fullest link of a layer in SRS, SAG, dispatch and combine, which wait for it; per token of
    /// the step.
    pub fullest_link: f64,
    /// The same if every token were on its likeliest group.
    pub fullest_link_wanted: f64,
    /// The same if rows stayed in their order, in even parts (`semmoe worker --shuffle off`).
    pub fullest_link_unshuffled: f64,
}

impl Evaluation {
    /// The figures that all ways of judging have; the others are absent.
    pub(crate) fn new(
        tables: &Tables,
        hosts: &Hosts,
        unit: Unit,
        tally: &Tally,
        token_imbalance: f64,
        tokens: u64,
    ) -> Self {
        let spreads: Vec<Spread> = tally.group_load.chunks_exact(hosts.groups).filter_map(spread_of).collect();
        let mean = |value: fn(&Spread) -> f64| spreads.iter().map(value).sum::<f64>() / spreads.len() as f64;
        let node_local_rate = tally.node_local_rate();
        Evaluation {
            unit,
            lar: tally.lar(),
            lar_t_only: None,
            lar_paper_rule: None,
            lar_per_layer: tally.lar_per_layer(),
            lar_random: tally.lar_random(hosts),
            node_local_rate,
            inter_node_activations_per_token: node_local_rate
                .map(|rate| (1.0 - rate) * f64::from(tables.model().top_k)),
            remote_ranks_per_token: tally.per_route(tally.remote_ranks),
            remote_ranks_random: tally.per_route(tally.remote_ranks_random),
            remote_ranks_blocks: tally.per_route(tally.remote_ranks_blocks),
            expert_load_imbalance: mean(|spread| spread.max_over_mean),
            expert_load_imbalance_max_over_median: mean(|spread| spread.max_over_median),
            token_imbalance,
            steps: None,
            tokens,
            activations: tally.activations.iter().sum(),
            calibration: Calibration::default(),
            policies: None,
            batch_predicted: None,
            argmax: None,
            windowed: None,
            batch_optimum: None,
            bound: None,
        }
    }
}

/// Judges tables on a trace or a profile of the same model.
///
/// With a trace and attention dp every policy of `options` is simulated with semmoe-routing's own code: a request is
/// scored by its prompt's tokens with T, as the gateway does, computed and answered step by step, and followed by the
/// next when it ends.
///
/// # Errors
/// [`SolveError`]: another model, no known route, an option out of range, an unknown policy, steps where nothing is in
/// steps.
pub fn evaluate(tables: &Tables, input: EvalInput<'_>, options: &EvalOptions) -> Result<Evaluation, SolveError> {
    evaluate_solved(tables, input, options, None)
}

/// The same where the trace is known that the tables were solved on.
pub(crate) fn evaluate_solved(
    tables: &Tables,
    input: EvalInput<'_>,
    options: &EvalOptions,
    solved_on: Option<&Trace>,
) -> Result<Evaluation, SolveError> {
    options.validate()?;
    let (model, what) = match input {
        EvalInput::Trace(trace) => (trace.model(), "trace"),
        EvalInput::Profile(profile) => (profile.model(), "profile"),
    };
    tables.model().check_compatible(model)?;
    let nodes = options.nodes.or_else(|| tables.solved_nodes());
    nodes.iter().try_for_each(|&nodes| check_nodes(nodes, tables.groups()))?;
    let hosts = Hosts::new(tables, nodes)?;
    let refused = |other, why| Err(SolveError::Together { one: "a step's size", other, why });
    let judged = match (input, tables.attention(), options.step_tokens) {
        (EvalInput::Trace(trace), Attention::Tp, steps) => {
            let printed = PrintedRule::new(tables, trace, solved_on);
            match steps {
                Some(tokens) => eval_steps::judge(tables, &hosts, trace, &printed, tokens),
                None => eval_tokens::judge_trace(tables, &hosts, trace, &printed),
            }
        }
        (EvalInput::Trace(trace), Attention::Dp, _) => eval_requests::judge(tables, &hosts, trace, options)?,
        (EvalInput::Profile(_), _, Some(_)) => {
            return refused("a profile", "its counts do not say which tokens come together");
        }
        (EvalInput::Profile(profile), _, None) => eval_tokens::judge_profile(tables, &hosts, profile),
    };
    if judged.activations == 0 {
        return Err(SolveError::NoTokens { what });
    }
    let (tokens, requests) = match input {
        EvalInput::Profile(profile) => (profile_reliability(tables, &hosts, profile), None),
        EvalInput::Trace(trace) => (
            trace_reliability(tables, &hosts, trace),
            eval_requests::request_reliability(tables, &hosts, trace, options),
        ),
    };
    Ok(Evaluation { calibration: Calibration { tokens, requests }, ..judged })
}
