//! SGLang and vLLM as far as `profile record` and the gateway see them: the routes, the fields and the encodings of
//! several versions, around a made-up router. Tests include this file, and the example beside it serves it for the
//! guides in `docs/`.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "a test double")]

#[path = "about.rs"]
mod about;
#[path = "refusal.rs"]
mod refusal;
#[path = "stream.rs"]
mod stream;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use semmoe_engines::recording::encode_npy;
use semmoe_engines::sglang::encode_routed_experts;
use semmoe_tables::ModelInfo;
use semmoe_text::{Budget, ChatTemplate, Given, Tokenizer};
use serde_json::{Map, Value, json};
use tokio::sync::Notify;

use about::Served;
use refusal::Asked;

/// Which engine, and where its version puts things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `sglext` of the answer, `/server_info`; prompt ids beside `meta_info`. A chat's ids are in `sglext`, the
    /// output's as a list for each choice; a completion's are in the choice.
    Sglang0_5_23,
    /// As 0.5.23, but it reports ids in the choice of a chat only, and only those of the prompt.
    Sglang0_5_16,
    /// `sgl_ext` of the choice, `/get_server_info`; prompt ids inside `meta_info`.
    Sglang0_5_10,
    /// `.npy` in the choice; a chat's prompt ids beside the choices, a completion's in the choice.
    Vllm,
}

impl Dialect {
    /// As the engine reports it.
    pub fn version(self) -> &'static str {
        match self {
            Dialect::Sglang0_5_23 => "0.5.23",
            Dialect::Sglang0_5_16 => "0.5.16",
            Dialect::Sglang0_5_10 => "0.5.10",
            Dialect::Vllm => "0.32.0",
        }
    }
}

/// The faults of answers to prompts that begin with some token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    FewerRows,
    MoreRows,
    ForeignExpert,
    SameExpertTwice,
    Truncated,
    NoRoutes,
    OtherPrompt,
    AllAlike,
    WrongShape,
    TooLong,
    Down,
    NotJson,
}

/// How texts become tokens.
#[derive(Debug)]
pub enum Texts {
    /// A token a byte.
    Bytes,
    /// The model's own.
    Model(Box<Tokenizer>, Option<Box<ChatTemplate>>),
}

#[derive(Debug)]
pub struct Engine {
    pub dialect: Dialect,
    pub model: ModelInfo,
    /// The checkpoint that the engine reports.
    pub model_path: String,
    pub texts: Texts,
    /// By the first token of a prompt.
    pub faults: Mutex<HashMap<u32, Fault>>,
    /// Prompts that ran, faulty ones included.
    pub ran: Mutex<Vec<Vec<u32>>>,
    pub requests: AtomicU64,
    /// After so many requests everything answers 503.
    pub dies_after: AtomicU64,
    pub ranks: Ranks,
    /// Its start options: whether it gives routed experts, and SGLang's `--init-expert-location`.
    pub gives_routes: bool,
    pub init_expert_location: String,
    /// Another version to report than the dialect's.
    pub version: Option<String>,
    /// Tokens of a prompt and its answer at most.
    pub context: u64,
    /// In every request but the first, the routes of so many of a prompt's first tokens are those of other experts.
    pub unsteady_tokens: usize,
}

/// Attention-DP ranks, and what runs on them.
#[derive(Debug)]
pub struct Ranks {
    pub count: u16,
    /// Whether requests last until the loads were asked for twice (a second at most), so that they are seen in them.
    pub linger: AtomicBool,
    /// Ranks that requests ran on, and whether they were pinned to them.
    pub ran: Mutex<Vec<(u16, bool)>>,
    running: Mutex<Vec<u64>>,
    served: Mutex<Vec<Served>>,
    turn: AtomicU64,
    asked: Notify,
}

impl Ranks {
    pub fn new(count: u16) -> Self {
        Ranks {
            count,
            linger: AtomicBool::new(false),
            ran: Mutex::default(),
            running: Mutex::new(vec![0; usize::from(count)]),
            served: Mutex::new(vec![Served::default(); usize::from(count)]),
            turn: AtomicU64::new(0),
            asked: Notify::new(),
        }
    }

    /// Requests that run on each rank now.
    fn loads(&self) -> Vec<u64> {
        self.asked.notify_waiters();
        self.running.lock().unwrap().clone()
    }

    /// Runs something on the rank of a pin, or on the next one.
    async fn run<T>(&self, pin: Option<u16>, work: impl FnOnce(u16) -> T) -> T {
        let next = || (self.turn.fetch_add(1, Ordering::SeqCst) % u64::from(self.count)) as u16;
        let rank = pin.unwrap_or_else(next);
        self.ran.lock().unwrap().push((rank, pin.is_some()));
        self.running.lock().unwrap()[usize::from(rank)] += 1;
        if self.linger.load(Ordering::SeqCst) {
            // Twice: who asked first must still find it running when it looks at its own count.
            for _ in 0..2 {
                let _ = tokio::time::timeout(Duration::from_millis(500), self.asked.notified()).await;
            }
        }
        let done = work(rank);
        self.running.lock().unwrap()[usize::from(rank)] -= 1;
        done
    }
}

impl Engine {
    pub fn new(dialect: Dialect, model: ModelInfo, texts: Texts) -> Self {
        Engine {
            dialect,
            model_path: format!("/models/{}", model.model),
            model,
            texts,
            faults: Mutex::default(),
            ran: Mutex::default(),
            requests: AtomicU64::new(0),
            dies_after: AtomicU64::new(u64::MAX),
            ranks: Ranks::new(1),
            gives_routes: true,
            init_expert_location: "trivial".to_owned(),
            version: None,
            context: 4096,
            unsteady_tokens: 0,
        }
    }

    fn version(&self) -> &str {
        self.version.as_deref().unwrap_or(self.dialect.version())
    }
}

pub fn router(engine: Arc<Engine>) -> Router {
    Router::new().fallback(answer).with_state(engine)
}

/// The made-up router: neighbours in a ring, from a place that the token and the layer decide.
pub fn experts(token: u32, layer: u16, model: &ModelInfo) -> Vec<u16> {
    let mixed = (u64::from(token) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(layer) << 40);
    let first = (mixed >> 33) % u64::from(model.num_experts);
    (0..u64::from(model.top_k)).map(|i| ((first + i) % u64::from(model.num_experts)) as u16).collect()
}

/// The tokens generated after a prompt.
pub fn generated(prompt: &[u32], max_tokens: u32, vocab_size: u32) -> Vec<u32> {
    let sum: u32 = prompt.iter().fold(0, |sum, id| sum.wrapping_mul(31).wrapping_add(*id));
    (0..max_tokens).map(|i| sum.wrapping_add(i * 7) % vocab_size.min(200)).collect()
}

async fn answer(
    State(engine): State<Arc<Engine>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let path = uri.path();
    if method == Method::GET {
        return about::answer(&engine, path);
    }
    if engine.requests.fetch_add(1, Ordering::SeqCst) >= engine.dies_after.load(Ordering::SeqCst) {
        return (StatusCode::SERVICE_UNAVAILABLE, "no healthy worker").into_response();
    }
    let has_route = match path {
        "/v1/completions" | "/v1/chat/completions" => true,
        "/generate" => engine.dialect != Dialect::Vllm,
        _ => false,
    };
    if !has_route {
        return about::not_found();
    }
    let asked = Asked { engine: &engine, path };
    let body = match asked.read(&headers, &body) {
        Ok(body) => body,
        Err(refused) => return *refused,
    };
    let pin = match asked.pin(&headers, &body) {
        Ok(pin) => pin,
        Err(refused) => return *refused,
    };
    let answer = |rank| if path == "/generate" { generate(&asked, &body, rank) } else { openai(&asked, &body, rank) };
    engine.ranks.run(pin, |rank| answer(rank).unwrap_or_else(|refused| *refused)).await
}

/// Server-sent events.
fn events(documents: &[Value]) -> Response {
    let text: String = documents.iter().map(|document| format!("data: {document}\n\n")).collect();
    ([("content-type", "text/event-stream; charset=utf-8")], text + "data: [DONE]\n\n").into_response()
}

/// A prompt that ran.
struct Run {
    prompt: Vec<u32>,
    output: Vec<u32>,
    fault: Option<Fault>,
}

impl Run {
    fn new(engine: &Engine, prompt: Vec<u32>, max_tokens: u64, rank: u16) -> Result<Self, Box<Response>> {
        let fault = prompt.first().and_then(|first| engine.faults.lock().unwrap().get(first).copied());
        engine.ran.lock().unwrap().push(prompt.clone());
        let refused = match fault {
            Some(Fault::Down) => Some((StatusCode::SERVICE_UNAVAILABLE, "down".to_owned())),
            Some(Fault::NotJson) => Some((StatusCode::OK, "<html>".to_owned())),
            Some(Fault::TooLong) => {
                let message = format!(
                    "This model's maximum context length is 4096 tokens, however you requested {} tokens",
                    prompt.len()
                );
                Some((StatusCode::BAD_REQUEST, json!({ "object": "error", "message": message }).to_string()))
            }
            _ => None,
        };
        if let Some(refused) = refused {
            return Err(Box::new(refused.into_response()));
        }
        let output = generated(&prompt, max_tokens as u32, engine.model.vocab_size);
        Served::count(&engine.ranks.served, rank, prompt.len(), output.len());
        Ok(Run { prompt, output, fault })
    }

    fn seen_prompt(&self) -> Vec<u32> {
        let mut prompt = self.prompt.clone();
        if self.fault == Some(Fault::OtherPrompt) {
            prompt.push(1);
        }
        prompt
    }

    /// Rows of all layers; dense ones are zeros, as the buffers of both engines.
    fn routes(&self, engine: &Engine) -> Option<String> {
        if !engine.gives_routes {
            return None;
        }
        let model = &engine.model;
        let (k, hidden) = (usize::from(model.top_k), usize::from(model.num_hidden_layers));
        let mut tokens = [&self.prompt[..], &self.output[..self.output.len().saturating_sub(1)]].concat();
        match self.fault {
            Some(Fault::FewerRows) => tokens.truncate(tokens.len() - 1),
            Some(Fault::MoreRows) => tokens.push(1),
            Some(Fault::AllAlike) => tokens.fill(1),
            Some(Fault::NoRoutes) => return None,
            _ => {}
        }
        let mut ids: Vec<u16> = Vec::new();
        let unsteady = if engine.ran.lock().unwrap().len() > 1 { engine.unsteady_tokens } else { 0 };
        for (position, token) in tokens.iter().enumerate() {
            let shift = if position < unsteady { model.top_k } else { 0 };
            for layer in 0..model.num_hidden_layers {
                match model.layer_ids.contains(&layer) {
                    true => ids.extend(
                        experts(*token, layer, model).into_iter().map(|expert| (expert + shift) % model.num_experts),
                    ),
                    false => ids.extend(std::iter::repeat_n(0, k)),
                }
            }
        }
        let moe = usize::from(model.layer_ids[0]) * k;
        match self.fault {
            Some(Fault::ForeignExpert) => ids[moe] = model.num_experts,
            Some(Fault::SameExpertTwice) => ids[moe] = ids[moe + 1],
            _ => {}
        }
        let shape =
            if self.fault == Some(Fault::WrongShape) { [tokens.len(), k, hidden] } else { [tokens.len(), hidden, k] };
        let mut text = match engine.dialect {
            Dialect::Vllm => encode_npy(&shape, &ids, model.num_experts > 256),
            _ => encode_routed_experts(&ids.iter().map(|&id| i32::from(id)).collect::<Vec<_>>()),
        };
        if self.fault == Some(Fault::Truncated) {
            text.truncate(text.len() - 5);
        }
        Some(text)
    }

    fn usage(&self) -> Value {
        let (prompt, output) = (self.seen_prompt().len(), self.output.len());
        json!({ "prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output, "prompt_tokens_details": null })
    }
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

fn encode(engine: &Engine, text: &str) -> Vec<u32> {
    match &engine.texts {
        Texts::Bytes => text.bytes().map(u32::from).collect(),
        Texts::Model(tokenizer, _) => tokenizer.encode(text).unwrap(),
    }
}

fn chat_ids(engine: &Engine, messages: &Value) -> Vec<u32> {
    match &engine.texts {
        Texts::Model(_, Some(template)) => {
            encode(engine, &template.render(messages, Given::default(), Budget::default()).unwrap())
        }
        _ => {
            let turns = messages.as_array().unwrap().iter();
            encode(engine, &turns.map(|turn| turn["content"].as_str().unwrap()).collect::<Vec<_>>().join("|"))
        }
    }
}

fn is_set(body: &Value, field: &str) -> bool {
    body[field] == json!(true)
}

fn generate(asked: &Asked<'_>, body: &Value, rank: u16) -> Result<Response, Box<Response>> {
    let engine = asked.engine;
    let prompt = ids(&body["input_ids"]).unwrap_or_else(|| encode(engine, body["text"].as_str().unwrap_or("")));
    let max_tokens = body["sampling_params"]["max_new_tokens"].as_u64().unwrap_or(128);
    let stream = is_set(body, "stream");
    asked.fits(prompt.len(), max_tokens, stream)?;
    let run = Run::new(engine, prompt, max_tokens, rank)?;
    let documents: Vec<Value> = if stream {
        (1..=run.output.len()).map(|tokens| generate_document(engine, body, &run, rank, tokens)).collect()
    } else {
        vec![generate_document(engine, body, &run, rank, run.output.len())]
    };
    Ok(if stream { events(&documents) } else { Json(documents[0].clone()).into_response() })
}

/// The answer of `/generate` after so many tokens.
fn generate_document(engine: &Engine, body: &Value, run: &Run, rank: u16, tokens: usize) -> Value {
    let finished = tokens == run.output.len();
    let reason = json!({ "type": "length", "length": run.output.len() });
    let mut meta = json!({
        "id": "0af7651916cd43dd8448eb211c80319c", "finish_reason": finished.then_some(reason),
        "prompt_tokens": run.seen_prompt().len(), "weight_version": "default", "total_retractions": 0,
        "completion_tokens": tokens, "cached_tokens": 0, "cached_tokens_details": null,
        "dp_rank": (engine.ranks.count > 1).then_some(rank),
        "e2e_latency": 0.012,
    });
    if finished && is_set(body, "return_routed_experts") {
        meta["routed_experts"] = json!(run.routes(engine));
    }
    let mut answer = json!({ "text": " ...", "output_ids": run.output[..tokens] });
    if is_set(body, "return_prompt_token_ids") {
        match engine.dialect {
            Dialect::Sglang0_5_10 => meta["prompt_token_ids"] = json!(run.seen_prompt()),
            _ => answer["prompt_token_ids"] = json!(run.seen_prompt()),
        }
    }
    answer["meta_info"] = meta;
    answer
}

fn openai(asked: &Asked<'_>, body: &Value, rank: u16) -> Result<Response, Box<Response>> {
    let (engine, chat) = (asked.engine, asked.path.contains("chat"));
    let prompt = match (chat, &body["prompt"]) {
        (true, _) => chat_ids(engine, &body["messages"]),
        (false, Value::String(text)) => encode(engine, text),
        (false, list) => ids(list).unwrap(),
    };
    let max_tokens = body["max_tokens"].as_u64().or(body["max_completion_tokens"].as_u64()).unwrap_or(16);
    asked.fits(prompt.len(), max_tokens, is_set(body, "stream"))?;
    let run = Run::new(engine, prompt, max_tokens, rank)?;
    if is_set(body, "stream") {
        return Ok(events(&stream::documents(engine, body, &run, chat)));
    }
    Ok(Json(openai_answer(engine, body, &run, chat)).into_response())
}

fn openai_answer(engine: &Engine, body: &Value, run: &Run, chat: bool) -> Value {
    let mut choice = json!({ "index": 0, "logprobs": null, "finish_reason": "length" });
    match chat {
        true => {
            choice["message"] =
                json!({ "role": "assistant", "content": " ...", "reasoning_content": null, "tool_calls": null })
        }
        false => choice["text"] = json!(" ..."),
    }
    let object = if chat { "chat.completion" } else { "text_completion" };
    let id = if chat { "chatcmpl-0af7651916cd43dd8448eb211c80319c" } else { "cmpl-0af7651916cd43dd8448eb211c80319c" };
    let mut answer = json!({
        "id": id, "object": object, "created": 1_767_225_600, "model": named(engine, body), "usage": run.usage(),
    });
    match engine.dialect {
        Dialect::Vllm => {
            let wanted = is_set(body, "return_token_ids");
            choice["stop_reason"] = Value::Null;
            // Left out where the server does not return them; null otherwise means that this request has none.
            choice["routed_experts"] = json!(run.routes(engine));
            choice["token_ids"] = json!(wanted.then_some(&run.output));
            let holder = if chat { &mut answer } else { &mut choice };
            holder["prompt_token_ids"] = json!(wanted.then(|| run.seen_prompt()));
        }
        Dialect::Sglang0_5_23 | Dialect::Sglang0_5_16 | Dialect::Sglang0_5_10 => {
            choice["matched_stop"] = Value::Null;
            answer["metadata"] = json!({ "weight_version": "default" });
            sglang_ids(engine.dialect, body, run, &mut choice);
            let extension = extension(engine, body, run, chat);
            match engine.dialect {
                _ if extension.is_empty() => {}
                Dialect::Sglang0_5_10 => choice["sgl_ext"] = extension.into(),
                _ => answer["sglext"] = extension.into(),
            }
        }
    }
    answer["choices"] = json!([choice]);
    answer
}

/// SGLang answers with whatever name it was asked for.
fn named<'a>(engine: &'a Engine, body: &'a Value) -> &'a str {
    match engine.dialect {
        Dialect::Vllm => &engine.model.model,
        _ => body["model"].as_str().unwrap_or(&engine.model.model),
    }
}

/// The ids that SGLang puts into a choice. A completion and a chat have different names for those of the output.
fn sglang_ids(dialect: Dialect, body: &Value, run: &Run, choice: &mut Value) {
    let all = is_set(body, "return_token_ids") && dialect == Dialect::Sglang0_5_23;
    let chat = choice.get("message").is_some();
    let prompt = chat && is_set(body, "return_prompt_token_ids") && dialect != Dialect::Sglang0_5_10;
    if all || prompt {
        choice["prompt_token_ids"] = json!(run.seen_prompt());
    }
    if all {
        choice[if chat { "response_token_ids" } else { "token_ids" }] = json!(run.output);
    }
}

fn extension(engine: &Engine, body: &Value, run: &Run, chat: bool) -> Map<String, Value> {
    let mut extension = Map::new();
    if is_set(body, "return_routed_experts") {
        extension.insert("routed_experts".into(), json!(run.routes(engine)));
    }
    let (newest, oldest) = (engine.dialect == Dialect::Sglang0_5_23, engine.dialect == Dialect::Sglang0_5_10);
    let has_ids = oldest || (newest && chat);
    if has_ids && is_set(body, "return_input_ids_in_sglext") {
        extension.insert("input_ids".into(), json!(run.seen_prompt()));
    }
    if has_ids && is_set(body, "return_output_ids_in_sglext") {
        let ids = if newest { json!([run.output]) } else { json!(run.output) };
        extension.insert("output_ids".into(), ids);
    }
    extension
}
