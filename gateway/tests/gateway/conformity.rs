//! The mocks of these tests do not contradict real engines (`tests/engines/recordings`). They leave much out.

#[path = "../../../tests/engines/rust/conformity.rs"]
mod comparison;
#[path = "../../../tests/engines/rust/recordings.rs"]
mod recordings;

use recordings::Recording;
use semmoe_engines::http::BaseUrl;

use crate::support::{Behaviour, Mock, Ranked};

async fn check(recording: &str, exchanges: &[&str], mock: BaseUrl) {
    let recording = Recording::read(recording);
    let mut found = Vec::new();
    for name in exchanges {
        found.extend(comparison::contradictions(recording.get(name), &mock).await);
    }
    assert!(found.is_empty(), "{} {}:\n{}", recording.engine, recording.version, found.join("\n"));
}

#[tokio::test]
async fn a_mock_of_sglang_reports_itself_as_sglang_does() {
    let mock = Mock::start(2);
    check("sglang-0.5.23", &["server info"], mock.address.into()).await;
}

#[tokio::test]
async fn a_mock_with_ranks_reports_its_loads_as_sglang_does() {
    let recording = Recording::read("sglang-0.5.23");
    let info = serde_json::from_str(&recording.get("server info").answer.body).unwrap();
    let behaviour = Behaviour { info, ranks: 2, first: 0, first_in_pins: 0 };
    let mock = Ranked::start(behaviour).await;
    let exchanges = ["server info", "fresh loads", "models", "generate, pinned to 0", "generate, pinned to 1"];
    check("sglang-0.5.23", &exchanges, mock.address.into()).await;
}

#[tokio::test]
async fn a_mock_with_ranks_refuses_pins_as_vllm_does() {
    let behaviour = Behaviour { info: serde_json::Value::Null, ranks: 2, first: 0, first_in_pins: 0 };
    let mock = Ranked::start(behaviour).await;
    check("vllm-0.32.0", &["models", "completions, pin out of range"], mock.address.into()).await;
}
