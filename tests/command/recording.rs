//! Routing recorded from the worker over HTTP equals that of Transformers for identical prompts.

use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient};
use semmoe_tables::{LayerIdx, Profile, Trace};

use crate::support::{Ranks, describe, json_of, model_dir, repository, run};

/// Share of routes that may differ: near-ties between the k-th and the next expert, which depend on the order of
/// summation.
const NEAR_TIES: f64 = 0.001;

#[test]
fn the_recorded_trace_equals_the_reference_and_every_activation_is_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    let (out, profile) = (folder.path().join("t.trace.safetensors"), folder.path().join("p.profile.safetensors"));
    let ranks = Ranks::start(4, None);
    let prompts = repository("tests/data/reference.prompts.jsonl");
    let text = |path: &std::path::Path| path.to_str().expect("UTF-8").to_owned();
    let recorded = run(&[
        "profile",
        "record",
        "--engine",
        "semmoe",
        "--json",
        "--url",
        &ranks.url,
        "--prompts",
        &text(&prompts),
        "--tokenizer",
        &text(&model_dir()),
        "--out",
        &text(&out),
    ]);
    let report = json_of(&recorded);
    assert_eq!(report["requests"], 96, "{report}");

    let trace = Trace::open(&out).expect("a valid trace");
    let reference = Trace::open(&repository("tests/data/reference.trace.safetensors")).expect("a valid trace");
    let (routes, differing) = compare(&trace, &reference);
    assert!((differing as f64) < NEAR_TIES * routes as f64, "{differing} of {routes} routes differ from the reference");

    let metrics = metrics_of(&ranks.url);
    let activations = sum(&metrics, "semmoe_activations_total{");
    let tokens = sum(&metrics, "semmoe_tokens_total{");
    let info = trace.model();
    let cached = sum(&metrics, "semmoe_cached_prompt_tokens_total{");
    assert_eq!(tokens + cached, trace.tokens() as u64, "every token ran once, or had run before");
    assert_eq!(
        activations,
        tokens * info.layers() as u64 * u64::from(info.top_k),
        "local + remote = tokens x layers x top-k"
    );
    ranks.stop();

    let built = run(&["profile", "build", &text(&out), "--out", &text(&profile)]);
    assert!(built.status.success(), "{}", describe(&built));
    assert_eq!(Profile::open(&profile).expect("a valid profile").total_tokens(), trace.tokens() as u64);
}

/// The number of routes compared, and of those that differ as sets.
fn compare(trace: &Trace, reference: &Trace) -> (usize, usize) {
    assert_eq!(trace.requests(), reference.requests());
    let (mut routes, mut differing) = (0, 0);
    for (ours, theirs) in trace.iter().zip(reference.iter()) {
        assert_eq!(ours.token_ids(), theirs.token_ids(), "the prompts are tokenized alike");
        for position in 0..ours.token_ids().len() {
            for layer in (0..reference.model().layers()).map(|layer| LayerIdx::new(layer as u16)) {
                let sorted = |request: semmoe_tables::TraceRequest<'_>| {
                    let route = request.route(position, layer).expect("a known route");
                    let mut experts: Vec<_> = route.experts().collect();
                    experts.sort_unstable();
                    experts
                };
                routes += 1;
                differing += usize::from(sorted(ours) != sorted(theirs));
            }
        }
    }
    (routes, differing)
}

fn metrics_of(url: &str) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let url: BaseUrl = url.parse().expect("a URL");
    runtime.block_on(HttpClient::default().get_text(&url, "/metrics", &AnswerLimits::default())).expect("metrics")
}

fn sum(metrics: &str, prefix: &str) -> u64 {
    metrics
        .lines()
        .filter(|line| line.starts_with(prefix))
        .map(|line| {
            line.rsplit(' ').next().and_then(|value| value.parse::<u64>().ok()).unwrap_or_else(|| panic!("{line}"))
        })
        .sum()
}
