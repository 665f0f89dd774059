//! Solving: planted clusters are found, constraints hold, results are reproducible, bad input is rejected.

use std::ops::ControlFlow;

use crate::common::{model, options, planted, profile_of, provenance, quiet, solve_trace};
use semmoe_solver::{GivenPlacement, Objective, PaperOptions, SolveError, SolveOptions, Unit, solve, solve_paper};
use semmoe_tables::{
    Attention, ExpertId, GroupId, LayerIdx, Phase, ProfileBuilder, TokenId, TraceBuilder, UNKNOWN_EXPERT,
};

/// The kinds differ in size, and must fit whole.
fn roomy(attention: Attention) -> SolveOptions {
    SolveOptions { token_margin: 0.2, expert_load_limit: 1.3, ..options(4, attention) }
}

#[test]
fn planted_clusters_are_recovered() {
    let trace = planted(4, 300, 0.95, 1);
    for trace_given in [true, false] {
        let options = roomy(Attention::Dp);
        let solved = solve(&profile_of(&trace), trace_given.then_some(&trace), &options, &mut quiet).unwrap();
        assert_eq!(solved.report.unit, if trace_given { Unit::Request } else { Unit::Token });
        // 0.95 of the activations stay, and a quarter of the rest is local by chance.
        assert!(solved.report.lar > 0.93, "{:?}", solved.report);
        assert!(solved.report.dual_gap < 0.02, "{:?}", solved.report);
        // Aligned over layers: experts of one kind lie in one group in every layer.
        let placement = solved.tables.placement();
        for topic in 0..4usize {
            let mut groups = Vec::new();
            for layer in 0..3u16 {
                let mut order: Vec<u16> = (0..16).collect();
                fastrand::Rng::with_seed(u64::from(layer)).shuffle(&mut order);
                let own = order[topic * 4..topic * 4 + 4].iter();
                groups.extend(own.map(|&e| placement.group_of(LayerIdx::new(layer), ExpertId::new(e))));
            }
            groups.dedup();
            assert_eq!(groups.len(), 1, "kind {topic}");
        }
    }
}

#[test]
fn tp_recovers_each_layer() {
    let trace = planted(4, 300, 0.95, 2);
    for trace_given in [true, false] {
        let options = roomy(Attention::Tp);
        let solved = solve(&profile_of(&trace), trace_given.then_some(&trace), &options, &mut quiet).unwrap();
        assert!(solved.report.lar > 0.93, "{:?}", solved.report);
        let tables = &solved.tables;
        let labels = tables.token_groups(LayerIdx::new(1), TokenId::new(3)).unwrap();
        assert!(labels.groups.len() == 4 && labels.probs[0].to_f64() > 0.7, "{labels:?}");
        assert!(tables.token_groups(LayerIdx::new(1), TokenId::new(39)).is_none(), "never seen");
        let rows = (0..3).flat_map(|layer| (0..16).map(move |row| (layer, row / 4, row % 4)));
        let mut labelled = rows.map(|(l, a, b)| tables.next_groups(LayerIdx::new(l), GroupId::new(a), GroupId::new(b)));
        assert!(labelled.all(|labels| labels.is_none()), "no requests were held out to try A on");
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes_whatever_the_threads() {
    let trace = planted(4, 100, 0.6, 3);
    for attention in [Attention::Dp, Attention::Tp] {
        let base = options(4, attention);
        let mut kinds = vec![
            base.clone(),
            SolveOptions { objective: Objective::Ranks, ..base.clone() },
            SolveOptions { placement: Some(GivenPlacement::Linear), ..base.clone() },
        ];
        // Replicas need attention dp.
        kinds.extend((attention == Attention::Dp).then(|| SolveOptions { redundant: 4, ..base.clone() }));
        for options in kinds {
            let digest = |threads| {
                solve_trace(&trace, &SolveOptions { threads, ..options.clone() }).unwrap().tables.digest().to_owned()
            };
            let digests = [1, 2, 5].map(digest);
            assert!(digests[0] == digests[1] && digests[0] == digests[2], "{options:?} {digests:?}");
        }
        let digest = |threads| {
            let (options, paper) = (SolveOptions { threads, ..base.clone() }, PaperOptions::default());
            let solved = solve_paper(&profile_of(&trace), Some(&trace), &options, &paper, &mut quiet).unwrap();
            solved.tables.digest().to_owned()
        };
        assert_eq!(digest(1), digest(3), "{attention}, the paper's");
    }
}

#[test]
fn constraints_hold() {
    let trace = planted(8, 400, 0.7, 4);
    for (groups, attention) in [(1, Attention::Dp), (2, Attention::Dp), (8, Attention::Dp), (4, Attention::Tp)] {
        let options = options(groups, attention);
        let solved = solve_trace(&trace, &options).unwrap();
        let report = &solved.report;
        let whole_unit = 40.0 * f64::from(groups) / report.tokens as f64;
        assert!(report.token_imbalance <= 1.0 + options.token_margin + whole_unit, "{report:?}");
        assert!(!report.expert_load_limit_met || report.expert_load_imbalance_worst_layer <= 1.1, "{report:?}");
        assert!(report.lar <= report.lar_bound + 1e-12 && report.dual_gap >= -1e-12, "{report:?}");
        assert_eq!(solved.tables.groups(), groups);
        assert_eq!(solved.tables.price().len(), usize::from(groups));
        for layer in (0..3).map(LayerIdx::new) {
            for group in 0..groups {
                let held = solved.tables.placement().experts_of(layer, group.into()).count();
                assert_eq!(held, usize::from(16 / groups));
            }
        }
    }
}

#[test]
fn a_token_table_row_is_the_expected_local_share() {
    let trace = planted(4, 200, 0.9, 5);
    let profile = profile_of(&trace);
    let options = SolveOptions { prior_occurrences: 1e-6, ..options(4, Attention::Dp) };
    let tables = solve(&profile, Some(&trace), &options, &mut quiet).unwrap().tables;
    let token = TokenId::new(5);
    let mut expected = [0.0; 4];
    for layer in (0..3).map(LayerIdx::new) {
        let row = profile.row(layer, token);
        for (&expert, &count) in row.experts.iter().zip(row.counts) {
            let group = tables.placement().group_of(layer, ExpertId::new(expert));
            expected[group.index()] += f64::from(count) / row.activations() as f64 / 3.0;
        }
    }
    let row = tables.token_row(token).unwrap();
    for (share, expected) in row.iter().zip(expected) {
        assert!((share.to_f64() - expected).abs() < 1e-3, "{row:?} {expected:?}");
    }
    let unseen = tables.token_row(TokenId::new(39)).unwrap();
    assert!(unseen.iter().all(|share| share.to_f64() == 0.25), "{unseen:?}");
}

#[test]
fn the_caller_can_stop_and_gets_the_best_so_far() {
    let trace = planted(4, 300, 0.5, 6);
    for attention in [Attention::Dp, Attention::Tp] {
        let options = SolveOptions { starts: 1000, threads: 2, ..options(4, attention) };
        let mut calls = 0;
        let solved = solve(&profile_of(&trace), Some(&trace), &options, &mut |progress| {
            calls += 1;
            assert!(progress.starts_done <= progress.starts);
            if calls < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        let report = solved.unwrap().report;
        assert!(report.stopped && report.lar > 0.25 && report.iterations < 5000, "{report:?}");
    }
}

#[test]
fn groups_that_do_not_divide_the_experts_name_those_that_do() {
    let trace = planted(4, 10, 0.9, 7);
    for groups in [0, 3, 32] {
        let error = solve_trace(&trace, &options(groups, Attention::Dp)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("do not divide 16 experts") && text.contains("[1, 2, 4, 8, 16]"), "{text}");
    }
}

#[test]
fn empty_input_is_reported() {
    let profile = ProfileBuilder::new(model(2, 4, 1, 8), provenance(), Phase::All).unwrap().finish().unwrap();
    for attention in [Attention::Dp, Attention::Tp] {
        let error = solve(&profile, None, &options(2, attention), &mut quiet).unwrap_err();
        assert!(matches!(error, SolveError::NoTokens { what: "profile" }), "{error}");
    }
    let mut unknown = TraceBuilder::new(model(2, 4, 1, 8), provenance()).unwrap();
    unknown.push(&[1, 2], 2, &[UNKNOWN_EXPERT; 4], None).unwrap();
    let error = solve_trace(&unknown.finish().unwrap(), &options(2, Attention::Dp)).unwrap_err();
    assert!(error.to_string().starts_with("the trace contains no token"), "{error}");
}

#[test]
fn another_model_is_reported() {
    let other = planted(4, 4, 0.9, 8);
    let mut renamed = other.model().clone();
    renamed.model = "another".into();
    let profile = ProfileBuilder::new(renamed, provenance(), Phase::All).unwrap().finish().unwrap();
    let error = solve(&profile, Some(&other), &options(4, Attention::Dp), &mut quiet).unwrap_err();
    assert!(error.to_string().contains("another"), "{error}");
}

#[test]
fn options_out_of_range_are_reported() {
    let trace = planted(4, 4, 0.9, 9);
    let base = options(4, Attention::Dp);
    let wrong = [
        ("starts", SolveOptions { starts: 0, ..base.clone() }),
        ("threads", SolveOptions { threads: 0, ..base.clone() }),
        ("iterations", SolveOptions { iterations: 0, ..base.clone() }),
        ("token_margin", SolveOptions { token_margin: f64::NAN, ..base.clone() }),
        ("expert_load_limit", SolveOptions { expert_load_limit: 0.9, ..base.clone() }),
        ("prior_occurrences", SolveOptions { prior_occurrences: 0.0, ..base }),
    ];
    for (name, options) in wrong {
        let error = solve_trace(&trace, &options).unwrap_err();
        assert!(matches!(error, SolveError::BadOption { option, .. } if option == name), "{error}");
    }
}

/// One token of one kind, heavier than any cap, and experts that are never active.
#[test]
fn a_single_token_profile_is_solved_and_the_split_reported() {
    let mut trace = TraceBuilder::new(model(2, 8, 1, 8), provenance()).unwrap();
    trace.push(&[3; 10], 10, &[1; 20], None).unwrap();
    let trace = trace.finish().unwrap();
    for attention in [Attention::Dp, Attention::Tp] {
        for given in [Some(&trace), None] {
            let solved = solve(&profile_of(&trace), given, &options(4, attention), &mut quiet).unwrap();
            let report = solved.report;
            assert!(report.split_units > 0 && !report.expert_load_limit_met, "{report:?}");
            assert!((report.lar - report.lar_bound).abs() < 1e-6 && report.lar >= 0.25, "{report:?}");
        }
    }
}

/// Steps compare pairs of experts: too many would exhaust memory, and no time limit would help.
#[test]
fn more_experts_than_pairs_can_be_compared_of_are_refused() {
    let model = model(3, 65_534, 1, 8);
    let mut trace = TraceBuilder::new(model, provenance()).unwrap();
    trace.push(&[1, 2], 2, &[7, 65_533, 9, 9, 7, 8], None).unwrap();
    let profile = profile_of(&trace.finish().unwrap());
    let options = options(2, Attention::Dp);
    let exact = solve(&profile, None, &options, &mut quiet);
    let paper = solve_paper(&profile, None, &options, &PaperOptions::default(), &mut quiet);
    for error in [exact.unwrap_err(), paper.unwrap_err()] {
        assert_eq!(error.to_string(), "the input has 65534 experts per layer, expected at most 4096");
    }
}
