//! Splitting and showing, from files.

use std::collections::BTreeSet;
use std::path::PathBuf;

use proptest::prelude::*;
use semmoe_profiler::show::{HeldOutKind, Input, Study, study};
use semmoe_profiler::{BuildOptions, Grade, HoldOut, NoProgress, Summary, build, show, split};
use semmoe_tables::{ModelInfo, Provenance, Trace, TraceBuilder, UNKNOWN_EXPERT};

use crate::common;

const CREATED: &str = "2026-01-02T03:04:05Z";

fn model(vocab_size: u32) -> ModelInfo {
    common::model(4, 1, vocab_size, &[0, 2])
}

/// Token t activates expert t % 4, then (t / 4) % 4; the first half is the prompt.
fn trace(vocab_size: u32, requests: &[Vec<u32>]) -> Trace {
    let provenance = Provenance { source: "test".into(), created: CREATED.into() };
    let mut builder = TraceBuilder::new(model(vocab_size), provenance).unwrap();
    for tokens in requests {
        let experts: Vec<u16> = tokens.iter().flat_map(|&t| [(t % 4) as u16, (t / 4 % 4) as u16]).collect();
        builder.push(tokens, tokens.len() as u32 / 2, &experts, None).unwrap();
    }
    builder.finish().unwrap()
}

struct Files(tempfile::TempDir);

impl Files {
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn trace(&self, name: &str, vocab_size: u32, requests: &[Vec<u32>]) -> PathBuf {
        trace(vocab_size, requests).write(&self.path(name)).unwrap();
        self.path(name)
    }
}

#[test]
fn summaries() {
    let files = Files(tempfile::tempdir().unwrap());
    let path = files.trace("t", 16, &[vec![0, 1, 2, 3], vec![0, 0, 0, 0]]);
    build(&BuildOptions::new(vec![path.clone().into()], files.path("p")), &NoProgress).unwrap();
    let of_trace = show(&path).unwrap();
    let of_profile = show(&files.path("p")).unwrap();
    assert_eq!((of_trace.kind, of_trace.requests, of_trace.prompt_tokens), ("trace", Some(2), Some(4)));
    assert_eq!((of_profile.kind, of_profile.phase.as_deref()), ("profile", Some("all")));
    for Summary { tokens, distinct_tokens, coverage, layers, .. } in [&of_trace, &of_profile] {
        assert_eq!((*tokens, *distinct_tokens, *coverage), (8, 4, 0.25));
        // Expert 0 has 5 of 8 in layer 0, all of them in layer 2.
        assert_eq!((layers[0].busiest.0.get(), layers[0].busiest.1, layers[0].max_over_mean), (0, 0.625, 2.5));
        let entropy = -(0.625f64 * 0.625f64.log(4.0) + 3.0 * 0.125 * 0.125f64.log(4.0));
        assert!((layers[0].entropy - entropy).abs() < 1e-12);
        assert_eq!((layers[1].layer_id, layers[1].max_over_mean, layers[1].entropy), (2, 4.0, 0.0));
    }
    let text = of_trace.to_string();
    assert!(text.starts_with("trace of mock: 2 MoE layers, 4 experts, top-1\n"), "{text}");
    assert!(text.contains("tokens    8, 4 of them prompt, 8 with a route"), "{text}");
    assert!(text.contains("coverage  4 of 16 token ids (25.0%)"), "{text}");
    assert!(show(&files.path("absent")).is_err());
    std::fs::write(files.path("junk"), "{}").unwrap();
    assert!(show(&files.path("junk")).is_err());
}

#[test]
fn a_summary_counts_only_known_routes() {
    let mut builder =
        TraceBuilder::new(model(16), Provenance { source: String::new(), created: String::new() }).unwrap();
    builder.push(&[1, 2], 2, &[0, 1, UNKNOWN_EXPERT, UNKNOWN_EXPERT], None).unwrap();
    let summary = Summary::of_trace(&builder.finish().unwrap()).unwrap();
    assert_eq!((summary.tokens, summary.routed_tokens, summary.distinct_tokens), (2, 1, 1));
}

proptest! {
    #[test]
    fn splits_depend_on_the_prompt_alone(
        requests in proptest::collection::vec(proptest::collection::vec(0u32..16, 2..6), 1..40),
        hold_out in 0.0f64..=1.0,
        shuffle: u64,
    ) {
        let prompts = |trace: &Trace| -> BTreeSet<Vec<u32>> {
            trace.iter().map(|r| r.token_ids()[..r.prompt_len()].to_vec()).collect()
        };
        let (solve, judge) = split(&trace(16, &requests), hold_out).unwrap();
        prop_assert_eq!(solve.requests() + judge.requests(), requests.len());
        prop_assert!(prompts(&solve).is_disjoint(&prompts(&judge)));
        let mut other = requests.clone();
        other.rotate_left(shuffle as usize % requests.len());
        other.push(vec![15; 9]);
        let (solve_again, judge_again) = split(&trace(16, &other), hold_out).unwrap();
        prop_assert!(prompts(&solve).is_subset(&prompts(&solve_again)));
        prop_assert!(prompts(&judge).is_subset(&prompts(&judge_again)));
    }
}

#[test]
fn splits_have_about_the_share_asked_for() {
    let requests: Vec<Vec<u32>> = (0..4000).map(|i| vec![i, 0]).collect();
    let trace = trace(4000, &requests);
    for hold_out in [0.0, 0.2, 0.5, 1.0] {
        let (_, judge) = split(&trace, hold_out).unwrap();
        let share = judge.requests() as f64 / 4000.0;
        assert!((share - hold_out).abs() < 0.03, "{share} for {hold_out}");
    }
    assert!(split(&trace, 1.1).is_err() && split(&trace, f64::NAN).is_err());
}

/// 600 different prompts of tokens that determine their experts.
fn prompts() -> Vec<Vec<u32>> {
    let digits = |request: u32| [request % 16, request / 16 % 16, request / 256];
    (0..600).map(|request| [&digits(request)[..], &[1, 2, 3, 4, 5, 6, 7, 8, 9]].concat()).collect()
}

fn studied(path: &std::path::Path) -> Study {
    study(&Input::open(path).unwrap(), None).unwrap()
}

/// As in the documentation: a part is held out, studied, and split again.
#[test]
fn parts_of_a_hold_out_are_studied_and_divided_again() {
    let files = Files(tempfile::tempdir().unwrap());
    let all = files.trace("all", 16, &prompts());
    let hold_out = |from: &std::path::Path, name: &str, share: f64| {
        let (judge, solve) = (files.path(&format!("{name}.judge")), files.path(&format!("{name}.solve")));
        let options = BuildOptions {
            hold_out: Some(HoldOut { share, out: judge.clone() }),
            solve_trace: Some(solve.clone()),
            ..BuildOptions::new(vec![from.to_path_buf().into()], files.path("p"))
        };
        let report = build(&options, &NoProgress).unwrap();
        let of = (report.requests + report.held_out) as f64;
        assert!((report.held_out as f64 / of - share).abs() < 0.1, "{name}: {} of {of}", report.held_out);
        [judge, solve]
    };
    let mut parts = vec![all];
    for (round, share) in [0.2, 0.5, 0.3].into_iter().enumerate() {
        let halves = parts.iter().enumerate().flat_map(|(at, part)| hold_out(part, &format!("{round}.{at}"), share));
        let halves: Vec<PathBuf> = halves.collect();
        for half in &halves {
            let study = studied(half);
            assert_eq!((study.held_out, study.prediction()), (HeldOutKind::Requests, Some(1.0)), "{}", half.display());
            assert_eq!(study.verdict("t").grade, Grade::Good);
        }
        // Split one part of each round again: the smallest stays large enough.
        parts = if round == 0 { halves } else { halves[..1].to_vec() };
    }
}

#[test]
fn what_cannot_be_judged_is_not_called_a_poor_model() {
    let files = Files(tempfile::tempdir().unwrap());
    // One prompt many times: the requests cannot be halved, but the counts can.
    let often = studied(&files.trace("often", 16, &vec![vec![1, 2, 3, 4]; 40]));
    assert_eq!(
        (often.held_out, often.prediction(), often.verdict("t").grade),
        (HeldOutKind::Counts, Some(1.0), Grade::Good)
    );
    for (name, requests) in [("one", vec![vec![1, 2, 3, 4]]), ("none", vec![])] {
        let study = studied(&files.trace(name, 16, &requests));
        let verdict = study.verdict("t");
        assert_eq!(study.prediction(), None, "{name}");
        assert!(verdict.text.starts_with("There is too little data to judge this model"), "{}", verdict.text);
        assert!(verdict.next.contains("record") && !study.to_string().contains("NaN"), "{}", study);
    }
}
