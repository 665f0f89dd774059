//! The output of `show`, on counts with known figures, and the page with images.

use std::path::Path;

use proptest::prelude::*;
use semmoe_profiler::Grade;
use semmoe_profiler::html::{Page, RateKind, RatePoint, render};
use semmoe_profiler::show::{HeldOutKind, Input, Study, study};
use semmoe_tables::{
    ModelInfo, Phase, Placement, ProfileBuilder, Provenance, Tables, TablesBuilder, Trace, TraceBuilder,
};

use crate::common;

fn model(vocab_size: u32) -> ModelInfo {
    ModelInfo { model: "<b>tiny & co</b>".into(), ..common::model(8, 2, vocab_size, &[0, 2]) }
}

/// Requests of tokens; `choose` returns the two experts of an occurrence in a layer.
fn trace(vocab_size: u32, requests: &[Vec<u32>], choose: impl Fn(u32, usize, u16) -> [u16; 2]) -> Trace {
    let provenance = Provenance { source: "<script>alert(1)</script>".into(), created: "2026-01-02T03:04:05Z".into() };
    let mut builder = TraceBuilder::new(model(vocab_size), provenance).unwrap();
    for tokens in requests {
        let experts: Vec<u16> = tokens
            .iter()
            .enumerate()
            .flat_map(|(at, token)| (0..2).flat_map(|layer| choose(*token, at, layer)).collect::<Vec<_>>())
            .collect();
        builder.push(tokens, tokens.len() as u32, &experts, None).unwrap();
    }
    builder.finish().unwrap()
}

fn profile(trace: &Trace) -> Input {
    let mut builder = ProfileBuilder::new(trace.model().clone(), trace.provenance().clone(), Phase::All).unwrap();
    builder.add_trace(trace).unwrap();
    Input::Profile(builder.finish().unwrap())
}

/// Two experts determined by the token.
fn fixed(token: u32, _: usize, layer: u16) -> [u16; 2] {
    let first = (token as u16 + layer) % 8;
    [first, (first + 3) % 8]
}

fn requests(count: u32) -> Vec<Vec<u32>> {
    (0..count).map(|request| (0..12).map(|at| (request * 7 + at * at) % 16).collect()).collect()
}

#[test]
fn tokens_that_decide_their_experts_are_predicted_in_full() {
    let trace = trace(16, &requests(60), fixed);
    let from_profile = study(&profile(&trace), None).unwrap();
    let from_trace = study(&Input::Trace(trace), None).unwrap();
    assert_eq!((from_profile.held_out, from_trace.held_out), (HeldOutKind::Counts, HeldOutKind::Requests));
    for study in [&from_profile, &from_trace] {
        assert_eq!(study.layers.len(), 2);
        for layer in &study.layers {
            assert_eq!((layer.f1.p25, layer.f1_mean), (1.0, Some(1.0)));
            assert_eq!((layer.cumulative_hotness.p25, layer.hottest_other.p75), (1.0, 0.0));
            // Two of eight with one half each: the fourth moment over the squared second.
            assert!((layer.kurtosis.p50 - 7.0 / 3.0).abs() < 1e-9, "{}", layer.kurtosis.p50);
        }
        // One expert determines the other layer's two, but each belongs to two tokens of eight classes.
        assert_eq!((study.next.len(), study.next[0].from_layer, study.next[0].to_layer), (1, 0, 2));
        assert!(study.next[0].share > study.next[0].by_chance, "{:?}", study.next[0].share);
    }
    // Equal prompts are on one side, so some tokens never occurred on the other.
    assert_eq!(from_profile.coverage_of_traffic, 1.0);
    assert!((0.2..1.0).contains(&from_trace.coverage_of_traffic), "{}", from_trace.coverage_of_traffic);
    assert!(from_trace.next[0].seen_together && !from_profile.next[0].seen_together);
}

#[test]
fn figures_of_a_token_known_by_hand() {
    // Token 0: expert 0 always, then 1, 2 or 3 in turn: shares 1/2, 1/6, 1/6, 1/6.
    let choose = |_, at: usize, _| [0, 1 + (at % 3) as u16];
    let trace = trace(4, &[vec![0; 300], vec![0; 300]], choose);
    let study = study(&profile(&trace), None).unwrap();
    let layer = &study.layers[0];
    assert!((layer.cumulative_hotness.p50 - 2.0 / 3.0).abs() < 1e-12);
    assert!((layer.hottest_other.p50 - 1.0 / 6.0).abs() < 1e-12);
    // A random half of the counts: close to the hotness.
    assert!((layer.f1.p50 - 2.0 / 3.0).abs() < 0.05, "{}", layer.f1.p50);
    assert!(layer.load_skewness > 1.0 && layer.load_max_over_mean == 4.0);
}

#[test]
fn another_file_is_judged_on() {
    let (one, other) = (
        trace(16, &requests(30), fixed),
        trace(
            16,
            &[vec![0, 1, 2, 3, 15, 14]],
            |token, at, layer| if token < 4 { fixed(token, at, layer) } else { [6, 7] },
        ),
    );
    let held_out = study(&Input::Trace(one), Some(&profile(&other))).unwrap();
    assert_eq!(held_out.held_out, HeldOutKind::File);
    assert!(held_out.layers[0].f1_mean < Some(1.0) && held_out.layers[0].f1.p50 == 1.0);
    let small = trace(8, &[vec![1]], fixed);
    let error = study(&Input::Trace(other), Some(&Input::Trace(small))).unwrap_err().to_string();
    assert!(error.contains("vocab_size"), "{error}");
}

#[test]
fn tokens_met_once_are_no_evidence_for_the_next() {
    let trace = trace(40, &[(0..20).collect(), vec![20; 20]], fixed);
    let study = study(&profile(&trace), None).unwrap();
    assert_eq!(study.coverage_of_traffic, 0.5);
}

/// Contiguous, and without a preference for any token.
fn tables(trace: &Trace) -> Tables {
    let (model, placement) = (trace.model().clone(), Placement::contiguous(2, 8, 4).unwrap());
    let shares = vec![half::f16::ZERO; 4 * model.vocab_size as usize];
    TablesBuilder::dp(model, trace.provenance().clone(), placement, shares, vec![0.0; 4]).finish().unwrap()
}

fn whole_page(trace: Trace, texts: Vec<String>, topics: &[String]) -> String {
    let input = Input::Trace(trace);
    let found = study(&input, None).unwrap();
    let Input::Trace(trace) = &input else { unreachable!() };
    let tables = tables(trace);
    let point = |groups, rate, kind| RatePoint {
        groups,
        rate,
        random: 1.0 / f64::from(groups),
        by_requests: kind == RateKind::Given,
        held_out: true,
        kind,
    };
    let rates = vec![point(4, 0.5, RateKind::Solved), point(2, 0.7, RateKind::Solved), point(4, 0.6, RateKind::Given)];
    let page = Page {
        tables: Some(&tables),
        token_texts: texts,
        topics: Some((trace, topics)),
        rates,
        layer: Some(1),
        verdict: Some(found.verdict("<b>.trace.safetensors")),
    };
    render(&found, &page).unwrap()
}

/// Every tag is known and closed, and nothing is loaded or executed.
fn check_page(page: &str) {
    for forbidden in ["<script", "<b>", "<img", "onload", "href", "src=", "url(", "http:", "https:", "@import"] {
        let found = page.find(forbidden).map(|at| &page[at.saturating_sub(40)..(at + 40).min(page.len())]);
        assert!(found.is_none(), "{forbidden}: {found:?}");
    }
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    assert_eq!(page.matches('<').count(), page.matches('>').count());
    assert!(!page.contains("NaN") && !page.contains("inf"), "numbers are numbers");
}

#[test]
fn a_page_has_all_pictures_and_no_markup_of_its_texts() {
    let requests = requests(60);
    let topics: Vec<String> = (0..60)
        .map(|request| if request % 2 == 0 { "<b>law".to_owned() } else { "math\" onload=\"x".to_owned() })
        .collect();
    let texts = (0..16).map(|id| format!("</text><script>{id}")).collect();
    let page = whole_page(trace(16, &requests, fixed), texts, &topics);
    check_page(&page.replace("&quot; onload=&quot;", ""));
    // Maps of two layers, one of the step between them for each, loads of experts and groups, topics, rates.
    assert_eq!(page.matches("<svg").count(), 8, "all pictures");
    assert_eq!(page.matches("type=\"radio\"").count(), 2, "a choice of two layers");
    assert!(page.contains("id=\"l2\" autocomplete=\"off\" checked"), "the requested layer is shown first");
    assert!(page.contains("expert 3 ") && page.contains("of layer 0, then expert"), "values are under the pointer");
    // One line connects the two solves, one the two points of random ranks; each has a legend entry.
    assert_eq!(page.matches("stroke-width=\"2\"").count(), 4, "given tables are joined with nothing");
    assert!(page.contains("<strong>Verdict: ") && page.contains("&lt;b&gt;.trace.safetensors --out"));
    assert!(
        page.contains("&lt;b&gt;tiny &amp; co")
            && page.contains("&lt;b&gt;law")
            && page.contains("&lt;/text&gt;&lt;script")
    );
    for title in [
        "Predicting experts from tokens",
        "Tokens and experts",
        "Expert load",
        "Group load, before and after",
        "From layer to layer",
        "Requests by topic",
        "by number of groups",
    ] {
        assert!(page.contains(title), "{title}");
    }
}

#[test]
fn a_verdict_says_what_a_token_predicts() {
    let sure = study(&profile(&trace(16, &requests(60), fixed)), None).unwrap();
    let verdict = sure.verdict("run.profile.safetensors");
    assert_eq!(verdict.grade, Grade::Good, "{verdict}");
    assert!(verdict.text.contains("100% of the experts that it activates (25% by chance)"), "{verdict}");
    assert_eq!(verdict.next, "semmoe solve --profile run.profile.safetensors --groups 8 --out m.tables.safetensors");
    // Experts determined by the position, not by the token.
    let by_place = trace(16, &requests(60), |token, at, layer| fixed(token.wrapping_mul(7) + at as u32 * 5, at, layer));
    let verdict = study(&Input::Trace(by_place), None).unwrap().verdict("run.trace.safetensors");
    assert!(
        verdict.grade < Grade::Good && verdict.next.contains("profile build run.trace.safetensors --out run.profile."),
        "{verdict}"
    );
    let text = sure.to_string();
    let columns = |start: &str| text.lines().rfind(|line| line.starts_with(start)).map(|line| line.len());
    assert_eq!(
        (columns("layer"), columns("good"), columns("poor")),
        (columns("    0"), columns("    0"), columns("    0")),
        "{text}"
    );
}

#[test]
fn what_cannot_be_drawn_says_what_it_needs() {
    let trace = trace(16, &requests(3), fixed);
    let found = study(&profile(&trace), None).unwrap();
    let page = render(&found, &Page::default()).unwrap();
    check_page(&page);
    assert!(page.contains("--topics") && page.contains("--groups") && page.contains("with <code>--tables</code>"));
    assert_eq!(page.matches("<svg").count(), 5);
    let error = render(&found, &Page { layer: Some(2), ..Page::default() }).unwrap_err().to_string();
    assert!(error.starts_with("layer is 2"), "{error}");
    let topics = vec!["a".to_owned()];
    let error = render(&found, &Page { topics: Some((&trace, &topics)), ..Page::default() }).unwrap_err().to_string();
    assert!(error.contains("topics is a file of 1 lines"), "{error}");
    // An empty trace.
    let empty: Study = study(&Input::Trace(self::trace(16, &[], fixed)), None).unwrap();
    check_page(&render(&empty, &Page::default()).unwrap());
    assert!(Input::open(Path::new("absent")).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_texts_and_routes_make_a_page(
        tokens in prop::collection::vec(prop::collection::vec(0u32..16, 1..9), 1..30),
        texts in prop::collection::vec(".{0,30}", 16),
        topics in prop::collection::vec(".{0,40}", 30),
        salt: u16,
    ) {
        let choose = |token: u32, at: usize, layer: u16| {
            let first = (token as u16 ^ at as u16 ^ layer ^ salt) % 8;
            [first, (first + 1 + at as u16 % 7) % 8]
        };
        let topics = &topics[..tokens.len()];
        let page = whole_page(trace(16, &tokens, choose), texts, topics);
        prop_assert_eq!(page.matches('<').count(), page.matches('>').count());
        prop_assert_eq!(page.matches("<svg").count(), 8);
        prop_assert!(!page.contains("NaN"));
    }
}
