//! The local search against plain recounts, and the objective against brute force.

use proptest::prelude::*;
use semmoe_tables::{Trace, TraceBuilder};

use super::routes::{LayerRoutes, UnitOf};
use super::search::{Search, weights};
use super::{Clustering, RankProblem, Traced};
use crate::fixtures::{model, provenance};
use crate::input::options::SolveOptions;
use crate::input::problem::Problem;
use crate::prior::test_options;
use crate::start::starts::run_starts;
use crate::step::clustering::Limits;
use crate::step::topology::Topology;
use crate::step::transport::Plan;
use crate::step::unit_step::mass_capacity;

/// Requests of `top_k` experts per layer, each with a preference for some of them.
fn random_trace((layers, experts, top_k): (usize, usize, usize), requests: usize, seed: u64) -> Trace {
    let mut random = fastrand::Rng::with_seed(seed);
    let model = model(layers as u16, experts as u16, top_k as u16, 8);
    let mut trace = TraceBuilder::new(model, provenance()).unwrap();
    for _ in 0..requests {
        let taste = random.usize(0..experts);
        let tokens = random.usize(1..6);
        let ids: Vec<u32> = (0..tokens).map(|_| random.u32(0..8)).collect();
        let mut routes = Vec::new();
        for _ in 0..tokens * layers {
            let mut set = Vec::new();
            while set.len() < top_k {
                let near = (taste + random.usize(0..top_k + 1)) % experts;
                let expert = if random.bool() { near } else { random.usize(0..experts) } as u16;
                if !set.contains(&expert) {
                    set.push(expert);
                }
            }
            routes.extend(set);
        }
        trace.push(&ids, tokens as u32, &routes, None).unwrap();
    }
    trace.finish().unwrap()
}

/// `W - w` of every group that a set touches, over all sets.
fn cost(routes: &LayerRoutes, weight: &[i64], groups: usize, group_of: &[u16]) -> i64 {
    let mut seen = Vec::new();
    let of_set = |set: usize| {
        super::routes::distinct_groups(routes.set(set), group_of, &mut seen);
        let weight = &weight[set * groups..(set + 1) * groups];
        let total: i64 = weight.iter().sum();
        seen.iter().map(|&group| total - weight[usize::from(group)]).sum::<i64>()
    };
    (0..routes.sets()).map(of_set).sum()
}

fn all_routes(trace: &Trace) -> Vec<LayerRoutes> {
    let unit_of = UnitOf::request(trace);
    (0..trace.model().layers()).map(|layer| LayerRoutes::count(trace, layer, &unit_of)).collect()
}

fn limits(groups: usize, max_over_mean: f64) -> Limits {
    Limits {
        groups,
        max_over_mean,
        iterations: 60,
        swap_passes: 4,
        slots: None,
        topology: Topology::flat(groups),
        sequences: None,
    }
}

/// Solves for activations, then for ranks: mean remote ranks of both.
fn both(trace: &Trace, limits: Limits, margin: f64) -> (f64, f64, Clustering) {
    let problem = Problem::from_trace(trace).unwrap();
    let capacity = mass_capacity(problem.total_mass(), limits.groups, margin);
    let problems = [problem];
    let options = SolveOptions { token_margin: margin, seed: 1, starts: 4, threads: 1, ..test_options() };
    let best = run_starts(&problems, &options, limits, None, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    let routes = all_routes(trace);
    let ranked = RankProblem { problem: &problems[0], routes: &routes, capacity: &capacity, limits };
    let improved = ranked.improve(best.clusterings[0].clone(), 1, &mut || true);
    let traced = Traced { trace, unit_of: UnitOf::request(trace) };
    let measure = |clustering: &Clustering| {
        let found = std::slice::from_ref(clustering);
        traced.remote_ranks(&problems, found, &[&clustering.plan]).unwrap()
    };
    (measure(&best.clusterings[0]), measure(&improved), improved)
}

/// The minimum mean remote ranks over all placements of one layer, with exact units.
fn optimum(trace: &Trace, groups: usize, margin: f64) -> f64 {
    let problem = Problem::from_trace(trace).unwrap();
    let routes = all_routes(trace);
    let capacity = mass_capacity(problem.total_mass(), groups, margin);
    let limits = limits(groups, 1000.0);
    let ranked = RankProblem { problem: &problem, routes: &routes, capacity: &capacity, limits };
    let experts = problem.experts;
    let mut least = f64::INFINITY;
    for code in 0..groups.pow(experts as u32) {
        let group_of: Vec<u16> = (0..experts).map(|at| (code / groups.pow(at as u32) % groups) as u16).collect();
        if (0..groups as u16).any(|group| group_of.iter().filter(|other| **other == group).count() != experts / groups)
        {
            continue;
        }
        let plan = ranked.unit_step(&group_of, None);
        let found = [Clustering::whole(&problem, group_of, plan, limits, 0)];
        let traced = Traced { trace, unit_of: UnitOf::request(trace) };
        let plans = [&found[0].plan];
        least = least.min(traced.remote_ranks(std::slice::from_ref(&problem), &found, &plans).unwrap());
    }
    least
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_swap_saves_what_a_recount_says(seed: u64, requests in 1usize..40, groups in prop::sample::select(vec![2usize, 4])) {
        let trace = random_trace((1, 8, 3), requests, seed);
        let routes = &all_routes(&trace)[0];
        let mut random = fastrand::Rng::with_seed(seed);
        let plan = Plan { label: (0..requests).map(|_| random.u16(0..groups as u16)).collect(), ..Plan::default() };
        let mass = vec![1; requests];
        let weight = weights(routes, &mass, &plan, groups);
        let mut group_of: Vec<u16> = (0..8).map(|at| (at % groups) as u16).collect();
        random.shuffle(&mut group_of);
        let mut search = Search::new(routes, weight.clone(), groups, &group_of);
        for _ in 0..10 {
            for a in 0..8 {
                for b in (0..8).filter(|&b| group_of[a] != group_of[b]) {
                    let mut swapped = group_of.clone();
                    swapped.swap(a, b);
                    let saved = cost(routes, &weight, groups, &group_of) - cost(routes, &weight, groups, &swapped);
                    prop_assert_eq!(search.saves(a, b), saved);
                }
            }
            let (a, b) = (random.usize(0..8), random.usize(0..8));
            if group_of[a] != group_of[b] {
                search.swap(a, b);
                group_of.swap(a, b);
            }
        }
    }

    #[test]
    fn a_search_never_loses_and_keeps_the_limits(seed: u64, requests in 1usize..40, limit in 1.0..2.0) {
        let (groups, trace) = (4, random_trace((1, 8, 2), requests, seed));
        let routes = &all_routes(&trace)[0];
        let mut random = fastrand::Rng::with_seed(seed);
        let plan = Plan { label: (0..requests).map(|_| random.u16(0..groups as u16)).collect(), ..Plan::default() };
        let weight = weights(routes, &vec![1; requests], &plan, groups);
        let before: Vec<u16> = (0..8).map(|at| at / 2).collect();
        let load = Problem::from_trace(&trace).unwrap().column_load;
        let cap = crate::step::expert_step::load_cap(load.iter().sum(), groups, limit);
        let after = Search::new(routes, weight.clone(), groups, &before).run(&load, cap);
        prop_assert!(cost(routes, &weight, groups, &after) <= cost(routes, &weight, groups, &before));
        let fullest = |group_of: &[u16]| {
            crate::step::load_limit::group_loads(group_of, &load, groups).into_iter().max().unwrap()
        };
        prop_assert!(fullest(&after) <= cap.max(fullest(&before)));
        prop_assert!((0..4u16).all(|group| after.iter().filter(|other| **other == group).count() == 2));
    }

    #[test]
    fn ranks_are_never_worse_than_activations(seed: u64, requests in 2usize..60, margin in 0.0..1.0) {
        let trace = random_trace((2, 8, 3), requests, seed);
        let limits = limits(4, 1.5);
        let (activations, ranks, clustering) = both(&trace, limits, margin);
        prop_assert!(ranks <= activations + 1e-6, "{ranks} > {activations}");
        let problem = Problem::from_trace(&trace).unwrap();
        let capacity = mass_capacity(problem.total_mass(), 4, margin);
        let loads = clustering.plan.loads(&problem.mass, 4);
        prop_assert!(loads.iter().zip(&capacity).all(|(load, most)| load <= most));
    }
}

#[test]
fn tiny_instances_come_close_to_brute_force() {
    let (mut reached, mut excess, mut start_excess) = (0, 0.0, 0.0);
    let cases = 40;
    for seed in 0..cases {
        let trace = random_trace((1, 6, 2), 12, seed);
        let least = optimum(&trace, 3, 0.5);
        let (activations, ranks, _) = both(&trace, limits(3, 1000.0), 0.5);
        assert!(ranks >= least - 1e-6, "{ranks} beats every placement, {least}");
        reached += u32::from(ranks < least + 1e-6);
        excess += (ranks - least) / f64::from(cases as u32);
        start_excess += (activations - least) / f64::from(cases as u32);
    }
    assert!(reached >= MIN_REACHED, "{reached} of {cases} reached, mean excess {excess:.4} (from {start_excess:.4})");
}

/// Out of forty; a local search from one start does not always reach the optimum.
const MIN_REACHED: u32 = 20;
