//! The mock engine answers like the recorded real engines.
#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]

mod comparison;
#[path = "../../../engines/rust/recordings.rs"]
mod recordings;

use std::path::Path;

use comparison::LeftOut;
use recordings::Recording;
use semmoe_mock_engine::{Dialect, Engine, Mock, SGLANG_0_5_16, SGLANG_0_5_23, VLLM_0_30, VLLM_0_32};

/// Skipped exchanges.
const LEFT_OUT: &[LeftOut] = &[
    ("model info", "semmoe does not ask for it"),
    ("responses", "passes through the gateway unread"),
    ("embeddings", "passes through the gateway unread"),
    ("messages", "passes through the gateway unread"),
    ("tokenize", "passes through the gateway unread"),
    ("detokenize", "passes through the gateway unread"),
    ("chat with logprobs", "nothing is read of logprobs"),
    ("chat, two choices", "recording asks for one choice"),
    ("completions, two choices", "recording asks for one choice"),
    ("generate, several prompts", "recording asks for one prompt"),
    ("generate, routed experts from the fifth token", "recording asks for all"),
    ("generate stream, aborted", "the mock has no /abort_request"),
    ("generate, unknown sampling field", "the mock reads no sampling parameters but the number of tokens"),
    ("chat, wrong method", "clients' mistakes pass through"),
    ("completions, wrong method", "clients' mistakes pass through"),
];

fn start(dialect: Dialect, recording: &Recording) -> Mock {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-qwen3moe-15m");
    let engine = Engine::of(dialect, "tiny", &folder).unwrap().with(|settings| {
        (settings.ranks, settings.context) = (2, 2048);
        settings.gives_routes = recording.gives_routes();
    });
    Mock::start(engine)
}

async fn differences(mock: &Mock, recording: &Recording) -> Vec<String> {
    comparison::differences(recording, &mock.address.into(), LEFT_OUT).await
}

#[tokio::test]
async fn every_recorded_engine_is_answered_for() {
    for (dialect, name) in [
        (VLLM_0_30, "vllm-0.30.0"),
        (VLLM_0_32, "vllm-0.32.0"),
        (SGLANG_0_5_23, "sglang-0.5.23"),
        (SGLANG_0_5_23, "sglang-0.5.23-dp-attention"),
        (SGLANG_0_5_16, "sglang-0.5.16"),
    ] {
        let recording = Recording::read(name);
        let found = differences(&start(dialect, &recording), &recording).await;
        assert!(found.is_empty(), "{name}: {} differences:\n{}", found.len(), found.join("\n"));
    }
}

/// A mock that deviates from the engine is reported.
#[tokio::test]
async fn planted_deviations_are_found() {
    type Plant = fn(&mut semmoe_mock_engine::Settings);
    let plants: [(&str, Plant, &str); 7] = [
        ("vllm-0.32.0", |settings| settings.version = "0.33.0".into(), "version: version is "),
        ("vllm-0.32.0", |settings| settings.gives_routes = !settings.gives_routes, "choices.routed_experts"),
        ("vllm-0.32.0", |settings| settings.ranks = 3, "fresh metrics: samples: "),
        ("vllm-0.32.0", |settings| settings.ignores_pins = true, "chat, pin out of range: status 200"),
        ("sglang-0.5.23", |settings| settings.init_expert_location = "e.json".into(), "init_expert_location is "),
        ("sglang-0.5.23", |settings| settings.ranks_in_loads = Some(1), "loads.dp_rank is "),
        ("sglang-0.5.23", |settings| settings.context = 4096, "data.max_model_len is "),
    ];
    for (name, plant, expected) in plants {
        let recording = Recording::read(name);
        let dialect = if name.starts_with("vllm") { VLLM_0_32 } else { SGLANG_0_5_23 };
        let mock = start(dialect, &recording);
        plant(&mut mock.settings());
        let found = differences(&mock, &recording).await;
        assert!(found.iter().any(|found| found.contains(expected)), "{name} {expected}: {found:?}");
    }
    // Another version's dialect also differs.
    let recording = Recording::read("sglang-0.5.16");
    assert!(!differences(&start(SGLANG_0_5_23, &recording), &recording).await.is_empty());
}

#[test]
fn nothing_is_left_out_that_was_not_recorded() {
    assert_eq!(comparison::without_exchange(LEFT_OUT), Vec::<&str>::new());
}
