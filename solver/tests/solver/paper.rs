//! Algorithm 1 as a baseline: better than chance, worse than the exact steps, reproducible.

use std::ops::ControlFlow;

use crate::common::{options, planted, profile_of, quiet};
use semmoe_solver::{
    EvalInput, EvalOptions, PaperCap, PaperOptions, SolveError, SolveOptions, TokenAssigner, evaluate, solve,
    solve_paper,
};
use semmoe_tables::{Attention, GroupId, LayerIdx, TokenId};

#[test]
fn planted_clusters_are_better_than_chance_and_no_better_than_exact_steps() {
    let trace = planted(4, 300, 0.9, 1);
    let profile = profile_of(&trace);
    for (attention, given) in [(Attention::Dp, Some(&trace)), (Attention::Dp, None), (Attention::Tp, None)] {
        let options = SolveOptions { token_margin: 0.2, expert_load_limit: 1.3, ..options(4, attention) };
        let paper = PaperOptions { cap: PaperCap::Tokens, ..PaperOptions::default() };
        let found = solve_paper(&profile, given, &options, &paper, &mut quiet).unwrap();
        let exact = solve(&profile, given, &options, &mut quiet).unwrap();
        assert!(found.report.lar > 0.5, "twice as good as chance: {:?}", found.report);
        assert!(found.report.lar <= found.report.lar_bound + 1e-12, "{:?}", found.report);
        assert!(found.report.lar <= exact.report.lar + 0.01, "{} {}", found.report.lar, exact.report.lar);
        assert!(found.tables.solver().contains("algorithm=paper"));
        let input = given.map_or(EvalInput::Profile(&profile), EvalInput::Trace);
        let judged = evaluate(&found.tables, input, &EvalOptions::default()).unwrap();
        assert!(judged.lar > 0.4, "{judged:?}");
    }
}

#[test]
fn the_tables_labels_are_the_algorithms_own() {
    let trace = planted(4, 200, 0.8, 2);
    let profile = profile_of(&trace);
    let solved = solve_paper(&profile, None, &options(4, Attention::Tp), &PaperOptions::default(), &mut quiet).unwrap();
    let judged = evaluate(&solved.tables, EvalInput::Profile(&profile), &EvalOptions::default()).unwrap();
    assert!((judged.lar - solved.report.lar).abs() < 1e-9, "{} {}", judged.lar, solved.report.lar);
    let labels = solved.tables.token_groups(LayerIdx::new(0), TokenId::new(1)).unwrap();
    assert_eq!(labels.groups.len(), 1, "one label, not a distribution");
}

/// With one label each, the rule of workers is Algorithm 3's: whichever of T and A is more confident. Only ties
/// differ, which are rare.
#[test]
fn with_a_trace_the_tables_have_the_papers_a_and_go_by_the_more_confident_table() {
    let (trace, other) = (planted(4, 300, 0.7, 2), planted(4, 200, 0.7, 3));
    let (profile, options) = (profile_of(&trace), options(4, Attention::Tp));
    let solved = solve_paper(&profile, Some(&trace), &options, &PaperOptions::default(), &mut quiet).unwrap();
    let groups: Vec<GroupId> = (0..4).map(GroupId::new).collect();
    let rows = groups.iter().flat_map(|older| groups.iter().map(move |newer| (*older, *newer)));
    let labels: Vec<_> =
        rows.filter_map(|(older, newer)| solved.tables.next_groups(LayerIdx::new(2), older, newer)).collect();
    assert!(labels.len() > 8 && labels.iter().all(|labels| labels.groups.len() == 1), "{labels:?}");
    assert!(solved.tables.next_groups(LayerIdx::new(1), groups[0], groups[0]).is_none(), "two layers before");
    let judged = evaluate(&solved.tables, EvalInput::Trace(&other), &EvalOptions::default()).unwrap();
    let (lar, printed) = (judged.lar, judged.lar_paper_rule.unwrap());
    assert!((lar - printed).abs() < 0.002 && (printed - judged.lar_t_only.unwrap()).abs() > 1e-6, "{judged:?}");
}

#[test]
fn the_caller_can_stop() {
    let trace = planted(4, 100, 0.6, 4);
    let profile = profile_of(&trace);
    let options = options(4, Attention::Tp);
    let solved = solve_paper(&profile, None, &options, &PaperOptions::default(), &mut |_| ControlFlow::Break(()));
    let report = solved.unwrap().report;
    assert!(report.stopped && report.iterations == 3, "one round of each layer: {report:?}");
}

#[test]
fn bad_options_are_reported() {
    let trace = planted(4, 20, 0.6, 5);
    let profile = profile_of(&trace);
    let wrong = [
        ("steps", PaperOptions { steps: 0, ..PaperOptions::default() }),
        ("gamma_e", PaperOptions { gamma_e: f64::NAN, ..PaperOptions::default() }),
        ("alpha_r", PaperOptions { alpha_r: -1.0, ..PaperOptions::default() }),
    ];
    for (name, paper) in wrong {
        let error = solve_paper(&profile, None, &options(4, Attention::Dp), &paper, &mut quiet).unwrap_err();
        assert!(matches!(error, SolveError::BadOption { option, .. } if option == name), "{error}");
    }
    let error = solve_paper(&profile, None, &options(3, Attention::Dp), &PaperOptions::default(), &mut quiet);
    assert!(matches!(error.unwrap_err(), SolveError::GroupsDoNotDivide { .. }));
}

#[test]
fn tokens_are_assigned_within_the_margin() {
    let trace = planted(4, 300, 0.9, 6);
    let profile = profile_of(&trace);
    let solved = solve(&profile, None, &options(4, Attention::Tp), &mut quiet).unwrap();
    let options = SolveOptions { token_margin: 0.05, ..options(4, Attention::Tp) };
    let assigner = TokenAssigner::new(&profile, &options).unwrap();
    let plan = assigner.assign(solved.tables.placement()).unwrap();
    for layer in (0..3).map(LayerIdx::new) {
        let mut loads = [0.0; 4];
        for token in (0..160).map(TokenId::new) {
            let shares = plan.shares(layer, token);
            assert_eq!(shares.is_empty(), profile.token_count(token) == 0);
            for (group, share) in shares {
                loads[group.index()] += share * profile.token_count(token) as f64;
            }
        }
        let mean = profile.total_tokens() as f64 / 4.0;
        assert!(loads.iter().all(|&load| load <= 1.05 * mean + 1.0), "{loads:?} {mean}");
    }
    let other = semmoe_tables::Placement::contiguous(1, 16, 4).unwrap();
    assert!(matches!(assigner.assign(&other), Err(SolveError::BadOption { option: "placement", .. })));
}
