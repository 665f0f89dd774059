//! Solves for tables, given a profile and traces.

pub(crate) mod assign;
mod given;
pub(crate) mod hold_out;
pub(crate) mod report;

use std::ops::ControlFlow;

use semmoe_tables::{Attention, Placement, Profile, Replicas, Tables, TablesBuilder, Trace};

use crate::bounds::{Bounds, problem_bounds};
use crate::input::{
    Nodes, Objective, Problem, SolveError, SolveOptions, Split, Unit, check_size, check_together, padded_replicas,
    problems,
};
use crate::prior::TokenPrior;
use crate::prior::evidence::Shrinkage;
use crate::ranks::Traced;
use crate::start::{Best, Progress, SolveProgress, run_starts};
use crate::step::{Clustering, Limits, MAX_RANKS, PROFIT_ONE, Topology};
use crate::tables::{
    Prices, activation_evidence, dp_prices, fit_prior, keep_transitions, replica_shares, shares_by, tp_parts,
};
use given::Given;
use hold_out::{HeldOut, with_hold_out};
use report::{Findings, Migration, NoBounds, SolveReport};

/// Maximum experts per layer for which bounds are computed, in minutes at most: the work grows with the cube.
const MAX_BOUNDED_EXPERTS: usize = 1024;

/// The result of [`solve`].
#[derive(Debug)]
pub struct Solved {
    /// T, A and E, ready to be written.
    pub tables: Tables,
    /// The tables' quality on the input, and the bounds that certify it.
    pub report: SolveReport,
}

/// Co-clusters tokens or requests with experts and builds the tables (README.md describes the method).
///
/// With attention dp the units are the requests of `trace`, or the profile's tokens without a trace; with attention tp
/// they are the profile's tokens, layer by layer. `progress` is called at least about once a second, even during long
/// steps; when it breaks, the best result so far is returned (with experts in index order where no start has finished).
/// Requests held out by [`SolveOptions::hold_out`] are never solved on; the report evaluates the tables on them.
///
/// # Errors
/// Returns a [`SolveError`] if the input has no known route, the groups do not divide the experts (the error lists
/// valid numbers), an option is out of range, options exclude each other, a given placement has the wrong shape, trace
/// and profile belong to different models, or counts exceed 2^50.
pub fn solve(
    profile: &Profile,
    trace: Option<&Trace>,
    options: &SolveOptions,
    progress: &mut dyn FnMut(SolveProgress) -> ControlFlow<()>,
) -> Result<Solved, SolveError> {
    let (given, topology) = checked(profile, trace, options)?;
    with_hold_out(profile, trace, options, |profile, trace, split| {
        solve_part(Input { profile, trace, split, options }, given, topology, progress)
    })
}

/// The input of a solve.
#[derive(Clone, Copy)]
struct Input<'a> {
    profile: &'a Profile,
    trace: Option<&'a Trace>,
    /// The held-out requests.
    split: Option<&'a Split>,
    options: &'a SolveOptions,
}

/// The result for all problems.
struct Found<'a> {
    unit: Unit,
    problems: &'a [Problem],
    best: &'a Best,
    /// The slots of a given placement with replicas or padding.
    slots: Option<Replicas>,
}

/// Solves on the given input; uses the held-out requests to make the choices that remain.
fn solve_part(
    input: Input<'_>,
    given: Option<Given>,
    topology: Topology,
    progress: Progress<'_>,
) -> Result<Solved, SolveError> {
    let Input { profile, trace, options, .. } = input;
    let prior = TokenPrior::new(profile, options)?;
    let counted = own_counts(trace, options)?;
    let counted = counted.as_ref().unwrap_or(profile);
    let (unit, mut problems) = problems(counted, trace, options.attention)?;
    let slots = options.slots(profile.model().num_experts);
    let padded = given.is_none() && slots > usize::from(profile.model().num_experts);
    if padded {
        problems = problems.into_iter().map(|problem| problem.padded(slots)).collect::<Result<_, _>>()?;
    }
    let traced = trace.map(|trace| Traced::new(trace, unit, counted));
    let each = (options.redundant > 0).then(|| usize::from(options.slots_per_group(profile.model().num_experts)));
    let balanced = unit == Unit::Request
        && each.is_none()
        && options.objective == Objective::Activations
        && usize::from(options.groups) <= MAX_RANKS;
    let limits = Limits { sequences: balanced.then(|| options.margins()), ..Limits::new(options, topology, each) };
    let placements = options.warm_start.as_ref().map(|warm| warm.placements(&problems));
    let mut best = match &given {
        Some(given) => given.best(&problems, options, limits, progress),
        None => run_starts(&problems, options, limits, placements.as_deref(), progress)?,
    };
    if let (Objective::Ranks, Some(traced)) = (options.objective, &traced) {
        traced.improve(&problems, limits, options, &mut best, progress);
    }
    let slots = match padded {
        true => Some(padded_replicas(profile.model(), options.groups, layers_of(&problems, &best.clusterings))?),
        false => given.and_then(|given| given.slots),
    };
    let found = Found { unit, problems: &problems, best: &best, slots };
    let (tables, held_out) = build_tables(input, prior.as_ref(), found)?;
    let findings = Findings {
        unit,
        topology,
        problems: &problems,
        profile,
        prior: prior.as_ref(),
        best: &best,
        tables: &tables,
        traced: traced.as_ref(),
    };
    let mut report = SolveReport::new(options, findings);
    report.priors = options.priors();
    report.migration = placements.map(|placements| Migration::new(&placements, &problems, &best, limits, options));
    let done =
        SolveProgress { starts_done: best.starts as usize, starts: best.starts as usize, best_lar: Some(report.lar) };
    let bounds = proof(&report, &problems, options, &mut || progress(done).is_continue());
    report.certify(bounds, options.nodes.is_some() || options.gating_groups > 1);
    report.held_out = held_out;
    Ok(Solved { tables, report })
}

/// Checks the options; returns the given placement, if any, and the division of the groups into nodes.
fn checked(
    profile: &Profile,
    trace: Option<&Trace>,
    options: &SolveOptions,
) -> Result<(Option<Given>, Topology), SolveError> {
    options.validate()?;
    check_size(profile.model(), options.groups)?;
    check_together(options, false)?;
    let (model, experts) = (profile.model(), profile.model().num_experts);
    let given = options.placement.as_ref().map(|given| Given::new(given, model, options)).transpose()?;
    if given.is_none() {
        options.check_groups(experts)?;
    }
    let topology = Topology::new(options, experts)?;
    options.warm_start.iter().try_for_each(|warm| warm.check(profile, options))?;
    if let Some(trace) = trace {
        model.check_compatible(trace.model())?;
    }
    Ok((given, topology))
}

/// Computes the bounds over all placements.
fn proof(
    report: &SolveReport,
    problems: &[Problem],
    options: &SolveOptions,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Bounds, NoBounds> {
    match options.bounds {
        Some(_) if report.stopped => Err(NoBounds::Stopped),
        Some(_) if problems.iter().any(|problem| problem.experts > MAX_BOUNDED_EXPERTS) => Err(NoBounds::TooExpensive),
        Some(_) if report.redundant > 0 => Err(NoBounds::Replicas),
        Some(_) if report.padding > 0.0 && options.placement.is_some() => Err(NoBounds::GivenPadding),
        Some(_) => problem_bounds(problems, options, go_on).ok_or(NoBounds::StoppedBefore),
        None => Err(NoBounds::NotRequested),
    }
}

/// Builds T, A and E from the best clusterings, and makes choices with the held-out requests.
fn build_tables(
    Input { profile, trace, split, options }: Input<'_>,
    prior: Option<&TokenPrior>,
    Found { unit, problems, best, slots }: Found<'_>,
) -> Result<(Tables, HeldOut), SolveError> {
    let mut held_out = HeldOut::default();
    let first = &best.clusterings[0];
    let replicas = first.replicas.as_ref();
    let own_slots = || replicas.map(|held| held.to_replicas(profile.model())).transpose();
    let slots = slots.map_or_else(own_slots, |slots| Ok(Some(slots)))?;
    let placement = match &slots {
        Some(slots) => slots.primary(),
        None => placement(options.groups, problems, &best.clusterings)?,
    };
    // With replicas a token's shares do not add up to one, so its prior has no likelihood to fit.
    let held = split.filter(|_| replicas.is_none()).map(|split| [&split.choose_counts, &split.judge_counts]);
    held_out.prior = held.and_then(|held| fit_prior(profile, &placement, Shrinkage { options, prior }, held));
    let options = &held_out.prior.map_or_else(|| options.clone(), |prior| prior.applied(options));
    let shrinkage = Shrinkage { options, prior };
    let builder = match options.attention {
        Attention::Dp => {
            let evidence = |layer| activation_evidence(profile, layer, &placement);
            let shares = match replicas {
                Some(held) => replica_shares(profile, held, &shrinkage),
                None => shares_by(profile, usize::from(options.groups), &shrinkage, evidence),
            };
            // Prices come from the trace's requests scored with T or, without a trace, from the profile's tokens.
            let price = match trace {
                Some(trace) => dp_prices(trace, &shares, usize::from(options.groups), options.margins()),
                None => Prices { token: in_shares(&first.plan.price, &problems[0]), sequence: None },
            };
            let builder =
                TablesBuilder::dp(profile.model().clone(), options.provenance.clone(), placement, shares, price.token);
            price.sequence.into_iter().fold(builder, TablesBuilder::sequence_price)
        }
        Attention::Tp => {
            let mut parts = tp_parts(profile, &placement, &shrinkage);
            if let Some((trace, split)) = trace.zip(split) {
                let (prior, held) = (options.prior_occurrences, [&split.choose, &split.judge]);
                held_out.transitions = keep_transitions(&mut parts, trace, &placement, prior, held);
            }
            let price = mean_prices(usize::from(options.groups), problems, best);
            TablesBuilder::tp(profile.model().clone(), options.provenance.clone(), placement, parts, price)
        }
    };
    let builder = slots.into_iter().fold(builder, TablesBuilder::replicas);
    Ok((builder.solver(solver_name(unit, options)).finish()?, held_out))
}

/// Returns the counts to cluster, if they are not the profile's. Remote ranks are counted in the trace, so with
/// attention tp the units are the trace's tokens.
fn own_counts(trace: Option<&Trace>, options: &SolveOptions) -> Result<Option<Profile>, SolveError> {
    match (options.objective, options.attention, trace) {
        (Objective::Ranks, _, None) => Err(SolveError::RanksNeedTrace),
        (Objective::Ranks, Attention::Tp, Some(trace)) => Ok(Some(Profile::of_trace(trace)?)),
        _ => Ok(None),
    }
}

/// Builds E from the clustering of each problem.
pub(crate) fn placement(
    groups: u16,
    problems: &[Problem],
    clusterings: &[Clustering],
) -> Result<Placement, SolveError> {
    Ok(Placement::new(groups, layers_of(problems, clusterings).collect())?)
}

/// Iterates over the groups of each layer's experts, over all problems in order.
fn layers_of(problems: &[Problem], clusterings: &[Clustering]) -> impl Iterator<Item = Vec<u16>> {
    let layers = |(problem, found): (&Problem, &Clustering)| {
        found.group_of.chunks_exact(problem.experts).map(<[u16]>::to_vec).collect::<Vec<_>>()
    };
    problems.iter().zip(clusterings).flat_map(layers)
}

/// Returns the price of each group, averaged over the problems.
fn mean_prices(groups: usize, problems: &[Problem], best: &Best) -> Vec<f32> {
    let mut price = vec![0.0; groups];
    for (problem, clustering) in problems.iter().zip(&best.clusterings) {
        for (mean, price) in price.iter_mut().zip(in_shares(&clustering.plan.price, problem)) {
            *mean += price / problems.len() as f32;
        }
    }
    price
}

/// Converts prices per token to fractions of a token's activations.
fn in_shares(price: &[i64], problem: &Problem) -> Vec<f32> {
    let activations_per_token = problem.total_activations() as f64 / problem.total_mass() as f64;
    price.iter().map(|&price| (price as f64 / PROFIT_ONE / activations_per_token) as f32).collect()
}

fn solver_name(unit: Unit, options: &SolveOptions) -> String {
    let priors: String = options.priors().iter().map(|prior| format!(" prior={prior}")).collect();
    let given = options.placement.as_ref().map(|given| format!(" placement={}", given.name()));
    let warm = options.warm_start.as_ref().map(|warm| format!(" migration_cost={}", warm.migration_cost));
    let of_nodes = |Nodes { nodes, inter_cost }| format!(" nodes={nodes} inter_cost={inter_cost}");
    let [placement, warm, nodes] = [given, warm, options.nodes.map(of_nodes)].map(Option::unwrap_or_default);
    format!(
        "semmoe-solver {} unit={unit} objective={} seed={} starts={} token_margin={} sequence_margin={} expert_load_limit={} redundant={} \
         prior_occurrences={} hold_out={}{priors}{placement}{warm}{nodes}",
        env!("CARGO_PKG_VERSION"),
        options.objective,
        options.seed,
        options.starts,
        options.token_margin,
        options.sequence_margin,
        options.expert_load_limit,
        options.redundant,
        options.prior_occurrences,
        options.hold_out,
    )
}
