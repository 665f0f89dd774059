//! The mock engine of the profiler's tests, of `tests/operating` and of the guides answers what real engines answered.
#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]

#[path = "../../tests/engines/rust/conformity.rs"]
mod conformity;
#[path = "../examples/engine_mock/mock.rs"]
mod mock;
#[path = "../../tests/engines/rust/recordings.rs"]
mod recordings;

use std::path::Path;
use std::sync::Arc;

use conformity::LeftOut;
use mock::{Dialect, Engine, Ranks, Texts, router};
use recordings::Recording;
use semmoe_engines::http::BaseUrl;
use semmoe_tables::ModelInfo;
use semmoe_text::{ChatTemplate, Tokenizer};

/// Fields that this mock lacks.
const LEFT_OUT: &[LeftOut] = &[
    ("model info", "semmoe does not ask for it"),
    ("ping", "recording does not ask for it"),
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

async fn start(dialect: Dialect, recording: &Recording) -> BaseUrl {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-qwen3moe-15m");
    let model = ModelInfo { model: "tiny".to_owned(), ..semmoe_profiler::model_config(&folder).unwrap() };
    let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap();
    let template = ChatTemplate::beside(&folder.join("tokenizer.json"), || 0).unwrap();
    let mut engine = Engine::new(dialect, model, Texts::Model(Box::new(tokenizer), Some(Box::new(template))));
    engine.ranks = Ranks::new(2);
    engine.gives_routes = recording.gives_routes();
    engine.version = Some(recording.version.clone());
    engine.context = 2048;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router(Arc::new(engine))).await });
    address.into()
}

async fn check(dialect: Dialect, recording: &str) {
    let recording = Recording::read(recording);
    let mock = start(dialect, &recording).await;
    let found = conformity::differences(&recording, &mock, LEFT_OUT).await;
    assert!(found.is_empty(), "{} differences:\n{}", found.len(), found.join("\n"));
}

#[tokio::test]
async fn as_vllm_0_30() {
    check(Dialect::Vllm, "vllm-0.30.0").await;
}

#[tokio::test]
async fn as_vllm_0_32() {
    check(Dialect::Vllm, "vllm-0.32.0").await;
}

#[tokio::test]
async fn as_sglang_0_5_23() {
    check(Dialect::Sglang0_5_23, "sglang-0.5.23").await;
    check(Dialect::Sglang0_5_23, "sglang-0.5.23-dp-attention").await;
}

#[tokio::test]
async fn as_sglang_0_5_16() {
    check(Dialect::Sglang0_5_16, "sglang-0.5.16").await;
}

#[test]
fn nothing_is_left_out_that_was_not_recorded() {
    assert_eq!(conformity::without_exchange(LEFT_OUT), Vec::<&str>::new());
}
