//! The report of a solve.

use semmoe_tables::{LayerIdx, Profile, Tables, in_parallel};
use serde::Serialize;

use crate::bounds::Bounds;
use crate::input::{Nodes, Objective, Problem, SolveOptions, Unit};
use crate::judge::{Spread, spread, spread_of};
use crate::prior::TokenPrior;
use crate::ranks::Traced;
use crate::solve::hold_out::HeldOut;
use crate::start::{Best, clustering_profits, replica_loads, stay, with_prices};
use crate::step::{
    Clustering, CurrentPlacement, FREE, Limits, Plan, Task, Topology, Transport, charge_sequences, group_loads,
    load_floor, local_rate, mass_capacity, whole,
};

/// Limit on the number of profits read by the search for whole units, over all problems and rounds.
const MAX_VALUES_SETTLED: usize = 1 << 27;

/// Quality of a solve, measured on its own input except for `held_out`; use [`evaluate`](crate::evaluate) for other
/// data.
#[derive(Clone, Debug, Serialize)]
pub struct SolveReport {
    /// "dp" or "tp".
    pub attention: String,
    /// The unit that was assigned.
    pub unit: Unit,
    /// Number of groups, G.
    pub groups: u16,
    /// Number of units assigned: requests, or distinct tokens (summed over layers with attention tp).
    pub units: u64,
    /// Tokens with a known route in the input.
    pub tokens: u64,
    /// Activations in the input.
    pub activations: u64,
    /// The objective that was optimized.
    pub objective: Objective,
    /// Whether the experts' groups were given, so that only units were assigned.
    pub placement_given: bool,
    /// Local activation rate on the input, with units kept whole wherever they fit.
    pub lar: f64,
    /// Dual value as a rate: no assignment of the units to these groups of experts is better.
    pub lar_bound: f64,
    /// 1 - lar / `lar_bound`; with nodes, the gap of the optimized value, which still certifies the assignment.
    pub dual_gap: f64,
    /// Number of other ranks that a token is sent to, averaged over the tokens and layers of the trace; `None` without
    /// a trace.
    pub remote_ranks_per_token: Option<f64>,
    /// B1 as a rate: no placement with any assignment of the units is better.
    pub bound_spectral: Option<f64>,
    /// B2 as a rate: the bound by semidefinite duality.
    pub bound_sdp: Option<f64>,
    /// 1 - `lar` / the smaller of the two bounds.
    pub gap: Option<f64>,
    /// The reason why there are no bounds, or only weak ones.
    pub bound_note: Option<String>,
    /// Ratio of maximum to mean tokens per group (in the worst layer with attention tp).
    pub token_imbalance: f64,
    /// Ratio of maximum to mean requests per group, if requests are the units.
    pub sequence_imbalance: Option<f64>,
    /// Ratio of maximum to mean activations per group, averaged over layers.
    pub expert_load_imbalance: f64,
    /// Ratio of maximum to mean activations per group, in the worst layer.
    pub expert_load_imbalance_worst_layer: f64,
    /// Whether every layer meets the expert-load limit.
    pub expert_load_limit_met: bool,
    /// A lower bound on the imbalance without replicas: the load of a group with the hottest expert and otherwise the
    /// coldest experts, relative to the mean, in the worst layer. It replaces the limit in layers where it exceeds the
    /// limit. `None` with replicas.
    pub expert_load_floor: Option<f64>,
    /// Units that do not fit whole into any group and are divided by share.
    pub split_units: u64,
    /// R: replica slots per layer, over all groups.
    pub redundant: u16,
    /// Empty slots per layer, over all groups (the mean if layers differ).
    pub padding: f64,
    /// Starts of the alternation (per layer with attention tp); fewer than requested for very large inputs.
    pub starts: u32,
    /// Additional searches from the best result after random exchanges of its experts (with replicas only).
    pub kicks: u32,
    /// Number of layers (1 = everything with attention dp) that no start had reached when the caller stopped the solve;
    /// their experts are in index order.
    pub not_reached: u64,
    /// Number of unit steps over all starts.
    pub iterations: u64,
    /// Whether the caller stopped the solve early.
    pub stopped: bool,
    /// Traffic between nodes, if the solve had several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeFigures>,
    /// Experts moved, for a warm-started solve.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<Migration>,
    /// Sources of token similarity for T: "embeddings", "strings", both in this order, or none.
    pub priors: Vec<&'static str>,
    /// The tables' figures on held-out requests.
    pub held_out: HeldOut,
    /// T's coverage of the vocabulary.
    pub evidence: Evidence,
    /// The price of a token on each rank, as a fraction of the token's activations.
    pub price: Vec<f32>,
    /// The price of a sequence on each rank, as a fraction of a mean-sized request's activations; empty if the units
    /// are tokens.
    pub sequence_price: Vec<f32>,
    /// SHA-256 of the placement, without T and A.
    pub placement_digest: String,
    /// SHA-256 of the tables.
    pub digest: String,
}

/// Traffic between nodes, measured on the solve's input.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeFigures {
    /// Number of nodes, M.
    pub nodes: u16,
    /// X: the cost of an activation on another node, relative to one on another group of the same node.
    pub inter_cost: f64,
    /// Fraction of activations that stay on their node, including those on their own group.
    pub node_local_rate: f64,
    /// Number of a token's top-k activations on other nodes, averaged over tokens and layers.
    pub inter_node_activations_per_token: f64,
    /// Cost of the activations that leave their group, averaged over tokens and layers.
    pub cost_per_token: f64,
}

impl NodeFigures {
    fn new(nodes: Nodes, lar: f64, node_local_rate: f64, top_k: u16) -> Self {
        let Nodes { nodes, inter_cost } = nodes;
        let k = f64::from(top_k);
        NodeFigures {
            nodes,
            inter_cost,
            node_local_rate,
            inter_node_activations_per_token: k * (1.0 - node_local_rate),
            cost_per_token: k * (node_local_rate - lar + inter_cost * (1.0 - node_local_rate)),
        }
    }
}

/// Changes that a solve made to its initial placement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Migration {
    /// C, in activations of the layer's average expert.
    pub migration_cost: f64,
    /// Number of experts whose group changed, summed over layers (out of L * N).
    pub experts_moved: u64,
    /// Number of experts whose group changed, per layer.
    pub experts_moved_per_layer: Vec<u64>,
    /// Local activation rate on the input with the experts unmoved and the units reassigned.
    pub lar_before: f64,
}

impl Migration {
    pub(crate) fn new(
        placements: &[CurrentPlacement],
        problems: &[Problem],
        best: &Best,
        limits: Limits,
        options: &SolveOptions,
    ) -> Self {
        let stay = problems.iter().zip(placements).map(|(problem, placement)| {
            let capacity = mass_capacity(problem.total_mass(), limits.groups, options.token_margin);
            let task = Task { problem, capacity: &capacity, limits, placement: Some(placement), sequences: &FREE };
            with_prices(task, stay(task), &|| false)
        });
        let before = Best { clusterings: stay.collect(), ..Best::default() };
        let local: f64 = parts(problems, &before, options, limits.topology).iter().map(|part| part.primal).sum();
        let moved = placements.iter().zip(&best.clusterings).flat_map(|(before, now)| before.moved(&now.group_of));
        let moved: Vec<u64> = moved.collect();
        Migration {
            migration_cost: options.warm_start.as_ref().map_or(0.0, |warm| warm.migration_cost),
            experts_moved: moved.iter().sum(),
            experts_moved_per_layer: moved,
            lar_before: local / problems.iter().map(Problem::total_activations).sum::<u64>() as f64,
        }
    }
}

/// Number of vocabulary tokens by T's knowledge of them; the three counts add up to the vocabulary size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// Seen in the profile.
    pub tokens_seen: u64,
    /// Never seen, but similar to seen tokens, from which T's shares are estimated.
    pub tokens_by_similar: u64,
    /// Neither seen nor similar to a seen token, and therefore neutral in T.
    pub tokens_without_evidence: u64,
}

impl Evidence {
    pub(crate) fn new(profile: &Profile, prior: Option<&TokenPrior>) -> Self {
        let mut evidence = Evidence::default();
        let known =
            prior.map(|prior| prior.known_by(|token| profile.token_counts()[token] > 0, profile.token_counts().len()));
        for (token, &count) in profile.token_counts().iter().enumerate() {
            let known_by_others = || known.as_ref().is_some_and(|known| known[token]);
            *match count {
                1.. => &mut evidence.tokens_seen,
                0 if known_by_others() => &mut evidence.tokens_by_similar,
                0 => &mut evidence.tokens_without_evidence,
            } += 1;
        }
        evidence
    }
}

/// Reasons why a report has no bounds over all placements.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoBounds {
    #[error("not requested")]
    NotRequested,
    #[error("the solve ended early")]
    Stopped,
    #[error("the solve ended before the bounds were found")]
    StoppedBefore,
    #[error("the bounds are too expensive for this many experts per layer")]
    TooExpensive,
    #[error("the bounds do not cover replicas")]
    Replicas,
    #[error("the bounds do not cover the padding of a given placement")]
    GivenPadding,
}

/// One problem's part of the report, in activations.
struct Part {
    /// Activations local to their group, and the upper bound on them for this placement.
    primal: f64,
    dual: f64,
    /// Activations on their own node.
    node_local: f64,
    /// The value of the objective, and its bound.
    value: f64,
    value_bound: f64,
    token_imbalance: f64,
    sequence_imbalance: f64,
    load: Vec<Spread>,
    plan: Plan,
}

/// The result of a solve, from which a report is made.
pub(crate) struct Findings<'a> {
    pub(crate) unit: Unit,
    pub(crate) topology: Topology,
    pub(crate) problems: &'a [Problem],
    pub(crate) profile: &'a Profile,
    /// The source of T's shares for tokens that the profile lacks.
    pub(crate) prior: Option<&'a TokenPrior>,
    pub(crate) best: &'a Best,
    pub(crate) tables: &'a Tables,
    pub(crate) traced: Option<&'a Traced<'a>>,
}

impl SolveReport {
    pub(crate) fn new(options: &SolveOptions, findings: Findings<'_>) -> Self {
        let Findings { unit, topology, problems, profile, prior, best, tables, traced } = findings;
        let parts = parts(problems, best, options, topology);
        let activations: u64 = problems.iter().map(Problem::total_activations).sum();
        let rate = |value: fn(&Part) -> f64| parts.iter().map(value).sum::<f64>() / activations as f64;
        let (lar, lar_bound) = (rate(|part| part.primal), rate(|part| part.dual));
        let replicated = best.clusterings.iter().any(|clustering| clustering.replicas.is_some());
        let floor = (!replicated).then(|| worst_floor(problems, usize::from(options.groups)));
        let load: Vec<Spread> = parts.iter().flat_map(|part| part.load.iter().copied()).collect();
        let (redundant, padding) = spare_slots(tables);
        SolveReport {
            attention: options.attention.to_string(),
            unit,
            groups: options.groups,
            units: problems.iter().map(|problem| problem.units() as u64).sum(),
            tokens: problems.iter().map(Problem::total_mass).max().unwrap_or(0),
            activations,
            objective: options.objective,
            placement_given: options.placement.is_some(),
            lar,
            lar_bound,
            dual_gap: 1.0 - rate(|part| part.value) / rate(|part| part.value_bound),
            // With replicas, the engine chooses the copy for a remote activation, so only `evaluate` reports this
            // figure.
            remote_ranks_per_token: traced.filter(|_| redundant == 0).and_then(|traced| {
                let plans: Vec<&Plan> = parts.iter().map(|part| &part.plan).collect();
                traced.remote_ranks(problems, &best.clusterings, &plans)
            }),
            bound_spectral: None,
            bound_sdp: None,
            gap: None,
            bound_note: Some("the solver used does not compute bounds".to_owned()),
            token_imbalance: parts.iter().map(|part| part.token_imbalance).fold(0.0, f64::max),
            sequence_imbalance: (unit == Unit::Request)
                .then(|| parts.iter().map(|part| part.sequence_imbalance).fold(0.0, f64::max)),
            expert_load_imbalance: load.iter().map(|spread| spread.max_over_mean).sum::<f64>() / load.len() as f64,
            expert_load_imbalance_worst_layer: load.iter().map(|spread| spread.max_over_mean).fold(0.0, f64::max),
            expert_load_limit_met: best.clusterings.iter().all(|clustering| clustering.load_excess == 0)
                && floor.is_none_or(|floor| floor <= options.expert_load_limit),
            expert_load_floor: floor,
            split_units: parts.iter().map(|part| part.plan.splits.len() as u64).sum(),
            redundant,
            padding,
            starts: best.starts,
            kicks: best.kicks,
            not_reached: best.not_reached as u64,
            iterations: best.iterations,
            stopped: best.stopped,
            nodes: options
                .nodes
                .map(|nodes| NodeFigures::new(nodes, lar, rate(|part| part.node_local), tables.model().top_k)),
            migration: None,
            priors: Vec::new(),
            held_out: HeldOut::default(),
            evidence: Evidence::new(profile, prior),
            price: tables.price().to_vec(),
            sequence_price: tables.sequence_price().to_vec(),
            placement_digest: tables.placement_digest().to_owned(),
            digest: tables.digest().to_owned(),
        }
    }

    /// Adds the bounds over all placements, or the reason why there are none. `held_back`: whether the solve optimized
    /// anything other than the local rate.
    pub(crate) fn certify(&mut self, bounds: Result<Bounds, NoBounds>, held_back: bool) {
        let own = "the bounds apply to the local rate, which nodes or gating groups reduce";
        match bounds {
            Ok(bounds) => {
                (self.bound_spectral, self.bound_sdp) = (Some(bounds.spectral), Some(bounds.sdp));
                self.gap = Some(1.0 - self.lar / bounds.best());
                let notes = [bounds.scope.note(), held_back.then_some(own)];
                let notes: Vec<&str> = notes.into_iter().flatten().collect();
                self.bound_note = (!notes.is_empty()).then(|| notes.join("; "));
            }
            Err(reason) => self.bound_note = Some(reason.to_string()),
        }
    }
}

/// Returns the replica slots and the empty slots per layer, both averaged over layers; the former are rounded.
fn spare_slots(tables: &Tables) -> (u16, f64) {
    let Some(slots) = tables.physical_to_logical() else { return (0, 0.0) };
    let layers = tables.model().layers();
    let empty = |layer: usize| slots.layer(LayerIdx::new(layer as u16)).iter().filter(|expert| **expert < 0).count();
    let padding = (0..layers).map(empty).sum::<usize>() as f64 / layers as f64;
    let redundant = slots.slots() as f64 - padding - f64::from(tables.model().num_experts);
    (redundant.round() as u16, padding)
}

/// Returns the largest ratio, over all layers, of [`load_floor`] to the mean load of a group.
fn worst_floor(problems: &[Problem], groups: usize) -> f64 {
    let layers = problems.iter().flat_map(|problem| problem.column_load.chunks_exact(problem.experts));
    let over_mean =
        |load: &[u64]| load_floor(load, groups) as f64 * groups as f64 / load.iter().sum::<u64>().max(1) as f64;
    layers.map(over_mean).fold(0.0, f64::max)
}

/// Computes each problem's part, on up to `options.threads` threads.
fn parts(problems: &[Problem], best: &Best, options: &SolveOptions, topology: Topology) -> Vec<Part> {
    let units: usize = problems.iter().map(Problem::units).sum();
    let rounds = (MAX_VALUES_SETTLED / (units * usize::from(options.groups)).max(1)).max(1);
    let pairs: Vec<_> = problems.iter().zip(&best.clusterings).collect();
    in_parallel(&pairs, options.threads, |(problem, clustering)| {
        Part::new(problem, clustering, options, topology, rounds)
    })
}

impl Part {
    fn new(
        problem: &Problem,
        clustering: &Clustering,
        options: &SolveOptions,
        topology: Topology,
        rounds: usize,
    ) -> Self {
        let groups = usize::from(options.groups);
        let capacity = mass_capacity(problem.total_mass(), groups, options.token_margin);
        let profit = clustering_profits(problem, clustering, groups, topology);
        let transport = Transport { mass: &problem.mass, profit: &profit, capacity: &capacity };
        let mut charged = profit.clone();
        charge_sequences(problem, &mut charged, &clustering.sequences.price);
        let charged = Transport { profit: &charged, ..transport };
        let (plan, dual) = match options.objective {
            Objective::Activations => (
                whole(&charged, &clustering.plan, rounds),
                charged.dual_value(&clustering.plan.price) + clustering.sequences.of_room,
            ),
            // The plan already has only whole units, and its prices refer to occurrences.
            Objective::Ranks => (clustering.plan.clone(), transport.solve(None).dual),
        };
        let activations = problem.total_activations() as f64;
        let layers = clustering.group_of.chunks_exact(problem.experts);
        let loads: Vec<Vec<u64>> = match &clustering.replicas {
            Some(held) => replica_loads(problem, held, &plan),
            None => layers
                .zip(problem.column_load.chunks_exact(problem.experts))
                .map(|(group_of, load)| group_loads(group_of, load, groups))
                .collect(),
        };
        let [value, value_bound] = [plan.value(&transport), dual].map(|value| local_rate(value, problem) * activations);
        let (mut primal, mut local_bound, mut node_local) = (value, value_bound, value);
        if options.nodes.is_some() {
            // The plan's value for the local rate and for the node-local rate.
            let of = |near| clustering_profits(problem, clustering, groups, Topology { near, ..topology });
            let (own, node) = (of(0.0), of(1.0));
            let [own, node] = [&own, &node].map(|profit| Transport { profit, ..transport });
            [primal, local_bound, node_local] = [plan.value(&own), own.solve(None).dual, plan.value(&node)]
                .map(|value| local_rate(value, problem) * activations);
        }
        Part {
            primal,
            dual: local_bound,
            node_local,
            value,
            value_bound,
            token_imbalance: spread(&plan.loads(&problem.mass, groups)).map_or(1.0, |spread| spread.max_over_mean),
            sequence_imbalance: spread_of(&plan.units(&problem.mass, groups))
                .map_or(1.0, |spread| spread.max_over_mean),
            load: loads.iter().filter_map(|loads| spread(loads)).collect(),
            plan,
        }
    }
}
