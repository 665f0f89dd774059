//! T with the strings of a tokenizer: rare and unseen tokens get the shares of similarly spelled tokens.

use std::path::Path;
use std::sync::Arc;

use crate::common::{model, options, profile_of, provenance, quiet, recorded, solve_trace};
use semmoe_solver::{EvalInput, EvalOptions, SolveError, SolveOptions, TokenStrings, evaluate, solve};
use semmoe_tables::{Attention, LayerIdx, Profile, TokenId, TraceBuilder};
use semmoe_text::Tokenizer;

fn strings(list: &[&str]) -> Option<Arc<TokenStrings>> {
    Some(Arc::new(TokenStrings::new(list.iter().map(|&string| string.to_owned()).collect(), None)))
}

/// Two kinds of words on two kinds of experts; tokens 2, 5 and 6 never occur.
const WORDS: [&str; 7] = ["walk", "walked", "walking", "gene", "genes", "genetic", ""];

fn two_kinds() -> Profile {
    let mut builder = TraceBuilder::new(model(2, 4, 2, WORDS.len() as u32), provenance()).unwrap();
    let (first, second) = ([0u16, 1, 0, 1], [2u16, 3, 2, 3]);
    for _ in 0..20 {
        builder.push(&[0, 1, 3, 4], 4, &[first, first, second, second].concat(), None).unwrap();
    }
    profile_of(&builder.finish().unwrap())
}

#[test]
fn unseen_tokens_go_where_similar_ones_go() {
    let profile = two_kinds();
    for attention in [Attention::Dp, Attention::Tp] {
        let options = SolveOptions { token_strings: strings(&WORDS), ..options(2, attention) };
        let solved = solve(&profile, None, &options, &mut quiet).unwrap();
        let evidence = solved.report.evidence;
        assert_eq!((evidence.tokens_seen, evidence.tokens_by_similar, evidence.tokens_without_evidence), (4, 2, 1));
        for (unseen, alike, other) in [(2, 0, 3), (5, 3, 0)] {
            let best = |token: u32| match attention {
                Attention::Dp => {
                    let row = solved.tables.token_row(TokenId::new(token)).unwrap();
                    usize::from(row[1] > row[0])
                }
                Attention::Tp => {
                    let labels = solved.tables.token_groups(LayerIdx::new(1), TokenId::new(token)).unwrap();
                    usize::from(labels.groups[0])
                }
            };
            assert_eq!(best(unseen), best(alike));
            assert_ne!(best(unseen), best(other));
        }
        match attention {
            Attention::Dp => {
                let row = solved.tables.token_row(TokenId::new(6)).unwrap();
                assert_eq!(row[0], row[1]);
            }
            Attention::Tp => assert!(solved.tables.token_groups(LayerIdx::new(0), TokenId::new(6)).is_none()),
        }
    }
}

#[test]
fn strings_change_t_but_not_e() {
    let profile = two_kinds();
    let without = solve(&profile, None, &options(2, Attention::Dp), &mut quiet).unwrap();
    let options = SolveOptions { token_strings: strings(&WORDS), threads: 3, ..options(2, Attention::Dp) };
    let with = solve(&profile, None, &options, &mut quiet).unwrap();
    assert_eq!(with.tables.placement_digest(), without.tables.placement_digest());
    assert_ne!(with.tables.digest(), without.tables.digest());
    let one_thread = SolveOptions { threads: 1, ..options };
    let again = solve(&profile, None, &one_thread, &mut quiet).unwrap();
    assert_eq!(with.tables.digest(), again.tables.digest());
}

#[test]
fn empty_strings_are_no_evidence() {
    let profile = two_kinds();
    let with = |token_strings| {
        let options = SolveOptions { token_strings, ..options(2, Attention::Tp) };
        solve(&profile, None, &options, &mut quiet).unwrap()
    };
    let (none, empty) = (with(None), with(strings(&[""; 7])));
    assert_eq!(empty.report.evidence, none.report.evidence);
    for token in (0..7).map(TokenId::new) {
        let labels = |solved: &semmoe_solver::Solved| {
            let labels = solved.tables.token_groups(LayerIdx::new(0), token)?;
            Some((labels.groups.to_vec(), labels.probs.to_vec()))
        };
        assert_eq!(labels(&none), labels(&empty));
    }
}

#[test]
fn another_tokenizer_is_refused() {
    let mut model = model(1, 2, 1, 2);
    model.tokenizer_sha256 = Some("a".repeat(64));
    let mut builder = TraceBuilder::new(model, provenance()).unwrap();
    builder.push(&[0, 1], 2, &[0, 1], None).unwrap();
    let profile = profile_of(&builder.finish().unwrap());
    let check = |count: usize, sha256: Option<String>| {
        let token_strings = Some(Arc::new(TokenStrings::new(vec!["x".to_owned(); count], sha256)));
        let options = SolveOptions { token_strings, ..options(1, Attention::Dp) };
        solve(&profile, None, &options, &mut quiet).map(|_| ())
    };
    let error = check(2, Some("b".repeat(64))).unwrap_err();
    assert!(matches!(&error, SolveError::OtherTokenizer { .. }) && error.to_string().contains("aaaa"), "{error}");
    let error = check(3, None).unwrap_err();
    assert_eq!(error.to_string(), "the tokenizer has 3 tokens, expected at most the profile's 2");
    check(2, Some("a".repeat(64))).unwrap();
    check(1, None).unwrap();
}

#[test]
fn strings_help_on_recorded_routing() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (solve_on, judge_on) = (recorded("profile.trace.safetensors"), recorded("serve.trace.safetensors"));
    let tokenizer = Tokenizer::from_file(&folder.join("../assets/tiny-qwen3moe-15m/tokenizer.json")).unwrap();
    let strings = TokenStrings::new(tokenizer.pieces(), Some(tokenizer.sha256().to_owned()));
    let lar = |token_strings| {
        let options = SolveOptions { threads: 2, starts: 2, token_strings, ..options(4, Attention::Tp) };
        let tables = solve_trace(&solve_on, &options).unwrap().tables;
        evaluate(&tables, EvalInput::Trace(&judge_on), &EvalOptions::default()).unwrap().lar
    };
    let (without, with) = (lar(None), lar(Some(Arc::new(strings))));
    assert!(with > without + 0.005, "{with} with strings, {without} without");
}
