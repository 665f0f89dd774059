//! A small engine on a loopback port that speaks SGLang's dialect, answers by a formula, and lies on request.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "tests")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use semmoe_engines::Engine;
use semmoe_engines::http::BaseUrl;
use semmoe_engines::sglang::{
    FinishReason, GenerateRequest, GenerateResponse, MetaInfo, ServerInfo, encode_routed_experts,
};
use semmoe_profiler::{NoProgress, ProfilerError, RecordOptions, RecordReport, record};
use semmoe_tables::ModelInfo;
use tokio::sync::{Notify, mpsc};

pub const HIDDEN_LAYERS: u16 = 3;
pub const TOP_K: u16 = 2;
pub const NUM_EXPERTS: u16 = 8;

/// Prompts that begin with one of these ids get a special treatment.
pub mod first_id {
    pub const TOO_MANY_ROWS: u32 = 100;
    pub const TOO_FEW_ROWS: u32 = 101;
    pub const EXPERT_OUT_OF_RANGE: u32 = 102;
    pub const TRUNCATED_BASE64: u32 = 103;
    pub const ALWAYS_500: u32 = 104;
    pub const TWICE_503: u32 = 105;
    pub const SAME_EXPERT_TWICE: u32 = 106;
    pub const NO_EXPERT: u32 = 107;
    pub const OTHER_PROMPT: u32 = 108;
    pub const NO_ROUTES: u32 = 109;
    pub const ABORTED: u32 = 110;
    pub const REFUSED_400: u32 = 111;
    pub const NOTHING_GENERATED: u32 = 112;
    pub const OTHER_PROMPT_COUNT: u32 = 113;
    pub const NO_JSON: u32 = 114;
    /// Is answered only when a prompt that begins with `RELEASES` has been.
    pub const WAITS: u32 = 120;
    pub const RELEASES: u32 = 121;
    /// Is never answered; reports when it arrives and when it is dropped.
    pub const HANGS: u32 = 122;
}

#[derive(Debug)]
pub struct Behaviour {
    pub info: Mutex<ServerInfo>,
    pub attempts: Mutex<HashMap<u32, u32>>,
    pub seen: Mutex<Vec<GenerateRequest>>,
    /// Asked for with every request.
    pub key: Mutex<Option<String>>,
    pub release: Notify,
    pub hanging: Notify,
    pub dropped: mpsc::UnboundedSender<()>,
}

/// The mock, running.
pub struct Mock {
    pub state: Arc<Behaviour>,
    pub url: BaseUrl,
    pub dropped: mpsc::UnboundedReceiver<()>,
    pub directory: tempfile::TempDir,
}

pub fn model() -> ModelInfo {
    ModelInfo {
        model: "mock".into(),
        tokenizer_sha256: None,
        num_experts: NUM_EXPERTS,
        top_k: TOP_K,
        vocab_size: 20_000,
        num_hidden_layers: HIDDEN_LAYERS,
        layer_ids: vec![1, 2],
    }
}

/// The truth: the experts of a token in a hidden layer. Layer 0 is dense and has none.
pub fn experts(token: u32, layer: u16) -> [i32; 2] {
    if layer == 0 {
        return [-1, -1];
    }
    let first = (token as i32 + i32::from(layer)) % 8;
    [first, (first + 3) % 8]
}

/// The output for a prompt of these ids.
pub fn generated(ids: &[u32], max_tokens: u32) -> Vec<u32> {
    (0..max_tokens).map(|i| (ids.iter().sum::<u32>() + i) % 50).collect()
}

impl Mock {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = BaseUrl::from(listener.local_addr().unwrap());
        let (sender, dropped) = mpsc::unbounded_channel();
        let model = model();
        let info = ServerInfo {
            served_model_name: Some(model.model),
            num_experts: Some(model.num_experts),
            top_k: Some(model.top_k),
            vocab_size: Some(model.vocab_size),
            num_hidden_layers: Some(model.num_hidden_layers),
            layer_ids: Some(model.layer_ids),
            ..ServerInfo::default()
        };
        let state = Arc::new(Behaviour {
            info: Mutex::new(info),
            attempts: Mutex::default(),
            seen: Mutex::default(),
            key: Mutex::default(),
            release: Notify::new(),
            hanging: Notify::new(),
            dropped: sender,
        });
        let router = Router::new()
            .route(
                "/server_info",
                get(async |State(state): State<Arc<Behaviour>>| Json(state.info.lock().unwrap().clone())),
            )
            .route("/generate", post(generate))
            .layer(axum::middleware::from_fn_with_state(Arc::clone(&state), ask_for_key))
            .with_state(Arc::clone(&state));
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Mock { state, url, dropped, directory: tempfile::tempdir().unwrap() }
    }

    pub fn out(&self) -> PathBuf {
        self.directory.path().join("out.trace.safetensors")
    }

    pub fn partial(&self) -> PathBuf {
        self.directory.path().join("out.trace.safetensors.partial")
    }

    /// Options for a prompts file of these lines.
    pub fn options(&self, lines: &[String]) -> RecordOptions {
        let prompts = self.directory.path().join("prompts.jsonl");
        std::fs::write(&prompts, lines.join("\n")).unwrap();
        let created = "2026-01-02T03:04:05Z".into();
        let mut options = RecordOptions::new(Engine::Semmoe, self.url.clone(), prompts, self.out(), created);
        options.retries = 2;
        options.retry_pause = Duration::ZERO;
        options
    }

    pub async fn record(&self, options: RecordOptions) -> Result<RecordReport, ProfilerError> {
        record(options, &NoProgress, std::future::pending()).await
    }

    /// Whether nothing but the prompts is in the directory.
    pub fn left_nothing(&self) -> bool {
        let names =
            |path: &Path| -> Vec<_> { std::fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name()).collect() };
        names(self.directory.path()) == ["prompts.jsonl"]
    }
}

/// A line of a prompts file.
pub fn ids_line(ids: &[u32]) -> String {
    serde_json::json!({ "input_ids": ids }).to_string()
}

/// 401 without the key, if there is one.
async fn ask_for_key(
    State(state): State<Arc<Behaviour>>,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Response {
    let key = state.key.lock().unwrap().clone();
    let given = request.headers().get("authorization").map(|value| value.to_str().unwrap().to_owned());
    match key {
        Some(key) if given.as_ref() != Some(&format!("Bearer {key}")) => StatusCode::UNAUTHORIZED.into_response(),
        _ => next.run(request).await,
    }
}

async fn generate(State(state): State<Arc<Behaviour>>, Json(request): Json<GenerateRequest>) -> Response {
    assert!(request.return_routed_experts && request.return_prompt_token_ids);
    state.seen.lock().unwrap().push(request.clone());
    // A tokenizer of a kind: one token per letter.
    let text = request.text.map(|text| text.bytes().map(u32::from).collect());
    let ids: Vec<u32> = request.input_ids.or(text).unwrap();
    let attempt = {
        let mut attempts = state.attempts.lock().unwrap();
        let attempt = attempts.entry(ids[0]).or_default();
        *attempt += 1;
        *attempt
    };
    match ids[0] {
        first_id::ALWAYS_500 => return (StatusCode::INTERNAL_SERVER_ERROR, "out of luck").into_response(),
        first_id::TWICE_503 if attempt <= 2 => return StatusCode::SERVICE_UNAVAILABLE.into_response(),
        first_id::REFUSED_400 => return (StatusCode::BAD_REQUEST, "too long").into_response(),
        first_id::NO_JSON => return "[1, 2".into_response(),
        first_id::WAITS => state.release.notified().await,
        first_id::RELEASES => state.release.notify_one(),
        first_id::HANGS => {
            let _guard = Guard(state.dropped.clone());
            state.hanging.notify_one();
            std::future::pending::<()>().await;
        }
        _ => {}
    }
    Json(answer(&ids, request.sampling_params.max_new_tokens.unwrap())).into_response()
}

struct Guard(mpsc::UnboundedSender<()>);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

fn answer(ids: &[u32], max_tokens: u32) -> GenerateResponse {
    let mut output_ids = generated(ids, max_tokens);
    let tokens = [ids, &output_ids[..output_ids.len() - 1]].concat();
    let mut routes: Vec<i32> =
        tokens.iter().flat_map(|&token| (0..HIDDEN_LAYERS).flat_map(move |layer| experts(token, layer))).collect();
    let mut prompt_ids = ids.to_vec();
    let row = usize::from(HIDDEN_LAYERS * TOP_K);
    match ids[0] {
        first_id::TOO_MANY_ROWS => routes.extend_from_within(..row),
        first_id::TOO_FEW_ROWS => routes.truncate(routes.len() - row),
        first_id::EXPERT_OUT_OF_RANGE => routes[3] = 8,
        first_id::SAME_EXPERT_TWICE => routes[3] = routes[2],
        first_id::NO_EXPERT => routes[5] = -1,
        first_id::OTHER_PROMPT => prompt_ids.push(7),
        first_id::NOTHING_GENERATED => output_ids.clear(),
        _ => {}
    }
    let mut encoded = encode_routed_experts(&routes);
    if ids[0] == first_id::TRUNCATED_BASE64 {
        encoded.truncate(encoded.len() - 3);
    }
    let prompt_tokens = if ids[0] == first_id::OTHER_PROMPT_COUNT { 99 } else { prompt_ids.len() as u64 };
    let finish_reason = match ids[0] {
        first_id::ABORTED => FinishReason::Abort { message: Some("no memory".into()) },
        _ => FinishReason::Length { length: max_tokens },
    };
    GenerateResponse {
        text: String::new(),
        output_ids,
        prompt_token_ids: Some(prompt_ids),
        meta_info: MetaInfo {
            finish_reason: Some(finish_reason),
            prompt_tokens,
            completion_tokens: u64::from(max_tokens),
            routed_experts: (ids[0] != first_id::NO_ROUTES).then_some(encoded),
            ..MetaInfo::default()
        },
    }
}
