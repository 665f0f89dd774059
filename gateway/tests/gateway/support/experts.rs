//! A mock engine that sends routed experts, right or wrong: as SGLang and semmoe's worker do, or as vLLM does.
//!
//! The request's header `x-mock` selects the behaviour: it is a list of words, which the gateway passes on.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt;
use semmoe_engines::recording::encode_npy;
use semmoe_engines::sglang::encode_routed_experts;
use semmoe_tables::ModelInfo;
use semmoe_text::Tokenizer;
use serde_json::{Value, json};
use tokio_stream::StreamExt;

/// Ids that it generates.
pub(crate) const GENERATED: [u32; 2] = [11, 12];

struct Shared {
    info: Mutex<Value>,
    model: ModelInfo,
    ranks: u16,
    tokenizer: Tokenizer,
    bodies: Mutex<Vec<Bytes>>,
    /// It answers as vLLM does: with routed experts always, or never.
    vllm: Option<bool>,
}

pub(crate) struct Experts {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
}

impl Experts {
    pub(crate) async fn start(fixture: &super::Fixture) -> Self {
        Self::start_as(fixture, None).await
    }

    /// vLLM, with `--enable-return-routed-experts` or without.
    pub(crate) async fn vllm(fixture: &super::Fixture, flag: bool) -> Self {
        Self::start_as(fixture, Some(flag)).await
    }

    async fn start_as(fixture: &super::Fixture, vllm: Option<bool>) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            info: Mutex::new(fixture.info()),
            model: fixture.model.clone(),
            ranks: fixture.ranks,
            tokenizer: super::tokenizer(),
            bodies: Mutex::default(),
            vllm,
        });
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shared));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, shared }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Changes a field of its server information.
    pub(crate) fn tell(&self, field: &str, value: Value) {
        self.shared.info.lock().unwrap()[field] = value;
    }

    /// The bodies that arrived since the last call.
    pub(crate) fn bodies(&self) -> Vec<Bytes> {
        std::mem::take(&mut *self.shared.bodies.lock().unwrap())
    }
}

/// How often the body asks for routed experts.
pub(crate) fn questions(body: &[u8]) -> usize {
    count(body, b"\"return_routed_experts\"")
}

/// How often the body asks vLLM for token ids.
pub(crate) fn id_questions(body: &[u8]) -> usize {
    count(body, b"\"return_token_ids\"")
}

fn count(body: &[u8], needle: &[u8]) -> usize {
    body.windows(needle.len()).filter(|window| *window == needle).count()
}

/// The answer as a client that did not ask should see it, and with the member `experts` in it.
pub(crate) fn document(prompt: usize, rank: u64, experts: &str) -> String {
    format!(
        "{{\"text\": \"a \\\"routed_experts\\\":1, é\", \"output_ids\":{GENERATED:?},\"meta_info\":{{\"id\":\"x\",\
         \"finish_reason\":{{\"type\":\"length\",\"length\":2}},\"prompt_tokens\":{prompt},\"completion_tokens\":2,\
         \"dp_rank\" : {rank}{experts},\"e2e_latency\":0.5e0}}}}\n"
    )
}

/// The same of `/v1/completions`.
pub(crate) fn completion(prompt: usize, sglext: &str) -> String {
    format!(
        "{{\"id\":\"c\",\"choices\":[{{\"text\":\"a\",\"finish_reason\":\"length\"}}]{sglext},\"usage\":\
         {{\"prompt_tokens\":{prompt},\"completion_tokens\":2}}}}"
    )
}

/// vLLM 0.30's answer, with the prompt's ids where requested, and with routed experts.
pub(crate) fn vllm_document(path: &str, prompt: usize, ids: Option<&[u32]>, experts: Option<&str>) -> String {
    let (output, ids) = (json!(ids.map(|_| GENERATED)), json!(ids));
    let (experts, total) = (json!(experts), prompt + GENERATED.len());
    let is_chat = path.ends_with("chat/completions");
    let (said, in_choice, beside) = if is_chat {
        (
            "\"message\":{\"role\":\"assistant\",\"content\":\"\\\"routed_experts\\\":\\\"a\"}",
            String::new(),
            format!(",\"prompt_token_ids\":{ids}"),
        )
    } else {
        ("\"text\":\"\\\"token_ids\\\":[1]\"", format!(",\"prompt_token_ids\":{ids}"), String::new())
    };
    format!(
        "{{\"id\":\"x\",\"model\":\"tiny\",\"choices\":[{{\"index\":0,{said},\"logprobs\":null,\"finish_reason\":\"length\",\
         \"token_ids\":{output}{in_choice},\"routed_experts\":{experts}}}],\"usage\":{{\"prompt_tokens\":{prompt},\
         \"total_tokens\":{total},\"completion_tokens\":2}}{beside},\"kv_transfer_params\":null}}"
    )
}

/// The stream in the same two forms: the events before the last one carry no experts.
pub(crate) fn stream(prompt: usize, rank: u64, experts: &str) -> String {
    let last = document(prompt, rank, experts);
    format!("data: {{\"text\":\"a\",\"meta_info\":{{\"id\":\"x\"}}}}\n\ndata: {}\n\ndata: [DONE]\n\n", last.trim_end())
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match request.uri().path() {
        "/health" => return "".into_response(),
        "/version" if shared.vllm.is_some() => return Json(json!({ "version": "0.30.0" })).into_response(),
        "/metrics" if shared.vllm.is_some() => {
            return ["0", "1"]
                .map(|rank| format!("vllm:prompt_tokens_total{{engine=\"{rank}\"}} 0.0\n"))
                .concat()
                .into_response();
        }
        "/v1/completions" | "/v1/chat/completions" if shared.vllm.is_some() => return vllm(&shared, request).await,
        _ if shared.vllm.is_some() => return StatusCode::NOT_FOUND.into_response(),
        "/server_info" => return Json(shared.info.lock().unwrap().clone()).into_response(),
        "/generate" | "/v1/completions" => {}
        _ => return StatusCode::NOT_FOUND.into_response(),
    }
    let (head, body) = request.into_parts();
    let words = head.headers.get("x-mock").map_or("", |value| value.to_str().unwrap()).to_owned();
    let says = |word: &str| words.split(' ').any(|found| found == word);
    let bytes = body.collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&bytes).unwrap();
    shared.bodies.lock().unwrap().push(bytes);
    let asked = body["return_routed_experts"] == true;
    if says("bad") || says("refuse") && asked {
        let error = json!({ "error": { "message": "the engine's own words" } });
        return (StatusCode::BAD_REQUEST, Json(error)).into_response();
    }
    let completes = head.uri.path() == "/v1/completions";
    let prompt = match &body[if completes { "prompt" } else { "input_ids" }] {
        Value::Array(ids) => ids.len(),
        _ => shared.tokenizer.encode(body["text"].as_str().unwrap_or("a")).unwrap().len(),
    };
    let header = head.headers.get("x-data-parallel-rank").map(|value| value.to_str().unwrap().parse().unwrap());
    let rank = header.or(body["routed_dp_rank"].as_u64()).unwrap_or(0);
    let experts = if asked { member(&shared, &words, prompt, rank) } else { String::new() };
    let shown = if says("other-prompt") { prompt + 1 } else { prompt };
    if completes {
        let more = if says("more") { "7" } else { "null" };
        let sglext =
            experts.strip_prefix(',').map(|it| format!(",\"sglext\":{{{it},\"cached_tokens_details\":{more}}}"));
        let text = completion(shown, &sglext.unwrap_or_default());
        return ([("content-type", "application/json")], text).into_response();
    }
    if !says("stream") {
        return ([("content-type", "application/json")], document(shown, rank, &experts)).into_response();
    }
    let text = stream(shown, rank, &experts);
    let cut = if says("silent") { text.len() - 30 } else { text.len() };
    let pieces: Vec<Result<Bytes, std::io::Error>> =
        text.as_bytes()[..cut].chunks(97).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
    let pieces = tokio_stream::iter(pieces);
    let body = if says("silent") {
        Body::from_stream(pieces.chain(tokio_stream::pending()))
    } else {
        Body::from_stream(pieces)
    };
    ([("content-type", "text/event-stream")], body).into_response()
}

async fn vllm(shared: &Shared, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let header = |name| head.headers.get(name).map_or("", |value| value.to_str().unwrap());
    let words = header("x-mock");
    let bytes = body.collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&bytes).unwrap();
    shared.bodies.lock().unwrap().push(bytes);
    let text = body["prompt"].as_str().or(body["messages"][0]["content"].as_str()).unwrap();
    let prompt = shared.tokenizer.encode(text).unwrap();
    let is_stream = body["stream"] == true;
    let has_experts = shared.vllm == Some(true) && !is_stream && !words.split(' ').any(|word| word == "missing");
    let rank = header("x-data-parallel-rank").parse().unwrap_or(0);
    let experts = has_experts.then(|| {
        let ids: Vec<u16> = routes(shared, words, prompt.len(), rank).iter().map(|id| *id as u16).collect();
        let (layers, k) = (usize::from(shared.model.num_hidden_layers), usize::from(shared.model.top_k));
        encode_npy(&[ids.len() / layers / k, layers, k], &ids, false)
    });
    let ids = (body["return_token_ids"] == true).then_some(&prompt[..]);
    let text = vllm_document(head.uri.path(), prompt.len(), ids, experts.as_deref());
    if is_stream {
        return ([("content-type", "text/event-stream")], format!("data: {text}\n\ndata: [DONE]\n\n")).into_response();
    }
    ([("content-type", "application/json")], text).into_response()
}

/// Ids of [rows, layers, 4]. `local N`: so many of the four experts in each layer are on the rank that ran it.
fn routes(shared: &Shared, words: &str, prompt: usize, rank: u64) -> Vec<i32> {
    let says = |word: &str| words.split(' ').any(|found| found == word);
    let rows = prompt + GENERATED.len() - if says("wrong-rows") { 0 } else { 1 };
    let local: i32 = words.split_once("local ").map_or(4, |(_, rest)| rest.split(' ').next().unwrap().parse().unwrap());
    let each = i32::from(shared.model.num_experts / shared.ranks);
    let own = each * rank as i32;
    let other = (own + each) % i32::from(shared.model.num_experts);
    let route: Vec<i32> = (0..4).map(|slot| if slot < local { own + slot } else { other + slot }).collect();
    let mut ids = route.repeat(rows * usize::from(shared.model.num_hidden_layers));
    if says("bad-ids") {
        ids[5] = 32;
    }
    if says("twice") {
        ids[1] = ids[0];
    }
    ids
}

/// The member with its comma.
fn member(shared: &Shared, words: &str, prompt: usize, rank: u64) -> String {
    let says = |word: &str| words.split(' ').any(|found| found == word);
    let ids = routes(shared, words, prompt, rank);
    match words {
        _ if says("missing") => String::new(),
        _ if says("null") => ",\"routed_experts\":null".to_owned(),
        _ if says("no-base64") => ",\"routed_experts\":\"!!!!\"".to_owned(),
        _ if says("malformed") => ",\"routed_experts\":\"AAAA\",,".to_owned(),
        _ => format!(",\"routed_experts\":\"{}\"", encode_routed_experts(&ids)),
    }
}
