//! Replicas: constraints hold, they never cost locality, evaluation and tables support them, invalid numbers are
//! rejected.

use crate::common;

use crate::common::{options, planted, recorded, solve_trace};
use proptest::prelude::*;
use semmoe_solver::{EvalInput, EvalOptions, SolveError, SolveOptions, evaluate};
use semmoe_tables::{Attention, LayerIdx, TokenId};

proptest! {
    #![proptest_config(common::fixed_cases(12))]

    #[test]
    fn every_constraint_holds_and_locality_is_not_lost(
        seed: u64, purity in 0.3f64..0.95, (groups, redundant) in prop::sample::select(vec![(2u16, 2u16), (4, 4), (4, 8), (8, 8), (4, 48), (5, 4), (3, 2), (7, 5), (6, 8), (18, 2), (20, 24)]),
    ) {
        let trace = planted(4, 120, purity, seed);
        // Groups that do not divide the experts have no placement without replicas except one with empty slots.
        let pad = 16 % groups != 0 && groups <= 16;
        let plain = SolveOptions { starts: 2, pad, ..options(groups, Attention::Dp) };
        let without = if groups > 16 { None } else { Some(solve_trace(&trace, &plain).unwrap()) };
        // As many starts as without replicas: three of four become kicks.
        let with = solve_trace(&trace, &SolveOptions { redundant, starts: 8, pad: false, ..plain.clone() }).unwrap();
        let replicas = with.tables.physical_to_logical().unwrap();
        prop_assert_eq!(replicas.slots(), usize::from(16 + redundant));
        for layer in (0..3).map(LayerIdx::new) {
            prop_assert!(replicas.layer(layer).iter().all(|expert| *expert >= 0), "no slot is wasted");
        }
        let report = &with.report;
        prop_assert!(report.lar <= report.lar_bound + 1e-12, "{:?}", report);
        let figures = evaluate(&with.tables, EvalInput::Trace(&trace), &EvalOptions::default()).unwrap();
        prop_assert!((0.0..=1.0).contains(&figures.lar), "{:?}", figures);
        prop_assert!(!report.expert_load_limit_met || report.expert_load_imbalance_worst_layer <= 1.12, "{:?}", report);
        if let Some(without) = without.filter(|without| {
            report.expert_load_limit_met && without.report.expert_load_limit_met && 16 % groups == 0
        }) {
            // The bound for these holders is what the unit step reached, before requests are made whole.
            let (reached, before) = (report.lar_bound, without.report.lar_bound);
            prop_assert!(reached >= before - 1e-6, "{} after {}", reached, before);
        }
        if redundant == 48 {
            prop_assert!((report.lar - 1.0).abs() < 1e-9, "every expert is everywhere: {:?}", report);
        }
    }
}

#[test]
fn a_token_row_counts_every_rank_that_holds_its_experts() {
    let trace = planted(4, 200, 0.9, 5);
    let options = SolveOptions { prior_occurrences: 1e-6, redundant: 8, ..options(4, Attention::Dp) };
    let tables = solve_trace(&trace, &options).unwrap().tables;
    let (profile, replicas) = (common::profile_of(&trace), tables.physical_to_logical().unwrap());
    let token = TokenId::new(5);
    let mut expected = [0.0; 4];
    for layer in (0..3).map(LayerIdx::new) {
        let row = profile.row(layer, token);
        for (&expert, &count) in row.experts.iter().zip(row.counts) {
            for group in replicas.groups_of(layer, expert.into()) {
                expected[group.index()] += f64::from(count) / row.activations() as f64 / 3.0;
            }
        }
    }
    for (share, expected) in tables.token_row(token).unwrap().iter().zip(expected) {
        assert!((share.to_f64() - expected).abs() < 1e-3, "{share} {expected}");
    }
}

#[test]
fn replicas_pay_on_requests_that_were_not_used() {
    let (solve_on, judge_on) = (recorded("profile.trace.safetensors"), recorded("serve.trace.safetensors"));
    for (groups, least) in [(4, 0.47), (8, 0.30)] {
        let options = SolveOptions { threads: 2, starts: 4, redundant: 8, ..options(groups, Attention::Dp) };
        let solved = solve_trace(&solve_on, &options).unwrap();
        assert!(solved.report.expert_load_limit_met && solved.report.token_imbalance <= 1.03, "{:?}", solved.report);
        let judged = evaluate(&solved.tables, EvalInput::Trace(&judge_on), &EvalOptions::default()).unwrap();
        assert!(
            judged.bound.unwrap().lar_by_t > least && judged.batch_optimum.unwrap().request_lar > judged.lar - 0.01,
            "{judged:?}"
        );
        // More than 1 / groups: a random rank holds an expert more often.
        assert!(judged.lar_random > 1.1 / f64::from(groups), "{judged:?}");
        assert!(judged.expert_load_imbalance < 1.2, "{judged:?}");
    }
}

#[test]
fn numbers_that_leave_groups_unequal_name_those_that_do_not() {
    let trace = planted(4, 20, 0.9, 9);
    for (redundant, groups) in [(1, 4), (49, 4), (52, 4), (3, 2)] {
        let options = SolveOptions { redundant, ..options(groups, Attention::Dp) };
        let error = solve_trace(&trace, &options).unwrap_err();
        assert!(matches!(error, SolveError::RedundantDoesNotDivide { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(if groups == 4 { "[4, 8, 12" } else { "[2, 4, 6" }), "{text}");
    }
    let options = SolveOptions { redundant: 4, ..options(4, Attention::Tp) };
    let error = solve_trace(&trace, &options).unwrap_err();
    assert!(error.to_string().contains("redundant slots cannot be combined with attention tp"), "{error}");
}
