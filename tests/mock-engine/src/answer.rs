//! Answers to requests as real engines give them; streams are in [`crate::stream`].

use std::io;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::HeaderMap;
use semmoe_text::{Budget, Given};
use serde_json::{Map, Value, json};
use tokio_stream::StreamExt;

use crate::canned::{event_stream, in_place_of};
use crate::dialect::{CHAT, COMPLETIONS, Extras, GENERATE, MESSAGES, RESPONSES};
use crate::engine::{Engine, Ran, Settings, Texts};
use crate::fault::Fault;
use crate::refusal::{Asked, Kind};
use crate::routes::{encoded, generated};
use crate::{about, stream};

/// The text of every answer: it contains JSON members that readers must only accept outside of texts.
pub(crate) const SAID: &str = "\"dp_rank\":77,\"routed_experts\":\"a\"";

pub(crate) async fn answer(
    engine: &Engine,
    path: &str,
    headers: &HeaderMap,
    body: &[u8],
    fault: Option<Fault>,
) -> Result<Response, Box<Response>> {
    let has_route = match path {
        CHAT | COMPLETIONS | RESPONSES | MESSAGES => true,
        GENERATE => !engine.dialect.is_vllm(),
        _ => false,
    };
    if !has_route {
        return Ok(about::not_found());
    }
    let asked = Asked { engine, path };
    let body = asked.read(headers, body)?;
    let pin = asked.pin(headers, &body)?;
    let (prompt, max_tokens) = prompt(engine, path, &body);
    let stream = is_set(&body, "stream");
    asked.fits(&prompt, max_tokens, stream)?;
    let fault = fault.or_else(|| engine.settings().faults.get(&prompt[0]).cloned());
    if fault == Some(Fault::RefusesRoutes) && is_set(&body, "return_routed_experts") {
        return Err(asked.refuse(Kind::Request, "routed experts are not returned"));
    }
    let rank = engine.rank(pin);
    engine.log(Ran { body: body.clone(), prompt: prompt.clone(), rank, pin });
    if let Some(answer) = in_place_of(engine, fault.as_ref(), &prompt).await {
        return Ok(answer);
    }
    let running = engine.occupy(rank).await;
    let output = generated(&prompt, max_tokens as u32, engine.model.vocab_size);
    running.count(prompt.len(), output.len(), matches!(path, COMPLETIONS | GENERATE));
    let run = Run { prompt, output, fault, rank };
    if !stream {
        let token_time = engine.settings().token_time;
        tokio::time::sleep(token_time * run.output.len() as u32).await;
    }
    if path == GENERATE {
        return Ok(generate(engine, &body, &run, stream));
    }
    Ok(match (path, stream) {
        (CHAT | COMPLETIONS, true) => streamed(engine, &run, &stream::documents(engine, &body, &run, path == CHAT)),
        (CHAT | COMPLETIONS, false) => Json(openai(engine, &body, &run, path == CHAT)).into_response(),
        // The gateway reads nothing from these.
        _ => Json(json!({ "id": "0", "model": engine.model.model, "output": [] })).into_response(),
    })
}

/// The prompt's tokens, and the number to generate.
fn prompt(engine: &Engine, path: &str, body: &Value) -> (Vec<u32>, u64) {
    let text_or_ids = |value: &Value| ids(value).unwrap_or_else(|| encode(engine, value.as_str().unwrap_or("")));
    let prompt = match path {
        GENERATE => text_or_ids(if body["input_ids"].is_null() { &body["text"] } else { &body["input_ids"] }),
        CHAT | MESSAGES => chat_ids(engine, &body["messages"]),
        RESPONSES => text_or_ids(&body["input"]),
        _ => text_or_ids(&body["prompt"]),
    };
    let limits = [
        &body["sampling_params"]["max_new_tokens"],
        &body["max_tokens"],
        &body["max_completion_tokens"],
        &body["max_output_tokens"],
    ];
    let usual = engine.settings().usual_tokens.unwrap_or(if path == GENERATE { 128 } else { 16 });
    (prompt, limits.into_iter().find_map(Value::as_u64).unwrap_or(usual))
}

/// Server-sent events.
pub(crate) fn events(documents: &[Value]) -> Response {
    event_stream(event_text(documents))
}

fn event_text(documents: &[Value]) -> String {
    let text: String = documents.iter().map(|document| format!("data: {document}\n\n")).collect();
    text + "data: [DONE]\n\n"
}

/// The events of an answer, split into pieces if the test requires it.
fn streamed(engine: &Engine, run: &Run, documents: &[Value]) -> Response {
    let Settings { piece_bytes, token_time, .. } = engine.settings().clone();
    let text = spoiled(run, event_text(documents));
    let falls_silent = run.fault == Some(Fault::FallsSilent);
    let sent = &text[..text.len() - if falls_silent { 30 } else { 0 }];
    let pieces: Vec<Bytes> = match token_time {
        Duration::ZERO => sent.as_bytes().chunks(piece_bytes).map(Bytes::copy_from_slice).collect(),
        _ => sent.split_inclusive("\n\n").map(|event| event.to_owned().into()).collect(),
    };
    let pieces = tokio_stream::iter(pieces).then(move |piece| async move {
        tokio::time::sleep(token_time).await;
        Ok::<_, io::Error>(piece)
    });
    if falls_silent {
        return event_stream(Body::from_stream(pieces.chain(tokio_stream::pending())));
    }
    event_stream(Body::from_stream(pieces))
}

/// The text of an answer, damaged in ways that no serializer would produce.
fn spoiled(run: &Run, text: String) -> String {
    let experts = "\"routed_experts\":\"AAAA\"";
    if run.fault == Some(Fault::Malformed) { text.replace(experts, &format!("{experts},,")) } else { text }
}

/// A completed request.
pub(crate) struct Run {
    pub(crate) prompt: Vec<u32>,
    pub(crate) output: Vec<u32>,
    pub(crate) fault: Option<Fault>,
    pub(crate) rank: u16,
}

impl Run {
    pub(crate) fn seen_prompt(&self) -> Vec<u32> {
        let more = (self.fault == Some(Fault::OtherPrompt)).then_some(1);
        self.prompt.iter().copied().chain(more).collect()
    }

    pub(crate) fn usage(&self) -> Value {
        let (prompt, output) = (self.seen_prompt().len(), self.output.len());
        json!({ "prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output, "prompt_tokens_details": null })
    }
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

fn encode(engine: &Engine, text: &str) -> Vec<u32> {
    match &engine.texts {
        Texts::Model(tokenizer, _) => tokenizer.encode(text).unwrap(),
        Texts::Bytes | Texts::Unread => text.bytes().map(u32::from).collect(),
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

pub(crate) fn is_set(body: &Value, field: &str) -> bool {
    body[field] == json!(true)
}

fn generate(engine: &Engine, body: &Value, run: &Run, stream: bool) -> Response {
    let document = |tokens| generate_document(engine, body, run, tokens);
    if stream {
        return streamed(engine, run, &(1..=run.output.len()).map(document).collect::<Vec<_>>());
    }
    let text = spoiled(run, document(run.output.len()).to_string());
    ([("content-type", "application/json")], text).into_response()
}

/// The answer of `/generate` after `tokens` tokens.
fn generate_document(engine: &Engine, body: &Value, run: &Run, tokens: usize) -> Value {
    let finished = tokens == run.output.len();
    let reason = match run.fault {
        Some(Fault::Aborted) => json!({ "type": "abort", "message": "no memory" }),
        _ => json!({ "type": "length", "length": run.output.len() }),
    };
    let output = if run.fault == Some(Fault::NothingGenerated) { &[] } else { &run.output[..tokens] };
    let mut prompt_tokens = run.seen_prompt().len();
    if run.fault == Some(Fault::OtherPromptCount) {
        prompt_tokens += 90;
    }
    let Settings { ranks, first_pin, .. } = engine.settings().clone();
    let mut meta = json!({
        "id": "0af7651916cd43dd8448eb211c80319c", "finish_reason": finished.then_some(reason),
        "prompt_tokens": prompt_tokens, "weight_version": "default", "total_retractions": 0,
        "completion_tokens": tokens, "cached_tokens": 0, "cached_tokens_details": null,
        "dp_rank": (ranks > 1).then_some(run.rank + first_pin), "e2e_latency": 0.012,
    });
    if finished && is_set(body, "return_routed_experts") {
        meta["routed_experts"] = json!(encoded(engine, run));
    }
    let mut answer = json!({ "text": SAID, "output_ids": output });
    if is_set(body, "return_prompt_token_ids") {
        let holder = if engine.dialect.extras == Extras::SglExt { &mut meta } else { &mut answer };
        holder["prompt_token_ids"] = json!(run.seen_prompt());
    }
    answer["meta_info"] = meta;
    answer
}

fn openai(engine: &Engine, body: &Value, run: &Run, chat: bool) -> Value {
    let mut choice = json!({ "index": 0, "logprobs": null, "finish_reason": "length" });
    if chat {
        choice["message"] =
            json!({ "role": "assistant", "content": SAID, "reasoning_content": null, "tool_calls": null });
    } else {
        choice["text"] = json!(SAID);
    }
    let object = if chat { "chat.completion" } else { "text_completion" };
    let id = if chat { "chatcmpl-0af7651916cd43dd8448eb211c80319c" } else { "cmpl-0af7651916cd43dd8448eb211c80319c" };
    let mut answer = json!({
        "id": id, "object": object, "created": 1_767_225_600, "model": named(engine, body), "usage": run.usage(),
    });
    if engine.dialect.is_vllm() {
        let wanted = is_set(body, "return_token_ids");
        choice["stop_reason"] = Value::Null;
        // Omitted if the server does not return experts; null means that this request has none.
        choice["routed_experts"] = json!(encoded(engine, run));
        choice["token_ids"] = json!(wanted.then_some(&run.output));
        let holder = if chat { &mut answer } else { &mut choice };
        holder["prompt_token_ids"] = json!(wanted.then(|| run.seen_prompt()));
    } else {
        choice["matched_stop"] = Value::Null;
        answer["metadata"] = json!({ "weight_version": "default" });
        sglang_ids(engine.dialect.extras, body, run, &mut choice);
        if is_set(body, "return_meta_info") {
            choice["meta_info"] = json!({ "dp_rank": run.rank + engine.settings().first_pin });
        }
        let extension = extension(engine, body, run, chat);
        match engine.dialect.extras {
            _ if extension.is_empty() => {}
            Extras::SglExt => choice["sgl_ext"] = extension.into(),
            _ => answer["sglext"] = extension.into(),
        }
    }
    answer["choices"] = json!([choice]);
    answer
}

/// SGLang echoes the requested name.
pub(crate) fn named<'a>(engine: &'a Engine, body: &'a Value) -> &'a str {
    let asked = body["model"].as_str().filter(|_| !engine.dialect.is_vllm());
    asked.unwrap_or(&engine.model.model)
}

/// The ids that SGLang adds to a choice. Completions and chats name the output's ids differently.
fn sglang_ids(extras: Extras, body: &Value, run: &Run, choice: &mut Value) {
    let all = is_set(body, "return_token_ids") && extras == Extras::Sglext;
    let chat = choice.get("message").is_some();
    let prompt = chat && is_set(body, "return_prompt_token_ids") && extras != Extras::SglExt;
    if all || prompt {
        choice["prompt_token_ids"] = json!(run.seen_prompt());
    }
    if all {
        choice[if chat { "response_token_ids" } else { "token_ids" }] = json!(run.output);
    }
}

pub(crate) fn extension(engine: &Engine, body: &Value, run: &Run, chat: bool) -> Map<String, Value> {
    let mut extension = Map::new();
    if is_set(body, "return_routed_experts") {
        extension.insert("routed_experts".into(), json!(encoded(engine, run)));
    }
    let (newest, oldest) = (engine.dialect.extras == Extras::Sglext, engine.dialect.extras == Extras::SglExt);
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
