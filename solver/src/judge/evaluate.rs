//! Evaluates given tables on given traffic.

use std::collections::BTreeMap;

use semmoe_tables::{Attention, Profile, Tables, Trace};
use serde::Serialize;

use crate::input::{EvalOptions, Margins, SolveError, Unit};
use crate::judge::balance::{Spread, spread_of};
use crate::judge::calibration::{Calibration, profile_reliability, trace_reliability};
use crate::judge::hosts::Hosts;
use crate::judge::replay::Evenness;
use crate::judge::tally::Tally;
use crate::judge::{requests, steps, tokens};
use crate::step::check_nodes;
use crate::tables::PrintedRule;

/// The traffic to evaluate tables on; preferably not the traffic they were solved on.
#[derive(Clone, Copy, Debug)]
pub enum EvalInput<'a> {
    /// Recorded requests.
    Trace(&'a Trace),
    /// Counts per token.
    Profile(&'a Profile),
}

/// The figures reported by `semmoe evaluate --json`.
#[derive(Clone, Debug, Serialize)]
pub struct Evaluation {
    /// The unit that `lar` and related figures describe: requests routed by the `affinity` policy, for a trace with
    /// attention dp; otherwise tokens, each at its best place according to T.
    pub unit: Unit,
    /// Local activation rate over all tokens and layers.
    pub lar: f64,
    /// With attention tp, the rate achieved by T without A. `lar` itself also uses A if the tables contain it and the
    /// groups in the two previous layers are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lar_t_only: Option<f64>,
    /// The rate achieved on a trace by the paper's printed rule (Algorithm 3, line 2, `cond(T_p > A_p)`), which uses T
    /// or the paper's A, whichever is more confident, and A on ties. A comes from tables made by the paper's algorithm.
    /// For other tables, it is counted on the solved requests or, if those are unknown, on the half of the evaluated
    /// requests that does not contain the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lar_paper_rule: Option<f64>,
    /// `lar` for each MoE layer; null for a layer without known routes.
    pub lar_per_layer: Vec<Option<f64>>,
    /// Expected rate with every token or request on a random rank.
    pub lar_random: f64,
    /// Fraction of activations that stay on their node, if nodes are known from the options or the tables' `solver`
    /// field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_local_rate: Option<f64>,
    /// Number of a token's top-k activations on other nodes, averaged over tokens and layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inter_node_activations_per_token: Option<f64>,
    /// Number of other ranks that a token is sent to, averaged over tokens and layers; null for a profile, whose counts
    /// do not show which experts were activated together.
    pub remote_ranks_per_token: Option<f64>,
    /// Expected `remote_ranks_per_token` with every token or request on a random rank.
    pub remote_ranks_random: Option<f64>,
    /// Expected `remote_ranks_per_token` on random ranks with experts in contiguous blocks, the default of engines.
    pub remote_ranks_blocks: Option<f64>,
    /// Ratio of maximum to mean activations per group, averaged over layers.
    pub expert_load_imbalance: f64,
    /// The paper's figure: ratio of maximum to median activations per group, averaged over layers.
    pub expert_load_imbalance_max_over_median: f64,
    /// Ratio of maximum to mean tokens per rank or, with attention tp, per group, averaged over layers.
    pub token_imbalance: f64,
    /// Step figures, if requested; `lar` and related figures then describe steps whose tokens are spread evenly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<StepFigures>,
    /// Number of tokens evaluated (with a known route).
    pub tokens: u64,
    /// Number of activations evaluated.
    pub activations: u64,
    /// How well T's shares match the observed shares.
    pub calibration: Calibration,
    /// Figures of each routing policy, simulated request by request; for a trace with attention dp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policies: Option<BTreeMap<String, RequestFigures>>,
    /// Exact assignment, by T's scores, of all requests known in advance. The distance from the optimum is T's error; a
    /// policy's distance from this figure is the price of not knowing the future.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_predicted: Option<RequestFigures>,
    /// Every request on the rank with its largest share, regardless of load; shows what an online policy gives up for
    /// balance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argmax: Option<RequestFigures>,
    /// Exact assignment, by T's scores, of each window of [`WINDOW`](crate::WINDOW) requests, such that the ranks'
    /// total tokens stay even; shows the potential gain from waiting for a window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub windowed: Option<RequestFigures>,
    /// Exact assignment, by true routing, of all requests known in advance; for a trace with attention dp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_optimum: Option<RequestFigures>,
    /// Upper bound for policies that keep tokens and sequences even; for a trace with attention dp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<OfflineBound>,
}

/// The optimum of a linear program that knows all requests in advance and divides them fractionally over ranks, with
/// tokens and sequences within limits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OfflineBound {
    /// The limits on tokens and sequences.
    pub margins: Margins,
    /// Local activation rate of the best division by true routing.
    pub lar: f64,
    /// Local activation rate of the best division by T's shares: the ceiling for a policy that knows only T.
    pub lar_by_t: f64,
    /// Relative gap between each division and its dual bound; the larger of the two.
    pub gap: f64,
}

/// Figures of an assignment of requests to ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RequestFigures {
    /// Local activation rate.
    pub request_lar: f64,
    /// Number of other ranks that a token is sent to, averaged over tokens and layers.
    pub remote_ranks_per_token: f64,
    /// Ratio of maximum to mean tokens per rank.
    pub request_imbalance: f64,
    /// Ratio of maximum to mean tokens per rank within [`BURST`](crate::BURST) consecutive requests; the worst over the
    /// trace.
    pub burst_imbalance: f64,
    /// The ratio that `burst_imbalance` maximizes, averaged over the trace.
    pub burst_imbalance_mean: f64,
    /// Fraction of prompt tokens estimated to be in their rank's prefix cache; null if caches were not simulated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_share: Option<f64>,
    /// How evenly the ranks were loaded over time; for policies only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evenness: Option<Evenness>,
    /// Gain over random ranks, relative to the gain of [`OfflineBound::lar_by_t`]; for policies only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_bound: Option<f64>,
}

/// Figures for steps of a unit with attention tp, whose rows are split evenly in each layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepFigures {
    /// Tokens per step; the last step may have fewer.
    pub step_tokens: usize,
    /// Ratio of the rows (a token in a layer) of the fullest group to the mean, over all steps and layers.
    pub fullest_group: f64,
    /// `fullest_group` if every token were on its likeliest group.
    pub fullest_group_wanted: f64,
    /// Fraction of rows that are not on their likeliest group.
    pub moved: f64,
    /// Rows over the busiest link in SRS, SAG, dispatch and combine of a layer, each of which waits for that link; per
    /// token of the step.
    pub fullest_link: f64,
    /// `fullest_link` if every token were on its likeliest group.
    pub fullest_link_wanted: f64,
    /// `fullest_link` if rows kept their order and were split into even parts (`semmoe worker --shuffle off`).
    pub fullest_link_unshuffled: f64,
}

impl Evaluation {
    /// Sets the figures common to all evaluations and leaves the others empty.
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

/// Evaluates tables on a trace or a profile of the same model.
///
/// With a trace and attention dp, simulates every policy of `options` with semmoe-routing's own code: T scores a
/// request by its prompt tokens, as in the gateway, then its prefill and decode are replayed step by step, and a new
/// request arrives when it finishes.
///
/// # Errors
/// [`SolveError`]: a different model, no known route, an option out of range, an unknown policy, or `step_tokens` for a
/// combination that does not run in steps.
pub fn evaluate(tables: &Tables, input: EvalInput<'_>, options: &EvalOptions) -> Result<Evaluation, SolveError> {
    evaluate_solved(tables, input, options, None)
}

/// Evaluates tables, given the trace that they were solved on if it is known.
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
                Some(tokens) => steps::judge(tables, &hosts, trace, &printed, tokens),
                None => tokens::judge_trace(tables, &hosts, trace, &printed),
            }
        }
        (EvalInput::Trace(trace), Attention::Dp, _) => requests::judge(tables, &hosts, trace, options)?,
        (EvalInput::Profile(_), _, Some(_)) => {
            return refused("a profile", "its counts do not show which tokens occur together");
        }
        (EvalInput::Profile(profile), _, None) => tokens::judge_profile(tables, &hosts, profile),
    };
    if judged.activations == 0 {
        return Err(SolveError::NoTokens { what });
    }
    let (tokens, requests) = match input {
        EvalInput::Profile(profile) => (profile_reliability(tables, &hosts, profile), None),
        EvalInput::Trace(trace) => {
            (trace_reliability(tables, &hosts, trace), requests::request_reliability(tables, &hosts, trace, options))
        }
    };
    Ok(Evaluation { calibration: Calibration { tokens, requests }, ..judged })
}
