//! The mock engine. It has its own runtime, so that killing it closes every socket at once.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc};

use super::PATIENCE;

/// A request as it arrived at the engine.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Seen {
    /// The rank in the pin header.
    pub(crate) fn header_pin(&self) -> Option<u16> {
        self.headers.get("x-data-parallel-rank").map(|value| value.to_str().unwrap().parse().unwrap())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

struct Shared {
    seen: mpsc::UnboundedSender<Seen>,
    /// A client of the mock went away in the middle of an answer.
    gone: mpsc::UnboundedSender<()>,
    /// Each event of a stream takes one permit.
    events: Semaphore,
    health: AtomicU16,
    /// How long the health route takes, which runs the model as SGLang's does.
    health_millis: AtomicU64,
    /// The server accepts probes and answers none.
    mute: AtomicBool,
    /// Routes that need the scheduler are not answered.
    hung: AtomicBool,
    /// The longest prompt and answer together; 0: it does not say.
    context: AtomicU64,
    /// The name of the only model that it serves; "any": it lists one and takes every name; empty: it has no list.
    model: Mutex<String>,
    /// Its list of models requires this.
    models_key: Mutex<Option<String>>,
    /// It has no `/ping`.
    no_ping: AtomicBool,
    info: Mutex<Value>,
    /// Every request, probes too, must carry it.
    authorization: Mutex<Option<String>>,
    /// The behaviour for requests that do not choose one.
    behaviour: Mutex<String>,
    /// Bytes of an endless answer that somebody took.
    flooded: AtomicUsize,
    /// See [`Mock::render`].
    rendering: Mutex<Option<Render>>,
}

/// The answer to a chat on a route that shows its token ids, or a status.
type Render = Box<dyn Fn(&str, &Value) -> Result<Value, u16> + Send>;

pub(crate) struct Mock {
    pub(crate) address: SocketAddr,
    pub(crate) seen: mpsc::UnboundedReceiver<Seen>,
    pub(crate) gone: mpsc::UnboundedReceiver<()>,
    shared: Arc<Shared>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Mock {
    /// An engine with this many attention-DP ranks.
    pub(crate) fn start(ranks: u16) -> Self {
        // SGLang's own words since 0.5.22.
        Self::with_info(
            json!({ "model_path": "/models/tiny", "version": "0.5.23", "dp_size": 1, "attn_dp_size": ranks }),
        )
    }

    /// An engine that says this about itself.
    pub(crate) fn with_info(info: Value) -> Self {
        let (seen, seen_receiver) = mpsc::unbounded_channel();
        let (gone, gone_receiver) = mpsc::unbounded_channel();
        let health = AtomicU16::new(200);
        let shared = Arc::new(Shared {
            seen,
            gone,
            events: Semaphore::new(0),
            health,
            health_millis: AtomicU64::new(0),
            mute: AtomicBool::new(false),
            hung: AtomicBool::new(false),
            context: AtomicU64::new(0),
            model: Mutex::default(),
            models_key: Mutex::default(),
            no_ping: AtomicBool::new(false),
            info: Mutex::new(info),
            authorization: Mutex::default(),
            behaviour: Mutex::default(),
            flooded: AtomicUsize::new(0),
            rendering: Mutex::default(),
        });
        let mut mock = Self {
            address: ([127, 0, 0, 1], 0).into(),
            seen: seen_receiver,
            gone: gone_receiver,
            shared,
            runtime: None,
        };
        mock.listen();
        mock
    }

    /// Binds the address that it had before.
    pub(crate) fn listen(&mut self) {
        let listener = std::net::TcpListener::bind(self.address).unwrap();
        listener.set_nonblocking(true).unwrap();
        self.address = listener.local_addr().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let router = Router::new().fallback(answer).with_state(Arc::clone(&self.shared));
        runtime.spawn(async move { axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), router).await });
        self.runtime = Some(runtime);
    }

    /// As if its process was killed: when this returns, every socket is closed.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A runtime cannot be dropped inside another one.
            std::thread::spawn(move || drop(runtime)).join().unwrap();
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn set_health(&self, status: u16) {
        self.shared.health.store(status, Ordering::SeqCst);
    }

    /// As an engine's that is busy for so long with each step.
    pub(crate) fn set_health_time(&self, time: std::time::Duration) {
        self.shared.health_millis.store(time.as_millis() as u64, Ordering::SeqCst);
    }

    /// Its list of models says this.
    pub(crate) fn set_context(&self, tokens: u64) {
        self.shared.context.store(tokens, Ordering::SeqCst);
    }

    /// See [`Shared::model`].
    pub(crate) fn set_model(&self, name: &str) {
        *self.shared.model.lock().unwrap() = name.to_owned();
    }

    /// Its list of models must be asked with this, and nothing else.
    pub(crate) fn require_for_models(&self, authorization: &str) {
        *self.shared.models_key.lock().unwrap() = Some(authorization.to_owned());
    }

    /// An engine without the quick route.
    pub(crate) fn set_no_ping(&self) {
        self.shared.no_ping.store(true, Ordering::SeqCst);
    }

    /// Whether the server leaves probes without an answer.
    pub(crate) fn set_mute(&self, mute: bool) {
        self.shared.mute.store(mute, Ordering::SeqCst);
    }

    /// Whether its scheduler hangs: the server answers only `/ping`, and the rest once it goes on.
    pub(crate) fn set_hung(&self, hung: bool) {
        self.shared.hung.store(hung, Ordering::SeqCst);
    }

    pub(crate) fn set_info(&self, info: Value) {
        *self.shared.info.lock().unwrap() = info;
    }

    /// Answers 401 to requests with another `authorization`.
    pub(crate) fn require(&self, authorization: &str) {
        *self.shared.authorization.lock().unwrap() = Some(authorization.to_owned());
    }

    /// How chats are answered on `/tokenize` and `/v1/chat/completions/render`, by path and body. Otherwise it has no
    /// such routes.
    pub(crate) fn render(&self, render: impl Fn(&str, &Value) -> Result<Value, u16> + Send + 'static) {
        *self.shared.rendering.lock().unwrap() = Some(Box::new(render));
    }

    /// As the header `x-mock` of requests without one.
    pub(crate) fn behave(&self, behaviour: &str) {
        behaviour.clone_into(&mut self.shared.behaviour.lock().unwrap());
    }

    /// Bytes of an endless answer that were taken before the reader stopped.
    pub(crate) async fn flooded(&self) -> usize {
        let mut before = 0;
        loop {
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            let now = self.shared.flooded.load(Ordering::SeqCst);
            if now > 0 && now == before {
                return now;
            }
            before = now;
        }
    }

    /// Lets streams send this many more events.
    pub(crate) fn release(&self, events: usize) {
        self.shared.events.add_permits(events);
    }

    pub(crate) async fn next(&mut self) -> Seen {
        tokio::time::timeout(PATIENCE, self.seen.recv()).await.expect("a request in time").unwrap()
    }

    pub(crate) async fn next_gone(&mut self) {
        tokio::time::timeout(PATIENCE, self.gone.recv()).await.expect("a disconnect in time").unwrap();
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reports when an answer is dropped before its end.
struct Watch {
    gone: mpsc::UnboundedSender<()>,
    done: bool,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.done {
            let _ = self.gone.send(());
        }
    }
}

/// The engine's reports about itself; `None` for the routes of requests.
async fn report(shared: &Shared, path: &str, key: Option<&String>) -> Option<Response> {
    if shared.authorization.lock().unwrap().as_ref().is_some_and(|wanted| key != Some(wanted)) {
        return Some(StatusCode::UNAUTHORIZED.into_response());
    }
    while matches!(path, "/health" | "/server_info") && shared.hung.load(Ordering::SeqCst) {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let model = shared.model.lock().unwrap().clone();
    Some(match path {
        "/v1/models" if shared.models_key.lock().unwrap().as_ref().is_some_and(|wanted| key != Some(wanted)) => {
            StatusCode::UNAUTHORIZED.into_response()
        }
        "/v1/models" if !model.is_empty() => Json(json!({ "data": [{ "id": model }] })).into_response(),
        "/version" => Json(json!({ "version": "0.32.0" })).into_response(),
        "/v1/models" if shared.context.load(Ordering::SeqCst) > 0 => {
            let entry = json!({ "id": "tiny", "max_model_len": shared.context.load(Ordering::SeqCst) });
            Json(json!({ "data": [entry] })).into_response()
        }
        "/ping" if shared.no_ping.load(Ordering::SeqCst) => StatusCode::NOT_FOUND.into_response(),
        "/ping" | "/health" if shared.mute.load(Ordering::SeqCst) => std::future::pending().await,
        "/health" | "/ping" | "/v1/models" => {
            if path == "/health" {
                tokio::time::sleep(std::time::Duration::from_millis(shared.health_millis.load(Ordering::SeqCst))).await;
            }
            StatusCode::from_u16(shared.health.load(Ordering::SeqCst)).unwrap().into_response()
        }
        // The gateway's own probes are not requests; this engine does not report.
        "/v1/loads" | "/metrics" => StatusCode::NOT_FOUND.into_response(),
        "/server_info" => Json(shared.info.lock().unwrap().clone()).into_response(),
        _ => return None,
    })
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    let key = head.headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
    if let Some(report) = report(&shared, &path, key.as_ref()).await {
        return report;
    }
    let model = shared.model.lock().unwrap().clone();
    let body = body.collect().await.unwrap().to_bytes();
    if let Some(shown) = rendered(&shared, &path, &body) {
        return shown;
    }
    let asked = serde_json::from_slice::<Value>(&body).ok().and_then(|body| Some(body["model"].as_str()?.to_owned()));
    if let Some(asked) = asked.filter(|asked| !model.is_empty() && model != "any" && *asked != model) {
        let error = json!({ "error": { "message": format!("The model `{asked}` does not exist."), "code": 404 } });
        return (StatusCode::NOT_FOUND, Json(error)).into_response();
    }
    let usual = shared.behaviour.lock().unwrap().clone();
    let behaviour = head.headers.get("x-mock").map_or(usual, |value| value.to_str().unwrap().to_owned());
    let mut watch = Watch { gone: shared.gone.clone(), done: false };
    let _ = shared.seen.send(Seen { path: head.uri.to_string(), headers: head.headers, body: body.clone() });
    match behaviour.as_str() {
        "hang" => {
            let () = std::future::pending().await;
            unreachable!()
        }
        "flood" => flood(&shared, watch),
        // When the test lets it go.
        "late" => {
            if let Ok(permit) = shared.events.acquire().await {
                permit.forget();
            }
            watch.done = true;
            Json(json!({ "path": path })).into_response()
        }
        "stream" => events(&shared, watch, Ending::Clean),
        "die-between" => events(&shared, watch, Ending::Between),
        "die-inside" => events(&shared, watch, Ending::Inside),
        "silent" => events(&shared, watch, Ending::Silent),
        "die-json" => {
            watch.done = true;
            let (sender, receiver) = mpsc::channel(2);
            tokio::spawn(async move {
                let _ = sender.send(Ok("{\"half\":".to_owned())).await;
                // The half must be on its way before the connection breaks.
                if let Ok(permit) = shared.events.acquire().await {
                    permit.forget();
                }
                let _ = sender.send(Err(std::io::Error::other("killed"))).await;
            });
            let body = Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(receiver));
            ([("content-type", "application/json"), ("content-length", "100")], body).into_response()
        }
        whole => {
            watch.done = true;
            whole_answer(whole, &path, body.len())
        }
    }
}

/// The gateway's question what is made of a chat, which names no model and is no request.
fn rendered(shared: &Shared, path: &str, body: &Bytes) -> Option<Response> {
    let chat = serde_json::from_slice::<Value>(body)
        .ok()
        .filter(|chat| ["messages", "prompt"].iter().any(|member| chat.get(member).is_some()))?;
    if !["/tokenize", "/v1/chat/completions/render"].contains(&path) || chat.get("model").is_some() {
        return None;
    }
    let rendering = shared.rendering.lock().unwrap();
    let shown = rendering.as_ref().map_or(Err(404), |render| render(path, &chat));
    Some(shown.map_or_else(
        |status| StatusCode::from_u16(status).unwrap().into_response(),
        |shown| Json(shown).into_response(),
    ))
}

/// An answer without end, as fast as it is taken.
fn flood(shared: &Arc<Shared>, watch: Watch) -> Response {
    const PIECE: usize = 64 << 10;
    let pieces = futures_util::stream::unfold((Arc::clone(shared), watch), |(shared, watch)| async move {
        shared.flooded.fetch_add(PIECE, Ordering::SeqCst);
        Some((Ok::<_, Infallible>(Bytes::from(vec![b'x'; PIECE])), (shared, watch)))
    });
    Body::from_stream(pieces).into_response()
}

/// Answers that come at once.
fn whole_answer(behaviour: &str, path: &str, length: usize) -> Response {
    let status = |status: &str| StatusCode::from_u16(status.parse().unwrap()).unwrap();
    let reported = |message: &str| Json(json!({ "error": { "message": message } }));
    match behaviour.split_once(' ').unwrap_or((behaviour, "")) {
        ("", _) => {
            let headers =
                [("x-upstream", "yes"), ("x-semmoe-rank", "99"), ("connection", "x-private"), ("x-private", "1")];
            (headers, Json(json!({ "path": path, "length": length }))).into_response()
        }
        // As a proxy before an engine that is gone says it.
        ("plain", code) => (status(code), "upstream connect error").into_response(),
        ("overloaded", _) => {
            (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "30")], reported("overloaded")).into_response()
        }
        ("redirects", _) => {
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
        // As SGLang, which has a middleware for that.
        ("every-origin", _) => {
            let allowed = [("access-control-allow-origin", "*"), ("access-control-allow-credentials", "true")];
            (allowed, Json(json!({}))).into_response()
        }
        ("generated", tokens) => {
            let tokens: u64 = tokens.parse().unwrap();
            Json(json!({ "choices": [], "usage": { "prompt_tokens": 3, "completion_tokens": tokens } })).into_response()
        }
        (kind @ ("usage" | "usage-events"), tokens) => {
            let usage = json!({ "choices": [], "usage": { "prompt_tokens": tokens.parse::<u64>().unwrap() } });
            if kind == "usage" {
                return Json(usage).into_response();
            }
            let events = format!("data: {{\"choices\":[]}}\n\ndata: {usage}\n\ndata: [DONE]\n\n");
            ([("content-type", "text/event-stream")], events).into_response()
        }
        // As vLLM 0.30 answers when an engine core is dead.
        ("dead", _) => (StatusCode::INTERNAL_SERVER_ERROR, Json(dead_core())).into_response(),
        ("dead-stream", _) => event_stream(&format!("data: {}\n\ndata: [DONE]\n\n", dead_core())),
        ("dead-late", _) => event_stream(&format!("data: {}\n\ndata: {}\n\ndata: [DONE]\n\n", said("a"), dead_core())),
        // As vLLM ends the generations of an engine that it shuts down.
        ("abort", _) => Json(aborted("text", json!(""))).into_response(),
        ("abort-stream", _) => {
            let role = json!({ "role": "assistant", "content": "" });
            let first = json!({ "choices": [{ "index": 0, "delta": role, "finish_reason": null }] });
            let events = format!("data: {first}\n\ndata: {}\n\ndata: [DONE]\n\n", aborted("delta", json!({})));
            event_stream(&events)
        }
        // As vLLM answers when it is started with --enable-return-routed-experts, here with a text of so many bytes.
        ("experts", bytes) => {
            let text = "x".repeat(bytes.parse().unwrap());
            Json(json!({ "choices": [{ "text": text, "token_ids": null, "routed_experts": "k05VTVBZ" }] }))
                .into_response()
        }
        // A document of its own, whole or as an event.
        ("say", document) => ([("content-type", "application/json")], document.to_owned()).into_response(),
        ("say-event", document) => event_stream(&format!("data: {document}\n\n")),
        ("abort-late", _) => Json(aborted("text", json!("so far"))).into_response(),
        (code, _) => (status(code), reported("the engine's own words")).into_response(),
    }
}

fn event_stream(events: &str) -> Response {
    ([("content-type", "text/event-stream")], events.to_owned()).into_response()
}

fn said(text: &str) -> Value {
    json!({ "choices": [{ "index": 0, "text": text, "finish_reason": null }] })
}

fn aborted(member: &str, value: Value) -> Value {
    json!({ "choices": [{ "index": 0, member: value, "finish_reason": "abort" }] })
}

fn dead_core() -> Value {
    let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.";
    json!({ "error": { "message": message, "type": "InternalServerError", "param": null, "code": 500 } })
}

#[derive(Clone, Copy, PartialEq)]
enum Ending {
    Clean,
    Between,
    Inside,
    Silent,
}

/// Three events, each when the test lets it go, then an ending.
fn events(shared: &Arc<Shared>, watch: Watch, ending: Ending) -> Response {
    let (sender, receiver) = mpsc::channel::<Result<String, std::io::Error>>(1);
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        let mut watch = watch;
        for event in 1..=3 {
            let granted = tokio::select! {
                permit = shared.events.acquire() => permit.is_ok(),
                () = sender.closed() => false,
            };
            if !granted {
                return Ok::<(), Infallible>(());
            }
            shared.events.forget_permits(1);
            if sender.send(Ok(format!("data: {event}\n\n"))).await.is_err() {
                return Ok(());
            }
        }
        match ending {
            Ending::Clean => drop(sender.send(Ok("data: [DONE]\n\n".to_owned())).await),
            Ending::Inside => drop(sender.send(Ok("data: {\"half".to_owned())).await),
            Ending::Between | Ending::Silent => {}
        }
        if ending == Ending::Silent {
            sender.closed().await;
            return Ok(());
        }
        watch.done = true;
        if ending != Ending::Clean {
            let _ = sender.send(Err(std::io::Error::other("killed"))).await;
        }
        Ok(())
    });
    let body = Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(receiver));
    ([("content-type", "text/event-stream")], body).into_response()
}
