//! Groups in nodes, and gating groups: node-local traffic is optimized, and gating groups stay together.

use crate::common;
use std::sync::Arc;

use crate::common::{model, options, planted, profile_of, provenance, quiet, solve_trace};
use proptest::prelude::*;
use semmoe_solver::{
    BoundOptions, EvalInput, EvalOptions, GivenPlacement, Nodes, Objective, SolveOptions, WarmStart, evaluate, solve,
};
use semmoe_tables::{Attention, LayerIdx, Placement, Trace, TraceBuilder};

fn with_nodes(nodes: u16, inter_cost: f64, groups: u16, attention: Attention) -> SolveOptions {
    let base = SolveOptions { expert_load_limit: 4.0, token_margin: 0.1, ..options(groups, attention) };
    SolveOptions { nodes: Some(Nodes { nodes, inter_cost }), ..base }
}

/// Two pairs of kinds: a token's second expert belongs to its kind's partner. Kinds and pairs are shuffled.
fn paired(requests: usize, seed: u64) -> Trace {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut order: Vec<u16> = (0..16).collect();
    fastrand::Rng::with_seed(9).shuffle(&mut order);
    let mut builder = TraceBuilder::new(model(3, 16, 2, 160), provenance()).unwrap();
    for request in 0..requests {
        let kind = request % 4;
        let tokens = random.usize(10..30);
        let ids: Vec<u32> = (0..tokens).map(|_| kind as u32 * 40 + random.u32(0..38)).collect();
        let mut routes = Vec::new();
        for _ in 0..tokens * 3 {
            let beside = if random.f64() < 0.9 { kind ^ 1 } else { random.usize(0..4) };
            let own = order[kind * 4 + random.usize(0..4)];
            let mut other = own;
            while other == own {
                other = order[beside * 4 + random.usize(0..4)];
            }
            routes.extend([own, other]);
        }
        builder.push(&ids, tokens as u32, &routes, None).unwrap();
    }
    builder.finish().unwrap()
}

#[test]
fn groups_that_work_together_share_a_node() {
    let trace = paired(120, 1);
    for attention in [Attention::Dp, Attention::Tp] {
        let options = SolveOptions { bounds: Some(BoundOptions::default()), ..with_nodes(2, 4.0, 4, attention) };
        let solved = solve_trace(&trace, &options).unwrap();
        let figures = solved.report.nodes.clone().unwrap();
        assert!(figures.node_local_rate > 0.9, "{:?}", solved.report);
        assert!((figures.inter_node_activations_per_token - 2.0 * (1.0 - figures.node_local_rate)).abs() < 1e-12);
        let (near, far) = (figures.node_local_rate - solved.report.lar, 1.0 - figures.node_local_rate);
        assert!((figures.cost_per_token - 2.0 * (near + 4.0 * far)).abs() < 1e-12, "{figures:?}");
        assert!(solved.report.lar <= solved.report.lar_bound + 1e-9, "{:?}", solved.report);
        let note = solved.report.bound_note.unwrap();
        assert!(note.contains("the bounds apply to the local rate"), "{note}");
        // `evaluate` counts the same, whether it is given the nodes or reads them from the tables.
        let input = EvalInput::Profile(&profile_of(&trace));
        let judged = evaluate(&solved.tables, input, &EvalOptions::default()).unwrap();
        let reported =
            evaluate(&solved.tables, input, &EvalOptions { nodes: Some(2), ..EvalOptions::default() }).unwrap();
        assert_eq!(judged.node_local_rate, reported.node_local_rate);
        assert!(judged.node_local_rate.unwrap() > 0.9 && judged.node_local_rate.unwrap() > judged.lar, "{judged:?}");
        for (nodes, rate) in [(1, 1.0), (4, judged.lar)] {
            let options = EvalOptions { nodes: Some(nodes), ..EvalOptions::default() };
            let judged = evaluate(&solved.tables, input, &options).unwrap();
            assert!((judged.node_local_rate.unwrap() - rate).abs() < 1e-9, "{nodes} nodes: {judged:?}");
        }
    }
}

/// A search from a few starts may end 2% above another one, so the mean of several instances is compared.
#[test]
fn nodes_cost_less_than_a_solve_that_does_not_know_them() {
    let cost = |report: &semmoe_solver::SolveReport| report.nodes.as_ref().unwrap().cost_per_token;
    for attention in [Attention::Dp, Attention::Tp] {
        let (mut with, mut without) = (0.0, 0.0);
        for seed in 0..6 {
            let trace = planted(8, 100, 0.4 + 0.08 * seed as f64, seed);
            let options = SolveOptions { starts: 3, ..with_nodes(2, 4.0, 8, attention) };
            with += cost(&solve_trace(&trace, &options).unwrap().report);
            // Units assigned to the experts' groups of a solve without nodes: the unit step is exact there, too.
            let flat = solve_trace(&trace, &SolveOptions { nodes: None, ..options.clone() }).unwrap();
            let placement = Some(GivenPlacement::Experts(Arc::new(flat.tables.placement().clone())));
            without += cost(&solve_trace(&trace, &SolveOptions { placement, ..options }).unwrap().report);
        }
        assert!(with < without, "{attention}: {with} {without}");
    }
}

proptest! {
    #![proptest_config(common::fixed_cases(10))]

    #[test]
    fn every_constraint_holds(seed: u64, dp: bool, purity in 0.3f64..0.9) {
        let attention = if dp { Attention::Dp } else { Attention::Tp };
        let trace = planted(8, 100, purity, seed);
        let options = SolveOptions { starts: 3, ..with_nodes(2, 4.0, 8, attention) };
        let solved = solve_trace(&trace, &options).unwrap();
        prop_assert!(solved.report.dual_gap >= -1e-9, "{:?}", solved.report);
        for layer in (0..3).map(LayerIdx::new) {
            for group in 0..8 {
                prop_assert_eq!(solved.tables.placement().experts_of(layer, group.into()).count(), 2);
            }
        }
        prop_assert!(solved.report.token_imbalance <= 1.1 + 40.0 * 8.0 / solved.report.tokens as f64);
        let again = solve_trace(&trace, &SolveOptions { threads: 3, ..options }).unwrap();
        prop_assert_eq!(again.tables.digest(), solved.tables.digest());
    }

    #[test]
    fn gating_groups_stay_whole(
        seed: u64, dp: bool,
        (groups, nodes, gating_groups) in prop::sample::select(vec![
            (4u16, Some(2u16), 4u16), (8, Some(2), 8), (4, None, 8), (4, None, 4), (8, None, 4), (2, None, 8), (8, Some(4), 4),
        ]),
        expert_load_limit in prop::sample::select(vec![1.1, 4.0]),
    ) {
        let attention = if dp { Attention::Dp } else { Attention::Tp };
        let trace = planted(4, 80, 0.7, seed);
        let nodes = nodes.map(|nodes| Nodes { nodes, inter_cost: 4.0 });
        let base = SolveOptions { starts: 2, expert_load_limit, ..options(groups, attention) };
        let solved = solve_trace(&trace, &SolveOptions { nodes, gating_groups, ..base }).unwrap();
        let cells = nodes.map_or(groups.min(gating_groups), |nodes| nodes.nodes);
        for layer in (0..3).map(LayerIdx::new) {
            let of_layer = solved.tables.placement().layer(layer);
            for gating in of_layer.chunks_exact(usize::from(16 / gating_groups)) {
                let cell = |group: u16| group / (groups / cells);
                prop_assert!(gating.iter().all(|&group| cell(group) == cell(gating[0])), "{:?}", gating);
            }
            // `tables permute` requires that every gating group's worth of slots is a gating group.
            if nodes.is_none() {
                let slots: Vec<u16> = (0..groups).flat_map(|group| {
                    solved.tables.placement().experts_of(layer, group.into()).map(|e| e.get()).collect::<Vec<_>>()
                }).collect();
                let each = 16 / gating_groups;
                for chunk in slots.chunks_exact(usize::from(each)) {
                    prop_assert!(chunk.iter().all(|e| e / each == chunk[0] / each), "{:?}", chunk);
                }
            }
        }
    }
}

#[test]
fn equal_costs_are_no_topology() {
    let trace = planted(4, 80, 0.8, 3);
    let alike = with_nodes(2, 1.0, 4, Attention::Dp);
    let flat = SolveOptions { nodes: None, ..alike.clone() };
    let (alike, flat) = (solve_trace(&trace, &alike).unwrap(), solve_trace(&trace, &flat).unwrap());
    assert_eq!(alike.tables.placement_digest(), flat.tables.placement_digest());
    assert!((alike.report.lar - flat.report.lar).abs() < 1e-12);
}

#[test]
fn a_warm_start_keeps_nodes() {
    let trace = paired(120, 2);
    let base = with_nodes(2, 4.0, 4, Attention::Dp);
    let tables = Arc::new(solve_trace(&trace, &base).unwrap().tables);
    let warm = SolveOptions { seed: 5, warm_start: Some(WarmStart { tables, migration_cost: 0.05 }), ..base };
    let report = solve_trace(&trace, &warm).unwrap().report;
    assert_eq!(report.migration.unwrap().experts_moved, 0);
}

#[test]
fn what_does_not_fit_is_reported() {
    let trace = planted(4, 20, 0.8, 7);
    let refused = |options: SolveOptions, part: &str| {
        let error = solve(&profile_of(&trace), Some(&trace), &options, &mut quiet).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    };
    let two = with_nodes(2, 4.0, 4, Attention::Dp);
    refused(
        with_nodes(3, 4.0, 4, Attention::Dp),
        "3 nodes cannot be divided evenly over 4 groups, expected one of [1, 2, 4]",
    );
    refused(with_nodes(0, 4.0, 4, Attention::Dp), "0 nodes");
    refused(with_nodes(2, 0.5, 4, Attention::Dp), "`inter_cost` is 0.5, expected a number from 1");
    refused(with_nodes(2, f64::NAN, 4, Attention::Dp), "`inter_cost` is NaN");
    refused(SolveOptions { redundant: 4, ..two.clone() }, "a number of nodes cannot be combined with redundant slots");
    refused(SolveOptions { objective: Objective::Ranks, ..two.clone() }, "the objective ranks");
    let gated = |gating_groups| SolveOptions { gating_groups, ..options(4, Attention::Dp) };
    refused(
        gated(3),
        "3 gating groups cannot be divided evenly over 16 experts and 4 groups, expected one of [1, 2, 4, 8]",
    );
    refused(gated(16), "16 gating groups");
    let four = SolveOptions { nodes: Some(Nodes { nodes: 4, inter_cost: 4.0 }), ..gated(2) };
    refused(four, "2 gating groups cannot be divided evenly over 16 experts and 4 nodes, expected one of [4, 8]");
    refused(SolveOptions { redundant: 4, ..gated(4) }, "gating groups cannot be combined with redundant slots");
    refused(
        SolveOptions { placement: Some(GivenPlacement::Linear), ..gated(4) },
        "a given placement cannot be combined with gating",
    );
    let robin: Vec<u16> = (0..16).map(|expert| expert % 4).collect();
    let robin = Arc::new(Placement::new(4, vec![robin; 3]).unwrap());
    let given = SolveOptions { placement: Some(GivenPlacement::Experts(robin)), ..options(4, Attention::Dp) };
    let tables = Arc::new(solve_trace(&trace, &given).unwrap().tables);
    let warm =
        SolveOptions { warm_start: Some(WarmStart { tables: Arc::clone(&tables), migration_cost: 0.1 }), ..gated(4) };
    refused(warm, "cannot be combined with gating groups: the tables split up gating groups");
    let error = evaluate(&tables, EvalInput::Trace(&trace), &EvalOptions { nodes: Some(3), ..EvalOptions::default() });
    assert!(error.unwrap_err().to_string().contains("3 nodes"));
}
