//! A trace paired with the problems derived from it, to count remote ranks and to optimize the objective `ranks`.

use semmoe_tables::{Profile, Trace, in_parallel};

use super::RankProblem;
use super::routes::{LayerRoutes, UnitOf, distinct_groups, fill};
use crate::input::{Problem, SolveOptions, Unit};
use crate::start::{Best, Progress, SolveProgress};
use crate::step::{Clustering, Limits, MAX_ROUNDS, Plan, Transport, mass_capacity, whole};

/// A trace, and the unit of each of its occurrences.
pub(crate) struct Traced<'a> {
    pub(super) trace: &'a Trace,
    pub(super) unit_of: UnitOf,
}

impl<'a> Traced<'a> {
    /// Pairs `trace` with units that were made from it (requests) or from `profile` (tokens).
    pub(crate) fn new(trace: &'a Trace, unit: Unit, profile: &Profile) -> Self {
        let unit_of = match unit {
            Unit::Request => UnitOf::request(trace),
            Unit::Token => UnitOf::token(profile),
        };
        Traced { trace, unit_of }
    }

    /// Returns the number of remote ranks that a token is sent to under each problem's clustering and plan, averaged
    /// over the tokens and layers covered by units. Split units count by share. Returns `None` if no token is covered.
    pub(crate) fn remote_ranks(
        &self,
        problems: &[Problem],
        clusterings: &[Clustering],
        plans: &[&Plan],
    ) -> Option<f64> {
        let mut layers = Vec::new();
        for ((problem, clustering), plan) in problems.iter().zip(clusterings).zip(plans) {
            let placements = clustering.group_of.chunks_exact(problem.experts);
            layers.extend(placements.map(|group_of| (problem, plan, group_of)));
        }
        let (mut remote, mut routes) = (0.0, 0u64);
        let (mut seen, mut set) = (Vec::new(), Vec::new());
        for (request, position, unit) in self.unit_of.tokens(self.trace) {
            for (layer, route) in request.routes(position) {
                let (problem, plan, group_of) = layers[layer.index()];
                fill(&mut set, route);
                distinct_groups(&set, group_of, &mut seen);
                remote += seen.len() as f64 - plan.share_in(unit, problem.mass[unit], &seen);
                routes += 1;
            }
        }
        (routes > 0).then(|| remote / routes as f64)
    }

    /// Improves every problem's best clustering for activations to one with fewer remote ranks and only whole units.
    pub(crate) fn improve(
        &self,
        problems: &[Problem],
        limits: Limits,
        options: &SolveOptions,
        best: &mut Best,
        progress: Progress<'_>,
    ) {
        let starts = options.starts as usize * problems.len();
        let mut stopped = best.stopped;
        let mut first = 0;
        for (problem, clustering) in problems.iter().zip(&mut best.clusterings) {
            let layers: Vec<usize> = (first..first + problem.layers).collect();
            first += problem.layers;
            let count = |layer| LayerRoutes::count(self.trace, layer, &self.unit_of);
            let routes = in_parallel(&layers, options.threads, count);
            let capacity = mass_capacity(problem.total_mass(), limits.groups, options.token_margin);
            let ranked = RankProblem { problem, routes: &routes, capacity: &capacity, limits };
            let before = clustering.iterations;
            let mut go_on = || {
                let step = SolveProgress { starts_done: starts, starts, best_lar: None };
                stopped = stopped || progress(step).is_break();
                !stopped
            };
            let improved = ranked.improve(clustering.clone(), options.threads, &mut go_on);
            best.iterations += u64::from(improved.iterations - before);
            let profit = ranked.profits(&improved.group_of);
            let transport = Transport { mass: &problem.mass, profit: &profit, capacity: &capacity };
            let plan = whole(&transport, &improved.plan, MAX_ROUNDS);
            *clustering = Clustering { plan, ..improved };
        }
        best.stopped = stopped;
    }
}
