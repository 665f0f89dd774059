//! Groups that do not divide the experts: slots stay empty, and all other guarantees hold.

use crate::common;
use std::sync::Arc;

use crate::common::{options, planted, profile_of, quiet, solve_trace};
use proptest::prelude::*;
use semmoe_solver::{
    BoundOptions, EvalInput, EvalOptions, GivenPlacement, Nodes, Objective, PaperOptions, SolveOptions, WarmStart,
    evaluate, solve_paper,
};
use semmoe_tables::export::{Eplb, sglang, vllm};
use semmoe_tables::{Attention, LayerIdx, Tables};

fn padded(groups: u16, attention: Attention) -> SolveOptions {
    SolveOptions { pad: true, expert_load_limit: 2.0, starts: 3, ..options(groups, attention) }
}

/// Checks that every expert appears once, and that `counts` accepts the number in each group.
fn check_slots(tables: &Tables, groups: u16, counts: impl Fn(usize) -> bool) {
    let slots = tables.physical_to_logical().unwrap();
    let each = usize::from(16u16.div_ceil(groups));
    assert_eq!(slots.slots(), each * usize::from(groups));
    for layer in (0..3).map(LayerIdx::new) {
        let mut experts: Vec<i32> = slots.layer(layer).iter().copied().filter(|expert| *expert >= 0).collect();
        for group in slots.layer(layer).chunks_exact(each) {
            let held = group.iter().filter(|expert| **expert >= 0).count();
            assert!(counts(held), "{group:?}");
            assert!(group[held..].iter().all(|expert| *expert == -1), "experts first: {group:?}");
        }
        experts.sort_unstable();
        assert_eq!(experts, (0..16).collect::<Vec<i32>>());
    }
}

proptest! {
    #![proptest_config(common::fixed_cases(10))]

    #[test]
    fn every_constraint_holds(
        seed: u64, dp: bool, groups in prop::sample::select(vec![3u16, 5, 6, 7, 12]), nodes: bool,
    ) {
        let attention = if dp { Attention::Dp } else { Attention::Tp };
        let trace = planted(4, 100, 0.8, seed);
        let nodes = (nodes && groups.is_multiple_of(3)).then_some(Nodes { nodes: 3, inter_cost: 4.0 });
        let options = SolveOptions { nodes, ..padded(groups, attention) };
        let with_bounds = SolveOptions { bounds: Some(BoundOptions::default()), ..options.clone() };
        let solved = solve_trace(&trace, &with_bounds).unwrap();
        let each = usize::from(16u16.div_ceil(groups));
        check_slots(&solved.tables, groups, |held| held <= each);
        let report = &solved.report;
        prop_assert_eq!(report.padding, (each * usize::from(groups) - 16) as f64);
        prop_assert_eq!(report.redundant, 0);
        prop_assert!(report.lar <= report.lar_bound + 1e-12 && report.dual_gap >= -1e-12, "{:?}", report);
        prop_assert!(report.gap.unwrap() >= -1e-9, "{:?}", report);
        prop_assert!(report.token_imbalance <= 1.02 + 40.0 * f64::from(groups) / report.tokens as f64);
        prop_assert!(!report.expert_load_limit_met || report.expert_load_imbalance_worst_layer <= 2.0, "{:?}", report);
        // At least the value of contiguous experts.
        let linear = SolveOptions { placement: Some(GivenPlacement::Linear), ..options.clone() };
        let linear = solve_trace(&trace, &linear).unwrap();
        check_slots(&linear.tables, groups, |held| held == each || held == each - 1);
        let best = |report: &semmoe_solver::SolveReport| match &report.nodes {
            Some(nodes) => -nodes.cost_per_token,
            None => report.lar,
        };
        prop_assert!(best(&solved.report) >= best(&linear.report) - 0.01, "{:?} {:?}", solved.report, linear.report);
        let again = solve_trace(&trace, &SolveOptions { threads: 3, ..options }).unwrap();
        prop_assert_eq!(again.tables.digest(), solved.tables.digest());
    }
}

#[test]
fn groups_that_divide_need_no_padding() {
    let trace = planted(4, 80, 0.8, 2);
    for attention in [Attention::Dp, Attention::Tp] {
        let with = solve_trace(&trace, &padded(4, attention)).unwrap();
        let without = solve_trace(&trace, &SolveOptions { pad: false, ..padded(4, attention) }).unwrap();
        assert_eq!(with.tables.digest(), without.tables.digest());
        assert!(with.tables.physical_to_logical().is_none());
    }
}

#[test]
fn tables_with_padding_are_judged_and_not_exported() {
    let trace = planted(4, 120, 0.9, 3);
    for attention in [Attention::Dp, Attention::Tp] {
        let solved = solve_trace(&trace, &padded(5, attention)).unwrap();
        let judged = evaluate(&solved.tables, EvalInput::Trace(&trace), &EvalOptions::default()).unwrap();
        assert!(judged.lar > 1.5 * judged.lar_random && (judged.lar_random - 0.2).abs() < 1e-9, "{judged:?}");
        for refused in [sglang(&solved.tables), vllm(&solved.tables), Eplb::new(&solved.tables).map(|_| String::new())]
        {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("-1 at layer 0") && error.contains("does not support empty slots"), "{error}");
        }
    }
}

#[test]
fn padding_stays_where_experts_stay() {
    let trace = planted(4, 120, 0.8, 4);
    let base = padded(5, Attention::Dp);
    let first = solve_trace(&trace, &base).unwrap();
    let slots = Arc::new(first.tables.physical_to_logical().unwrap().clone());
    let given = SolveOptions { placement: Some(GivenPlacement::Slots(slots)), ..base.clone() };
    let given = solve_trace(&trace, &given).unwrap();
    assert_eq!(given.tables.placement_digest(), first.tables.placement_digest());
    assert!((given.report.lar - first.report.lar).abs() < 5e-3);
    assert_eq!(given.report.padding, 4.0);
    let warm = WarmStart { tables: Arc::new(first.tables), migration_cost: 0.05 };
    let warm = solve_trace(&trace, &SolveOptions { seed: 9, warm_start: Some(warm), ..base }).unwrap();
    assert_eq!(warm.report.migration.unwrap().experts_moved, 0);
}

#[test]
fn what_does_not_go_together_is_reported() {
    let trace = planted(4, 20, 0.8, 5);
    let refused = |options: SolveOptions, part: &str| {
        let error = solve_trace(&trace, &options).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    };
    let five = padded(5, Attention::Dp);
    refused(SolveOptions { pad: false, ..five.clone() }, "[1, 2, 4, 8, 16], or padding");
    refused(padded(17, Attention::Dp), "17 groups do not divide 16 experts");
    refused(padded(0, Attention::Dp), "0 groups do not divide 16 experts");
    refused(SolveOptions { redundant: 4, ..five.clone() }, "padding cannot be combined with redundant slots");
    refused(
        SolveOptions { objective: Objective::Ranks, ..five.clone() },
        "padding cannot be combined with the objective ranks",
    );
    refused(SolveOptions { gating_groups: 4, ..five.clone() }, "padding cannot be combined with gating groups");
    let tables = Arc::new(solve_trace(&trace, &five).unwrap().tables);
    let warm = Some(WarmStart { tables, migration_cost: 0.1 });
    refused(SolveOptions { warm_start: warm, ..padded(4, Attention::Dp) }, "the warm start has 5 groups");
    let error = solve_paper(&profile_of(&trace), None, &five, &PaperOptions::default(), &mut quiet).unwrap_err();
    assert!(error.to_string().contains("padding cannot be combined with the paper's algorithm"), "{error}");
}
