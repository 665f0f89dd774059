#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;

use proptest::prelude::*;
use semmoe_tables::{ModelInfo, Phase, Profile, ProfileBuilder, Trace, TraceBuilder, UNKNOWN_EXPERT};

use super::Split;
use crate::fixtures::{self, provenance};

fn model() -> ModelInfo {
    fixtures::model(1, 4, 2, 50)
}

/// Prompts of one to three of 50 tokens, so some are equal, each followed by a decoded token.
fn trace(requests: usize, seed: u64) -> Trace {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut trace = TraceBuilder::new(model(), provenance()).unwrap();
    for _ in 0..requests {
        let ids: Vec<u32> = (0..random.usize(2..5)).map(|_| random.u32(0..50)).collect();
        let route = |_: &u32| match random.u16(0..8) {
            0 => [UNKNOWN_EXPERT; 2],
            other => [other % 4, (other + 1) % 4],
        };
        let experts: Vec<u16> = ids.iter().flat_map(route).collect();
        trace.push(&ids, ids.len() as u32 - 1, &experts, None).unwrap();
    }
    trace.finish().unwrap()
}

fn profile(traces: &[&Trace], phase: Phase) -> Profile {
    let mut builder = ProfileBuilder::new(model(), provenance(), phase).unwrap();
    traces.iter().for_each(|trace| builder.add_trace(trace).unwrap());
    builder.finish().unwrap()
}

fn prompts(trace: &Trace) -> BTreeSet<Vec<u32>> {
    trace.iter().map(|request| request.token_ids()[..request.prompt_len()].to_vec()).collect()
}

proptest! {
    #[test]
    fn parts_are_disjoint_and_their_counts_leave_the_profile(
        seed: u64, other: u64, share in 0.2f64..=0.5, phase in prop_oneof![Just(Phase::All), Just(Phase::Prefill), Just(Phase::Decode)]
    ) {
        let (trace, more) = (trace(300, seed), trace(20, other));
        let whole = profile(&[&trace, &more], phase);
        let split = Split::new(&whole, Some(&trace), share).unwrap();
        let parts = [&split.solve, &split.choose, &split.judge];
        prop_assert_eq!(parts.iter().map(|part| part.requests()).sum::<usize>(), 300);
        for (one, other) in [(0, 1), (0, 2), (1, 2)] {
            prop_assert!(prompts(parts[one]).is_disjoint(&prompts(parts[other])));
        }
        let held = (split.choose.requests() + split.judge.requests()) as f64;
        prop_assert!((held - 300.0 * share).abs() < 75.0, "{} of 300 at {}", held, share);
        let rest = split.profile.as_ref().unwrap();
        prop_assert_eq!(rest.digest(), profile(&[&split.solve, &more], phase).digest());
        prop_assert_eq!(split.judge_counts.digest(), profile(&[&split.judge], phase).digest());
    }

    #[test]
    fn a_request_is_on_its_side_whatever_comes_with_it(seed: u64) {
        let (all, profile) = (trace(300, seed), profile(&[], Phase::All));
        let half = TraceBuilder::select(&all, |number, _| number % 2 == 0).unwrap();
        let side = |trace: &Trace| prompts(&Split::new(&profile, Some(trace), 0.3).unwrap().judge);
        prop_assert!(side(&half).is_subset(&side(&all)));
    }
}

#[test]
fn what_is_no_part_stays_and_what_is_too_little_is_reported() {
    let (one, other) = (trace(300, 1), trace(300, 2));
    let split = Split::new(&profile(&[&other], Phase::All), Some(&one), 0.3).unwrap();
    assert!(split.profile.is_none());
    let reason = |trace: Option<&Trace>, share: f64| {
        Split::new(&profile(&[&one], Phase::All), trace, share).unwrap_err().to_string()
    };
    assert_eq!(reason(Some(&one), 0.0), "no requests were held out");
    assert!(reason(None, 0.3).contains("has no requests"));
    assert!(reason(Some(&one), 0.001).contains("0 to evaluate on"));
    let mut silent = TraceBuilder::new(model(), provenance()).unwrap();
    (0..300).for_each(|token| silent.push(&[token % 50], 1, &[UNKNOWN_EXPERT; 2], None).unwrap());
    assert!(reason(Some(&silent.finish().unwrap()), 0.5).contains("0 to evaluate on"));
}
