//! The objective `ranks`: fewer remote ranks than `activations`, complete solves, and its rejections.

use crate::common::{options, planted, profile_of, quiet, recorded, solve_trace};
use semmoe_solver::{
    EvalInput, EvalOptions, Objective, PaperOptions, SolveError, SolveOptions, evaluate, solve, solve_paper,
};
use semmoe_tables::Attention;

fn ranks(options: &SolveOptions) -> SolveOptions {
    SolveOptions { objective: Objective::Ranks, ..options.clone() }
}

#[test]
fn ranks_sends_tokens_to_no_more_ranks_than_activations() {
    let traces = [planted(4, 200, 0.6, 21), planted(8, 300, 0.4, 22), recorded("profile.trace.safetensors")];
    for trace in &traces {
        for attention in [Attention::Dp, Attention::Tp] {
            let activations = SolveOptions { starts: 2, threads: 2, ..options(4, attention) };
            let before = solve_trace(trace, &activations).unwrap().report;
            let after = solve_trace(trace, &ranks(&activations)).unwrap().report;
            assert!(after.remote_ranks_per_token <= before.remote_ranks_per_token, "{before:?} {after:?}");
            assert_eq!(after.objective, Objective::Ranks);
            assert!(after.lar > 0.25 && after.lar <= after.lar_bound + 1e-9, "{after:?}");
            assert!(
                after.token_imbalance <= before.token_imbalance.max(1.0 + activations.token_margin) + 1e-9,
                "{after:?}"
            );
            assert!(after.expert_load_limit_met || !before.expert_load_limit_met, "{before:?} {after:?}");
        }
    }
}

#[test]
fn the_report_counts_what_evaluate_counts() {
    // One rank has no other; with one rank per expert and top-2, a token on its own rank is sent to one other, else to
    // two.
    let trace = planted(4, 60, 0.8, 23);
    for (groups, least, most) in [(1, 0.0, 0.0), (16, 1.0, 2.0)] {
        let solved = solve_trace(&trace, &ranks(&options(groups, Attention::Dp))).unwrap();
        let found = solved.report.remote_ranks_per_token.unwrap();
        assert!((least..=most).contains(&found), "{found}");
        let judged = evaluate(&solved.tables, EvalInput::Trace(&trace), &EvalOptions::default()).unwrap();
        assert!((least..=most).contains(&judged.remote_ranks_per_token.unwrap()));
    }
    // Two experts on sixteen ranks: an activation is local or remote, so both figures agree.
    let report = solve_trace(&trace, &options(16, Attention::Dp)).unwrap().report;
    assert!((report.remote_ranks_per_token.unwrap() - 2.0 * (1.0 - report.lar)).abs() < 1e-6, "{report:?}");
}

#[test]
fn ranks_needs_a_trace_and_this_solver() {
    let trace = planted(4, 20, 0.5, 25);
    let profile = profile_of(&trace);
    for attention in [Attention::Dp, Attention::Tp] {
        let error = solve(&profile, None, &ranks(&options(4, attention)), &mut quiet).unwrap_err();
        assert!(matches!(error, SolveError::RanksNeedTrace) && error.to_string().contains("needs a trace"), "{error}");
    }
    let report = solve(&profile, None, &options(4, Attention::Dp), &mut quiet).unwrap().report;
    assert_eq!(report.remote_ranks_per_token, None);
    let paper =
        solve_paper(&profile, Some(&trace), &ranks(&options(4, Attention::Dp)), &PaperOptions::default(), &mut quiet);
    assert!(paper.unwrap_err().to_string().contains("objective"));
}
