//! Answers that replace an engine's: server faults, and engines whose bodies are ignored.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio_stream::wrappers::ReceiverStream;

use crate::engine::{Engine, Texts};
use crate::fault::Fault;

impl Engine {
    /// Sets the answers to chats on `/tokenize` and `/v1/chat/completions/render`, by path and body. By default these
    /// routes do not exist.
    pub fn render(&self, render: impl Fn(&str, &Value) -> Result<Value, u16> + Send + 'static) {
        *self.rendering.lock().unwrap() = Some(Box::new(render));
    }

    /// Sets the only model that it serves. "any": lists one and accepts every name; empty: has no list.
    pub fn lists(&self, name: &str) {
        self.settings().lists = (!name.is_empty()).then(|| name.to_owned());
    }

    /// Sets the fault of requests without the header `x-mock`.
    pub fn behave(&self, behaviour: &str) {
        behaviour.clone_into(&mut self.settings().behaviour);
    }

    /// Lets streams send `events` more events.
    pub fn release(&self, events: usize) {
        self.events.add_permits(events);
    }

    /// Bytes of an endless answer that were sent before the reader stopped.
    pub async fn flooded(&self) -> usize {
        let mut before = 0;
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let now = self.flooded.load(Ordering::SeqCst);
            if now > 0 && now == before {
                return now;
            }
            before = now;
        }
    }

    fn watch(&self) -> Watch {
        Watch { gone: self.gone.clone(), done: false }
    }
}

/// Reports when an answer is dropped before its end.
struct Watch {
    gone: UnboundedSender<()>,
    done: bool,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.done {
            let _ = self.gone.send(());
        }
    }
}

/// The gateway's query for the token ids of a chat, which names no model and does not count as a request.
pub(crate) fn rendered(engine: &Engine, path: &str, body: &Bytes) -> Option<Response> {
    if !["/tokenize", "/v1/chat/completions/render"].contains(&path) {
        return None;
    }
    let chat = serde_json::from_slice::<Value>(body)
        .ok()
        .filter(|chat| ["messages", "prompt"].iter().any(|member| chat.get(member).is_some()))
        .filter(|chat| chat.get("model").is_none())?;
    let rendering = engine.rendering.lock().unwrap();
    let shown = rendering.as_ref().map_or(Err(404), |render| render(path, &chat));
    Some(shown.map_or_else(
        |status| StatusCode::from_u16(status).unwrap().into_response(),
        |shown| Json(shown).into_response(),
    ))
}

/// The refusal of a model that it does not list.
pub(crate) fn refused(engine: &Engine, body: &[u8]) -> Option<Response> {
    let listed =
        engine.settings().lists.clone().filter(|name| matches!(engine.texts, Texts::Unread) && name != "any")?;
    let body = serde_json::from_slice::<Value>(body).ok()?;
    let asked = body["model"].as_str().filter(|asked| *asked != listed)?;
    let error = json!({ "error": { "message": format!("The model `{asked}` does not exist."), "code": 404 } });
    Some((StatusCode::NOT_FOUND, Json(error)).into_response())
}

/// The answer if bodies are ignored.
pub(crate) fn echo(path: &str, length: usize) -> Response {
    let headers = [("x-upstream", "yes"), ("x-semmoe-rank", "99"), ("connection", "x-private"), ("x-private", "1")];
    (headers, Json(json!({ "path": path, "length": length }))).into_response()
}

/// The answer to a prompt with a fault that replaces the engine's answer.
pub(crate) async fn in_place_of(engine: &Engine, fault: Option<&Fault>, prompt: &[u32]) -> Option<Response> {
    match fault? {
        Fault::BusyTwice if engine.attempts(prompt[0]) <= 2 => Some(StatusCode::SERVICE_UNAVAILABLE.into_response()),
        Fault::Waits => {
            engine.released.notified().await;
            None
        }
        Fault::Releases => {
            engine.released.notify_one();
            None
        }
        Fault::TooLong => {
            let length = prompt.len();
            let message =
                format!("This model's maximum context length is 4096 tokens, however you requested {length} tokens");
            Some((StatusCode::BAD_REQUEST, Json(json!({ "object": "error", "message": message }))).into_response())
        }
        fault => in_place(engine, Some(fault), "").await,
    }
}

/// The answer of a server with this fault; `None` for faults inside an engine's answer.
pub(crate) async fn in_place(engine: &Engine, fault: Option<&Fault>, path: &str) -> Option<Response> {
    let mut watch = engine.watch();
    watch.done = true;
    Some(match fault? {
        Fault::Hang => {
            watch.done = false;
            engine.hanging.notify_one();
            std::future::pending().await
        }
        Fault::Flood => flood(&engine.flooded, engine.watch()),
        Fault::Late => {
            watch.done = false;
            if let Ok(permit) = engine.events.acquire().await {
                permit.forget();
            }
            watch.done = true;
            Json(json!({ "path": path })).into_response()
        }
        fault @ (Fault::Stream | Fault::DieBetween | Fault::DieInside | Fault::Silent) => held(engine, fault.clone()),
        Fault::DieJson => half_a_document(engine),
        fault => return whole(fault),
    })
}

/// Answers that are sent at once.
fn whole(fault: &Fault) -> Option<Response> {
    let status = |status: &str| StatusCode::from_u16(status.parse().unwrap()).unwrap();
    let reported = |message: &str| Json(json!({ "error": { "message": message } }));
    let usage = |tokens: &str| json!({ "choices": [], "usage": { "prompt_tokens": tokens.parse::<u64>().unwrap() } });
    Some(match fault {
        Fault::Status(code) => {
            (StatusCode::from_u16(*code).unwrap(), reported("the engine's own words")).into_response()
        }
        Fault::Plain(code) => (status(code), "upstream connect error").into_response(),
        Fault::NotJson => "<html>".into_response(),
        Fault::Overloaded => {
            (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "30")], reported("overloaded")).into_response()
        }
        Fault::Redirects => {
            let headers = [
                ("x-upstream", "yes"),
                ("location", "http://10.0.0.1:30000/"),
                ("content-location", "/x"),
                ("refresh", "1; url=/x"),
                ("alt-svc", "h2=\":1\""),
                ("set-cookie", "a=b"),
                ("set-cookie2", "a=b"),
            ];
            (StatusCode::TEMPORARY_REDIRECT, headers, Json(json!({}))).into_response()
        }
        Fault::EveryOrigin => {
            let allowed = [("access-control-allow-origin", "*"), ("access-control-allow-credentials", "true")];
            (allowed, Json(json!({}))).into_response()
        }
        Fault::Generated(tokens) => {
            let tokens: u64 = tokens.parse().unwrap();
            Json(json!({ "choices": [], "usage": { "prompt_tokens": 3, "completion_tokens": tokens } })).into_response()
        }
        Fault::Usage(tokens) => Json(usage(tokens)).into_response(),
        Fault::UsageEvents(tokens) => {
            event_stream(format!("data: {{\"choices\":[]}}\n\ndata: {}\n\ndata: [DONE]\n\n", usage(tokens)))
        }
        Fault::Dead => (StatusCode::INTERNAL_SERVER_ERROR, Json(dead_core())).into_response(),
        Fault::DeadStream => event_stream(format!("data: {}\n\ndata: [DONE]\n\n", dead_core())),
        Fault::DeadLate => {
            let said = json!({ "choices": [{ "index": 0, "text": "a", "finish_reason": null }] });
            event_stream(format!("data: {said}\n\ndata: {}\n\ndata: [DONE]\n\n", dead_core()))
        }
        Fault::Abort => Json(aborted("text", json!(""))).into_response(),
        Fault::AbortLate => Json(aborted("text", json!("so far"))).into_response(),
        Fault::AbortStream => {
            let role = json!({ "role": "assistant", "content": "" });
            let first = json!({ "choices": [{ "index": 0, "delta": role, "finish_reason": null }] });
            let events = format!("data: {first}\n\ndata: {}\n\ndata: [DONE]\n\n", aborted("delta", json!({})));
            event_stream(events)
        }
        Fault::Experts(bytes) => {
            let text = "x".repeat(bytes.parse().unwrap());
            Json(json!({ "choices": [{ "text": text, "token_ids": null, "routed_experts": "k05VTVBZ" }] }))
                .into_response()
        }
        Fault::Say(document) => ([("content-type", "application/json")], document.clone()).into_response(),
        Fault::SayEvent(document) => event_stream(format!("data: {document}\n\n")),
        _ => return None,
    })
}

pub(crate) fn event_stream(events: impl Into<Body>) -> Response {
    ([("content-type", "text/event-stream; charset=utf-8")], events.into()).into_response()
}

fn aborted(member: &str, value: Value) -> Value {
    json!({ "choices": [{ "index": 0, member: value, "finish_reason": "abort" }] })
}

fn dead_core() -> Value {
    let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.";
    json!({ "error": { "message": message, "type": "InternalServerError", "param": null, "code": 500 } })
}

/// An endless answer, as fast as the reader takes it.
fn flood(taken: &Arc<AtomicUsize>, watch: Watch) -> Response {
    const PIECE: usize = 64 << 10;
    let pieces = futures_util::stream::unfold((Arc::clone(taken), watch), |(taken, watch)| async move {
        taken.fetch_add(PIECE, Ordering::SeqCst);
        Some((Ok::<_, Infallible>(Bytes::from(vec![b'x'; PIECE])), (taken, watch)))
    });
    Body::from_stream(pieces).into_response()
}

fn half_a_document(engine: &Engine) -> Response {
    let (sender, receiver) = mpsc::channel(2);
    let events = Arc::clone(&engine.events);
    tokio::spawn(async move {
        let _ = sender.send(Ok("{\"half\":".to_owned())).await;
        // The first half must have been sent before the connection breaks.
        if let Ok(permit) = events.acquire().await {
            permit.forget();
        }
        let _ = sender.send(Err(io::Error::other("killed"))).await;
    });
    let body = Body::from_stream(ReceiverStream::new(receiver));
    ([("content-type", "application/json"), ("content-length", "100")], body).into_response()
}

/// Three events, each when the test releases it, then the ending.
fn held(engine: &Engine, ending: Fault) -> Response {
    let (sender, receiver) = mpsc::channel::<Result<String, io::Error>>(1);
    let (permits, watch) = (Arc::clone(&engine.events), engine.watch());
    tokio::spawn(async move {
        // Moves the whole guard into the stream, whose end reports.
        let mut watch = watch;
        for event in 1..=3 {
            let granted = tokio::select! {
                permit = permits.acquire() => permit.is_ok(),
                () = sender.closed() => false,
            };
            if !granted {
                return;
            }
            permits.forget_permits(1);
            if sender.send(Ok(format!("data: {event}\n\n"))).await.is_err() {
                return;
            }
        }
        match ending {
            Fault::Stream => drop(sender.send(Ok("data: [DONE]\n\n".to_owned())).await),
            Fault::DieInside => drop(sender.send(Ok("data: {\"half".to_owned())).await),
            Fault::Silent => {
                sender.closed().await;
                return;
            }
            _ => {}
        }
        watch.done = true;
        if ending != Fault::Stream {
            let _ = sender.send(Err(io::Error::other("killed"))).await;
        }
    });
    let body = Body::from_stream(ReceiverStream::new(receiver));
    ([("content-type", "text/event-stream")], body).into_response()
}
