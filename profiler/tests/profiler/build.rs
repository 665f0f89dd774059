//! Profiles from traces: identical bytes in pieces, on any threads, in any order; and what is left out.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use semmoe_profiler::{
    BuildOptions, DomainInput, HoldOut, MergeOptions, NoProgress, ProfilerError, Progress, build, merge,
};
use semmoe_tables::{
    LayerIdx, ModelInfo, Phase, Profile, ProfileBuilder, PromptSplit, Provenance, TokenId, Trace, TraceBuilder,
    UNKNOWN_EXPERT,
};

use crate::common;

const CREATED: &str = "2026-01-02T03:04:05Z";
const VOCABULARY: u32 = 12;

fn model(num_experts: u16) -> ModelInfo {
    common::model(num_experts, 2, VOCABULARY, &[0, 2, 3])
}

fn provenance(source: &str) -> Provenance {
    Provenance { source: source.into(), created: CREATED.into() }
}

/// Tokens of a request, each with a seed for its routes, and how many of them are the prompt.
type Request = (Vec<(u32, u16)>, usize);

fn trace(num_experts: u16, source: &str, requests: &[Request]) -> Trace {
    let mut builder = TraceBuilder::new(model(num_experts), provenance(source)).unwrap();
    for (tokens, prompt) in requests {
        let ids: Vec<u32> = tokens.iter().map(|(id, _)| *id).collect();
        let route = |(id, seed): &(u32, u16), layer: u16| {
            let first = (*id as u16 * 5 + seed + layer) % num_experts;
            if (seed + layer).is_multiple_of(5) { [UNKNOWN_EXPERT; 2] } else { [first, (first + 1) % num_experts] }
        };
        let experts: Vec<u16> = tokens.iter().flat_map(|t| (0..3).flat_map(move |layer| route(t, layer))).collect();
        builder.push(&ids, (*prompt).min(ids.len()) as u32, &experts, None).unwrap();
    }
    builder.finish().unwrap()
}

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Files(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, trace: &Trace) -> DomainInput {
        trace.write(&self.path(name)).unwrap();
        self.path(name).into()
    }

    fn build(&self, traces: &[DomainInput], name: &str) -> Vec<u8> {
        build(&BuildOptions::new(traces.to_vec(), self.path(name)), &NoProgress).unwrap();
        std::fs::read(self.path(name)).unwrap()
    }

    fn merge(&self, profiles: &[&str], name: &str, threads: usize) -> Vec<u8> {
        let profiles = profiles.iter().map(|name| self.path(name).into()).collect();
        merge(&MergeOptions { threads, ..MergeOptions::new(profiles, self.path(name)) }).unwrap();
        std::fs::read(self.path(name)).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    // Some tokens often and some rarely, so that both kinds of cells are used.
    let token = (prop_oneof![4 => 0u32..2, 1 => 0u32..VOCABULARY], 0u16..40);
    proptest::collection::vec((proptest::collection::vec(token, 0..20), 0usize..20), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn equal_to_counting_one_by_one(
        requests in requests(), wide: bool, threads in 1usize..4, counter_bytes in 1u64..4000, phase in 0usize..3
    ) {
        let files = Files::new();
        let trace = trace(if wide { 300 } else { 20 }, "a", &requests);
        let input = files.write("trace", &trace);
        let phase = [Phase::Prefill, Phase::Decode, Phase::All][phase];
        let mut one_by_one = ProfileBuilder::new(trace.model().clone(), provenance("a"), phase).unwrap();
        one_by_one.add_trace(&trace).unwrap();
        one_by_one.write(&files.path("expected")).unwrap();
        let options = BuildOptions { phase, threads, counter_bytes, ..BuildOptions::new(vec![input], files.path("found")) };
        let report = build(&options, &NoProgress).unwrap();
        prop_assert_eq!(std::fs::read(files.path("found")).unwrap(), std::fs::read(files.path("expected")).unwrap());
        let profile = Profile::open(&files.path("found")).unwrap();
        prop_assert_eq!(&report.digest, &profile.digest());
        prop_assert_eq!((report.tokens, report.requests, report.inputs), (profile.total_tokens(), requests.len(), 1));
        prop_assert_eq!(files.names(), ["expected", "found", "trace"]);
    }

    #[test]
    fn shards_merge_to_the_same_bytes_in_any_order(
        parts in proptest::collection::vec(requests(), 1..5), rotate in 0usize..5, threads in 1usize..4
    ) {
        let files = Files::new();
        let mut traces: Vec<DomainInput> = parts
            .iter()
            .enumerate()
            .map(|(i, requests)| files.write(&format!("t{i}"), &trace(20, ["a", "b", "c; a"][i % 3], requests)))
            .collect();
        let whole = files.build(&traces, "whole");
        traces.rotate_left(rotate % parts.len());
        prop_assert_eq!(&files.build(&traces, "rotated"), &whole);
        let mut names: Vec<String> = (0..parts.len()).map(|i| format!("p{i}")).collect();
        for (name, trace) in names.iter().zip(&traces) {
            files.build(std::slice::from_ref(trace), name);
        }
        let all: Vec<&str> = names.iter().map(String::as_str).collect();
        prop_assert_eq!(&files.merge(&all, "m1", threads), &whole);
        let (left, right) = all.split_at(all.len() / 2);
        let right_sum = files.merge(right, "m2", threads);
        let grouped = if left.is_empty() { right_sum } else {
            files.merge(left, "m3", 1);
            files.merge(&["m2", "m3"], "m4", 1)
        };
        prop_assert_eq!(&grouped, &whole);
        names.reverse();
        let reversed: Vec<&str> = names.iter().map(String::as_str).collect();
        prop_assert_eq!(&files.merge(&reversed, "m5", 2), &whole);
    }
}

fn tokens(n: usize, id: u32) -> Vec<Request> {
    (0..n).map(|i| (vec![(id, 1), (i as u32 % VOCABULARY, 1)], 2)).collect()
}

#[test]
fn domains_count_alike() {
    let files = Files::new();
    let code = [
        files.write("code-1", &trace(20, "a", &tokens(20, 1))),
        files.write("code-2", &trace(20, "a", &tokens(10, 1))),
    ];
    let named = |input: &DomainInput, domain: &str| DomainInput { domain: Some(domain.into()), ..input.clone() };
    let chat = files.write("chat.trace.safetensors", &trace(20, "b", &tokens(10, 2)));
    let inputs = vec![named(&code[0], "code"), chat.clone(), named(&code[1], "code")];
    let options = BuildOptions { weight_by_domain: true, ..BuildOptions::new(inputs.clone(), files.path("weighted")) };
    let report = build(&options, &NoProgress).unwrap();
    let reported: Vec<_> = report.domains.iter().map(|d| (d.domain.as_str(), d.tokens, d.multiplier)).collect();
    assert_eq!(reported, [("chat", 20, 3), ("code", 60, 1)]);
    assert_eq!((report.tokens, report.inputs, report.requests), (120, 3, 40));
    let profile = Profile::open(&files.path("weighted")).unwrap();
    assert_eq!(profile.provenance().source, "a; b; weighted by domain: chat x3, code x1");
    assert_eq!(profile.token_count(TokenId::new(2)), 3 * (10 + 1) + 3);
    assert!(profile.row(LayerIdx::new(0), TokenId::new(2)).counts.iter().all(|count| *count > 30));

    // Like a fleet: shards of a domain in any grouping, then once with weights.
    files.build(&code[..1], "code1");
    files.build(&code[1..], "code2");
    files.build(&[chat], "chat");
    files.merge(&["code2", "code1"], "code", 2);
    let shards = vec![files.path("code").into(), files.path("chat").into()];
    let weighted = MergeOptions { weight_by_domain: true, ..MergeOptions::new(shards, files.path("fleet")) };
    assert_eq!(merge(&weighted).unwrap().digest, report.digest);
    assert_eq!(std::fs::read(files.path("fleet")).unwrap(), std::fs::read(files.path("weighted")).unwrap());

    let unweighted = build(&BuildOptions::new(inputs, files.path("no")), &NoProgress).unwrap_err().to_string();
    assert!(unweighted.contains("nothing is weighted by domain"), "{unweighted}");
    let empty = files.write("empty", &trace(20, "a", &[]));
    let options = BuildOptions { traces: vec![code[0].clone(), empty], ..options };
    let error = build(&options, &NoProgress).unwrap_err();
    assert!(matches!(&error, ProfilerError::EmptyDomain(domain) if domain == "empty"), "{error}");
}

#[test]
fn requests_held_out_are_those_of_the_split_of_profiles() {
    let files = Files::new();
    let requests: Vec<Request> = (0..200).map(|i| (vec![(i % 12, 1), (i / 12 % 12, 2), (3, 3)], 2)).collect();
    let all = trace(20, "a", &requests);
    let input = files.write("trace", &all);
    let hold_out = Some(HoldOut { share: 0.3, out: files.path("judge") });
    let solve_trace = Some(files.path("counted"));
    let options = BuildOptions { hold_out, solve_trace, ..BuildOptions::new(vec![input], files.path("solve")) };
    let report = build(&options, &NoProgress).unwrap();
    let part = |held: bool| {
        TraceBuilder::select(&all, |_, request| (PromptSplit::PROFILE.position(request) < 0.3) == held).unwrap()
    };
    let (solve, judge) = (part(false), part(true));
    assert_eq!((report.requests, report.held_out), (solve.requests(), judge.requests()));
    let held_out = Trace::open(&files.path("judge")).unwrap();
    assert_eq!(held_out.digest(), judge.digest());
    assert_eq!(held_out.provenance().source, "a; held out 0.3");
    let counted = Trace::open(&files.path("counted")).unwrap();
    assert_eq!((counted.digest(), counted.provenance().source.as_str()), (solve.digest(), "a; counted"));
    let mut expected = ProfileBuilder::new(model(20), provenance("a"), Phase::All).unwrap();
    expected.add_trace(&solve).unwrap();
    assert_eq!(report.digest, expected.finish().unwrap().digest());
}

/// Twenty requests; the fourth one's first token has an invalid expert in the second layer.
fn damaged(files: &Files) -> DomainInput {
    let requests: Vec<Request> = (0..20).map(|i| (vec![(i % 12, 1), (1, 2)], 1)).collect();
    let mut bytes = std::fs::read(files.write("good", &trace(20, "a", &requests)).path).unwrap();
    let at = bytes.len() - 20 * 2 * 6 + 3 * 2 * 6 + 3;
    bytes[at] = 77;
    std::fs::write(files.path("damaged"), bytes).unwrap();
    files.path("damaged").into()
}

#[test]
fn damaged_requests_are_named_and_left_out() {
    let files = Files::new();
    let damaged = damaged(&files);
    let options = BuildOptions { max_bad: 0.05, ..BuildOptions::new(vec![damaged], files.path("out")) };
    let report = build(&options, &NoProgress).unwrap();
    assert_eq!((report.requests, report.bad.len(), report.tokens), (19, 1, 38));
    let reported = report.bad[0].to_string();
    assert!(reported.ends_with("damaged request 3: the tensor `experts` holds 77 at token 6, layer 1, slot 1, expected ids below 20, or 255 in every slot"), "{reported}");

    std::fs::remove_file(files.path("out")).unwrap();
    let error = build(&BuildOptions { max_bad: 0.049, ..options }, &NoProgress).unwrap_err();
    assert!(!error.is_input() || matches!(error, ProfilerError::TooManyBad { .. }));
    let error = error.to_string();
    assert!(
        error.starts_with("1 of 20 requests were bad, more than the 0 allowed, and nothing was written; the first: "),
        "{error}"
    );
    assert!(error.contains("damaged request 3: "), "{error}");
    assert_eq!(files.names(), ["damaged", "good"]);
}

#[test]
fn a_damaged_file_among_others_is_named_and_left_out() {
    let files = Files::new();
    let names = ["a", "b", "c", "d"];
    let traces = names.map(|name| files.write(name, &trace(20, name, &tokens(10, 1)))).to_vec();
    // The header's length, its text, the end of the file.
    for damage in [0, 20, usize::MAX] {
        let path = &traces[1].path;
        let whole = std::fs::read(path).unwrap();
        let mut bytes = whole.clone();
        match damage {
            usize::MAX => bytes.truncate(whole.len() - 1),
            at => bytes[at] ^= 0xff,
        }
        std::fs::write(path, bytes).unwrap();
        let options = BuildOptions { max_bad: 0.25, ..BuildOptions::new(traces.clone(), files.path("some")) };
        let report = build(&options, &NoProgress).unwrap();
        assert_eq!((report.inputs, report.requests, report.bad.len()), (3, 30, 1), "{damage}");
        assert_eq!((&report.bad[0].file, &report.bad[0].record[..]), (path, "as a whole"));
        assert!(!report.bad[0].reason.is_empty());
        let others = [&traces[..1], &traces[2..]].concat();
        let built = std::fs::read(files.path("some")).unwrap();
        assert!(built == files.build(&others, "others"), "the others are all there");
        std::fs::remove_file(files.path("some")).unwrap();
        // It held ten of the forty requests, estimated from its size.
        let error = build(&BuildOptions { max_bad: 0.24, ..options }, &NoProgress).unwrap_err();
        assert!(!error.is_input());
        let error = error.to_string();
        assert!(
            error.starts_with("10 of 40 requests were bad, more than the 9 allowed, and nothing was written"),
            "{error}"
        );
        assert!(error.contains("b as a whole: "), "{error}");
        assert!(!files.path("some").exists());
        // Alone, there is nothing to keep.
        let error = build(&BuildOptions::new(vec![traces[1].clone()], files.path("some")), &NoProgress).unwrap_err();
        assert!(matches!(error, ProfilerError::Format(_)), "{error}");
        std::fs::write(path, whole).unwrap();
    }
}

#[test]
fn what_cannot_be_counted_together_is_named() {
    let files = Files::new();
    let a = files.write("a", &trace(20, "a", &tokens(3, 1)));
    let other = files.write("other", &trace(21, "a", &tokens(3, 1)));
    let error =
        |traces: Vec<DomainInput>| build(&BuildOptions::new(traces, files.path("no")), &NoProgress).unwrap_err();
    let text = error(vec![a.clone(), other.clone()]).to_string();
    assert!(text.ends_with("other: different models: `num_experts` is 21 in one and 20 in the other"), "{text}");
    assert!(matches!(error(vec![]), ProfilerError::NoInput("trace")));
    assert!(error(vec![files.path("absent").into()]).is_input());
    assert!(error(vec![a.clone(), files.path("absent").into()]).is_input());
    files.build(std::slice::from_ref(&a), "profile");
    let text = error(vec![a.clone(), files.path("profile").into()]).to_string();
    assert!(text.contains("profile: the format is"), "{text}");

    files.build(std::slice::from_ref(&a), "all");
    let decode = BuildOptions { phase: Phase::Decode, ..BuildOptions::new(vec![a.clone()], files.path("decode")) };
    assert_eq!(build(&decode, &NoProgress).unwrap().tokens, 0);
    let merged = |names: [&str; 2]| {
        let profiles = names.map(|name| files.path(name).into()).to_vec();
        merge(&MergeOptions::new(profiles, files.path("no"))).unwrap_err().to_string()
    };
    assert!(merged(["all", "decode"]).ends_with("decode: the profile's phase is decode, expected all"));
    assert!(merged(["all", "a"]).contains("a: the format is"));
    for options in [
        BuildOptions { threads: 0, ..decode.clone() },
        BuildOptions { max_bad: f64::NAN, ..decode.clone() },
        BuildOptions { hold_out: Some(HoldOut { share: 1.5, out: files.path("x") }), ..decode },
    ] {
        assert!(matches!(build(&options, &NoProgress), Err(ProfilerError::Option { .. })));
    }
    assert!(!files.path("no").exists());
}

#[test]
fn a_sum_that_does_not_fit_is_an_error() {
    let files = Files::new();
    let a = files.write("a", &trace(20, "a", &[(vec![(1, 1)], 1)]));
    files.build(&[a], "0");
    let many: Vec<String> = (0..16).map(|i| i.to_string()).collect();
    // Each is four of the previous one.
    for pair in many.windows(2) {
        files.merge(&[pair[0].as_str(); 4], &pair[1], 1);
    }
    let last = vec![files.path("15").into(); 4];
    let error = merge(&MergeOptions::new(last, files.path("no"))).unwrap_err().to_string();
    assert!(error.starts_with("the count of expert ") && error.ends_with("does not fit into 32 bits"), "{error}");
}

#[derive(Default)]
struct Heard {
    total: AtomicU64,
    done: AtomicU64,
}

impl Progress for Heard {
    fn set_total(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }
    fn advance(&self, by: u64) {
        self.done.fetch_add(by, Ordering::Relaxed);
    }
    fn message(&self, _text: &str) {}
}

#[test]
fn progress_reaches_its_total() {
    let files = Files::new();
    let a = files.write("a", &trace(20, "a", &tokens(30, 1)));
    let heard = Heard::default();
    let options = BuildOptions { counter_bytes: 200, ..BuildOptions::new(vec![a], files.path("out")) };
    let report = build(&options, &heard).unwrap();
    assert!(report.passes > 4, "{}", report.passes);
    assert!(heard.done.into_inner() == heard.total.into_inner());
}
