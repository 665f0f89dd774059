//! A trace beside the problems that were made of it: what is counted in it, and the objective `ranks` on all problems.

use std::ops::ControlFlow;

use semmoe_tables::{Profile, Trace, in_parallel};

use super::RankProblem;
use super::measure::remote_ranks;
use super::routes::{LayerRoutes, UnitOf};
use crate::clustering::{Clustering, Limits};
use crate::options::{SolveOptions, Unit};
use crate::problem::Problem;
use crate::starts::{Best, SolveProgress};
use crate::transport::{Plan, Transport};
use crate::unit_step::mass_capacity;
use crate::whole::{MAX_ROUNDS, whole};

/// A trace and which unit each of its occurrences belongs to.
pub(crate) struct Traced<'a> {
    trace: &'a Trace,
    unit_of: UnitOf,
}

impl<'a> Traced<'a> {
    /// For units made from `trace` (requests) or `profile` (tokens).
    pub(crate) fn new(trace: &'a Trace, unit: Unit, profile: &Profile) -> Self {
        let unit_of = match unit {
            Unit::Request => UnitOf::request(trace),
            Unit::Token => UnitOf::token(profile),
        };
        Traced { trace, unit_of }
    }

    /// Remote ranks per token under each problem's clustering and plan.
    pub(crate) fn remote_ranks(
        &self,
        problems: &[Problem],
        clusterings: &[Clustering],
        plans: &[&Plan],
    ) -> Option<f64> {
        let mut layers: Vec<(&[u64], &Plan, &[u16])> = Vec::new();
        for ((problem, clustering), plan) in problems.iter().zip(clusterings).zip(plans) {
            let placements = clustering.group_of.chunks_exact(problem.experts);
            layers.extend(placements.map(|group_of| (&problem.mass[..], *plan, group_of)));
        }
        remote_ranks(self.trace, &self.unit_of, &layers)
    }

    /// Takes every problem from its best clustering for activations to one with fewer remote ranks, with whole units.
    pub(crate) fn improve(
        &self,
        problems: &[Problem],
        limits: Limits,
        options: &SolveOptions,
        best: &mut Best,
        progress: &mut dyn FnMut(SolveProgress) -> ControlFlow<()>,
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
