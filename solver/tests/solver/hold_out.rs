//! Held-out requests: what is chosen with them, and what the report says about them.

use crate::common::{model, options, planted, profile_of, provenance, quiet, solve_trace};
use semmoe_solver::{
    EvalInput, EvalOptions, PaperOptions, ProfilePart, Reliability, SolveError, SolveOptions, Solved, evaluate, solve,
    solve_paper,
};
use semmoe_tables::{Attention, GroupId, LayerIdx, Trace, TraceBuilder};

fn held(attention: Attention) -> SolveOptions {
    SolveOptions { hold_out: 0.3, ..options(4, attention) }
}

/// Requests of 20 tokens from a vocabulary of `words`, over three layers of four experts, one of them active.
fn routed(requests: usize, words: u32, route: impl Fn(u32, &mut fastrand::Rng) -> [u16; 3]) -> Trace {
    let mut random = fastrand::Rng::with_seed(7);
    let mut trace = TraceBuilder::new(model(3, 4, 1, words), provenance()).unwrap();
    for _ in 0..requests {
        let ids: Vec<u32> = (0..20).map(|_| random.u32(0..words)).collect();
        let experts: Vec<u16> = ids.iter().flat_map(|&token| route(token, &mut random)).collect();
        trace.push(&ids, 20, &experts, None).unwrap();
    }
    trace.finish().unwrap()
}

/// Rows of A in a layer.
fn rows_of_a(solved: &Solved, layer: u16) -> usize {
    let pairs = (0..16).map(|pair| (GroupId::new(pair / 4), GroupId::new(pair % 4)));
    pairs.filter(|&(older, newer)| solved.tables.next_groups(LayerIdx::new(layer), older, newer).is_some()).count()
}

#[test]
fn the_report_has_the_figures_of_the_tables_on_requests_that_they_did_not_see() {
    let trace = planted(4, 300, 0.8, 1);
    for attention in [Attention::Dp, Attention::Tp] {
        let solved = solve_trace(&trace, &held(attention)).unwrap();
        let held_out = &solved.report.held_out;
        let (choosing, judged) = (held_out.requests_choosing, held_out.requests_judged);
        assert_eq!(held_out.requests_solved + choosing + judged, 300, "{held_out:?}");
        assert!((60..=120).contains(&(choosing + judged)) && choosing > 20 && judged > 20, "{held_out:?}");
        assert_eq!((held_out.share, held_out.profile), (0.3, Some(ProfilePart::TakenOut)));
        assert!(
            held_out.note.contains(&format!("{} of 300 requests were held out", choosing + judged)),
            "{held_out:?}"
        );
        let figures = held_out.figures.as_ref().unwrap();
        assert!(solved.report.tokens + figures.tokens < profile_of(&trace).total_tokens(), "three parts");
        assert!(figures.lar > 0.6, "{figures:?}");
        assert_eq!(figures.batch_optimum.is_some(), attention == Attention::Dp);
        assert_eq!(figures.lar_t_only.is_some(), attention == Attention::Tp);
        assert_eq!(held_out.transitions.len(), if attention == Attention::Tp { 3 } else { 0 });
        let json = serde_json::to_value(&solved.report).unwrap();
        assert_eq!(json["held_out"]["profile"], "taken_out", "{json}");
        assert!(json["held_out"]["figures"]["calibration"]["tokens"]["bins"][0]["observed"].is_f64(), "{json}");
        // Reproducible with any number of threads.
        let again = solve_trace(&trace, &SolveOptions { threads: 3, ..held(attention) }).unwrap();
        assert_eq!(solved.tables.digest(), again.tables.digest());
        assert_eq!(json["held_out"], serde_json::to_value(&again.report).unwrap()["held_out"]);
    }
}

#[test]
fn what_the_profile_does_not_contain_is_not_taken_out_of_it() {
    let (trace, other) = (planted(4, 300, 0.8, 1), planted(4, 300, 0.8, 2));
    for attention in [Attention::Dp, Attention::Tp] {
        let solved = solve(&profile_of(&other), Some(&trace), &held(attention), &mut quiet).unwrap();
        let held_out = &solved.report.held_out;
        assert_eq!(held_out.profile, Some(ProfilePart::NotPart));
        assert!(held_out.note.contains("does not contain") && held_out.figures.is_some(), "{held_out:?}");
        if attention == Attention::Tp {
            assert_eq!(solved.report.tokens, profile_of(&other).total_tokens());
        }
    }
}

#[test]
fn nothing_is_held_out_where_it_cannot_be_or_is_not_asked_for() {
    let trace = planted(4, 300, 0.8, 1);
    let few = planted(4, 12, 0.8, 1);
    for attention in [Attention::Dp, Attention::Tp] {
        let cases = [
            (solve_trace(&trace, &options(4, attention)), "no requests were held out"),
            (solve(&profile_of(&trace), None, &held(attention), &mut quiet), "without a trace has no requests"),
            (solve_trace(&few, &held(attention)), "the 12 requests"),
        ];
        for (solved, said) in cases {
            let solved = solved.unwrap();
            let held_out = &solved.report.held_out;
            assert!(held_out.note.contains(said), "{held_out:?}");
            assert!(held_out.figures.is_none() && held_out.prior.is_none() && held_out.requests_judged == 0);
        }
        let as_before = solve_trace(&few, &options(4, attention)).unwrap();
        assert_eq!(solve_trace(&few, &held(attention)).unwrap().tables.digest(), as_before.tables.digest());
    }
    for wrong in [-0.1, 0.6, f64::NAN] {
        let options = SolveOptions { hold_out: wrong, ..options(4, Attention::Dp) };
        let error = solve_trace(&trace, &options).unwrap_err();
        assert!(matches!(error, SolveError::BadOption { option: "hold_out", .. }), "{error}");
    }
}

#[test]
fn the_paper_is_judged_alike_and_has_its_own_a() {
    let trace = planted(4, 200, 0.8, 3);
    for attention in [Attention::Dp, Attention::Tp] {
        let paper = PaperOptions { steps: 3, swap_steps: 50, ..PaperOptions::default() };
        let solved = solve_paper(&profile_of(&trace), Some(&trace), &held(attention), &paper, &mut quiet).unwrap();
        assert!(solved.report.held_out.figures.as_ref().unwrap().lar > 0.3, "{:?}", solved.report);
        assert_eq!(rows_of_a(&solved, 2), if attention == Attention::Tp { 16 } else { 0 });
    }
}

#[test]
fn a_is_kept_where_the_groups_before_decide() {
    // The first two layers' experts are random, the third's are their sum: the token carries no information.
    let trace = routed(300, 8, |_, random| {
        let (first, second) = (random.u16(0..4), random.u16(0..4));
        [first, second, (first + second) % 4]
    });
    let solved = solve_trace(&trace, &held(Attention::Tp)).unwrap();
    let layers = &solved.report.held_out.transitions;
    assert!(layers[2].kept && layers[2].lar_t_and_a.unwrap() > 0.99 && layers[2].lar_t.unwrap() < 0.4, "{layers:?}");
    assert!(layers[0].lar_t_and_a.is_none() && !layers[0].kept && !layers[1].kept, "{layers:?}");
    assert_eq!([0, 1, 2].map(|layer| rows_of_a(&solved, layer)), [0, 0, 16]);

    let judged = evaluate(&solved.tables, EvalInput::Trace(&trace), &EvalOptions::default()).unwrap();
    assert!(judged.lar_per_layer[2].unwrap() > 0.99, "{judged:?}");
    assert!(judged.lar > judged.lar_t_only.unwrap() + 0.2, "{judged:?}");
    // Counts do not reveal the previous groups.
    let judged = evaluate(&solved.tables, EvalInput::Profile(&profile_of(&trace)), &EvalOptions::default()).unwrap();
    assert_eq!(Some(judged.lar), judged.lar_t_only);
}

#[test]
fn a_is_left_out_where_the_token_decides() {
    let trace = routed(300, 8, |token, _| [token as u16 % 4, token as u16 / 2, (token as u16 + 1) % 4]);
    let solved = solve_trace(&trace, &held(Attention::Tp)).unwrap();
    let layers = &solved.report.held_out.transitions;
    assert!(layers.iter().all(|layer| !layer.kept && layer.lar_t == Some(1.0)), "{layers:?}");
    assert_eq!(rows_of_a(&solved, 2), 0);
}

#[test]
fn the_prior_is_as_strong_as_tokens_are_weak() {
    // Each of 4,000 tokens is seen about once or twice.
    let chance = routed(300, 4000, |_, random| [0; 3].map(|_: u16| random.u16(0..4)));
    let certain = routed(300, 4000, |token, _| [token as u16 % 4; 3]);
    for attention in [Attention::Dp, Attention::Tp] {
        for (trace, best) in [(&chance, 32.0), (&certain, 0.125)] {
            let solved = solve_trace(trace, &held(attention)).unwrap();
            let prior = solved.report.held_out.prior.unwrap();
            assert!(prior.kept && prior.before == 2.0 && prior.best == best, "{prior:?}");
            assert!(prior.log_loss_best < prior.log_loss_before, "{prior:?}");
            assert!(
                solved.tables.solver().contains(&format!("prior_occurrences={best} ")),
                "{}",
                solved.tables.solver()
            );
            let figures = solved.report.held_out.figures.unwrap();
            let error = figures.calibration.tokens.unwrap().expected_calibration_error;
            assert!(error < 0.1, "{error} at {best}");
        }
    }
}

#[test]
fn a_curve_compares_what_was_expected_with_what_came() {
    // T says that every token stays in its group; half of the occurrences do.
    let promised = routed(100, 8, |token, _| [token as u16 % 4; 3]);
    let kept = routed(100, 8, |token, random| [0; 3].map(|_: u16| (token as u16 + 2 * random.u16(0..2)) % 4));
    for attention in [Attention::Dp, Attention::Tp] {
        let options = SolveOptions { prior_occurrences: 0.001, ..options(4, attention) };
        let tables = solve_trace(&promised, &options).unwrap().tables;
        let curve = |trace: &Trace| -> Reliability {
            let judged = evaluate(&tables, EvalInput::Trace(trace), &EvalOptions::default()).unwrap();
            judged.calibration.tokens.unwrap()
        };
        let (true_to_it, half) = (curve(&promised), curve(&kept));
        assert!(true_to_it.expected_calibration_error < 0.01, "{true_to_it:?}");
        assert_eq!(half.bins.len(), 1, "{half:?}");
        let bin = &half.bins[0];
        assert!(bin.from > 0.89 && bin.predicted > 0.99 && (bin.observed - 0.5).abs() < 0.05, "{bin:?}");
        assert!((half.expected_calibration_error - (bin.predicted - bin.observed)).abs() < 1e-9, "{half:?}");
        assert_eq!(half.count, if attention == Attention::Dp { 2000 } else { 6000 });
        let profile = profile_of(&kept);
        let by_counts = evaluate(&tables, EvalInput::Profile(&profile), &EvalOptions::default()).unwrap();
        let by_counts = by_counts.calibration.tokens.unwrap();
        assert_eq!((by_counts.count, by_counts.bins.len()), (half.count, 1), "{by_counts:?}");
        assert!((by_counts.bins[0].observed - bin.observed).abs() < 1e-9, "{by_counts:?}");
    }
}
