//! A mock engine with ranks: it reads pins as its dialect does, runs each request on a rank, and tells its loads.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use http::StatusCode;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::sync::watch;

/// How the engine behaves.
pub(crate) struct Behaviour {
    /// `/server_info`; `Null` for an engine that has none (vLLM, plain OpenAI).
    pub(crate) info: Value,
    pub(crate) ranks: u32,
    /// Number of the first rank in metrics.
    pub(crate) first: u32,
    /// Number of the first rank in pins.
    pub(crate) first_in_pins: u32,
    /// Answers after the loads were asked for, so that they are asked for in the meantime.
    pub(crate) waits: bool,
}

struct Shared {
    behaviour: Behaviour,
    ignores: AtomicBool,
    turn: AtomicU32,
    /// Rank that each request ran on.
    ran: Mutex<Vec<u32>>,
    running: Mutex<Vec<u64>>,
    polls: watch::Sender<u64>,
}

pub(crate) struct Ranked {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
}

impl Ranked {
    pub(crate) async fn start(behaviour: Behaviour) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let running = Mutex::new(vec![0; behaviour.ranks as usize]);
        let shared = Arc::new(Shared {
            behaviour,
            ignores: AtomicBool::new(false),
            turn: AtomicU32::new(0),
            ran: Mutex::default(),
            running,
            polls: watch::Sender::new(0),
        });
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shared));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, shared }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn ignore_pins(&self, ignore: bool) {
        self.shared.ignores.store(ignore, Ordering::SeqCst);
    }

    /// The ranks that requests ran on since the last call.
    pub(crate) fn ran(&self) -> Vec<u32> {
        std::mem::take(&mut *self.shared.ran.lock().unwrap())
    }
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let vllm = shared.behaviour.info.is_null();
    match request.uri().path() {
        "/health" | "/ping" => return "".into_response(),
        "/v1/models" => return Json(json!({ "data": [{ "id": "tiny" }] })).into_response(),
        "/version" if vllm => return Json(json!({ "version": "0.33.0" })).into_response(),
        "/server_info" if !vllm => return Json(shared.behaviour.info.clone()).into_response(),
        "/metrics" if vllm => return metrics(&shared),
        "/v1/loads" if !vllm => return loads(&shared),
        "/generate" | "/v1/chat/completions" | "/v1/completions" => {}
        _ => return StatusCode::NOT_FOUND.into_response(),
    }
    let generate = request.uri().path() == "/generate";
    let (head, body) = request.into_parts();
    let body: Value = serde_json::from_slice(&body.collect().await.unwrap().to_bytes()).unwrap();
    let header = head.headers.get("x-data-parallel-rank").map(|value| value.to_str().unwrap().parse().unwrap());
    let pin: Option<u32> = if generate { body["routed_dp_rank"].as_u64().map(|rank| rank as u32) } else { header };
    let Behaviour { ranks, first_in_pins, .. } = shared.behaviour;
    let turn = shared.turn.fetch_add(1, Ordering::SeqCst) % ranks;
    let rank = match pin.filter(|_| !shared.ignores.load(Ordering::SeqCst)) {
        None => turn,
        Some(pin) if (first_in_pins..first_in_pins + ranks).contains(&pin) => pin - first_in_pins,
        Some(pin) => {
            let message = format!("data_parallel_rank {pin} is out of range [0, {}).", first_in_pins + ranks);
            return (StatusCode::BAD_REQUEST, Json(json!({ "error": { "message": message } }))).into_response();
        }
    };
    run(&shared, rank).await;
    let meta = if generate { json!({ "dp_rank": rank + first_in_pins }) } else { Value::Null };
    Json(json!({ "text": "\"dp_rank\":77,", "meta_info": meta })).into_response()
}

async fn run(shared: &Shared, rank: u32) {
    shared.ran.lock().unwrap().push(rank);
    shared.running.lock().unwrap()[rank as usize] += 1;
    if shared.behaviour.waits {
        let mut polls = shared.polls.subscribe();
        // A request that came after the loads were asked for must not wait for ever.
        let _ = tokio::time::timeout(Duration::from_secs(1), polls.changed()).await;
        // The loads should arrive before this answer.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
    shared.running.lock().unwrap()[rank as usize] -= 1;
}

fn metrics(shared: &Shared) -> Response {
    let running = shared.running.lock().unwrap().clone();
    let line = |(rank, requests): (u32, u64)| {
        let engine = rank + shared.behaviour.first;
        format!("vllm:num_requests_running{{engine=\"{engine}\",model_name=\"tiny\"}} {requests}.0\n")
    };
    let text: String = (0..).zip(running).map(line).collect();
    shared.polls.send_modify(|polls| *polls += 1);
    text.into_response()
}

fn loads(shared: &Shared) -> Response {
    let running = shared.running.lock().unwrap().clone();
    let entry =
        |(rank, requests): (u32, u64)| json!({ "dp_rank": rank, "num_running_reqs": requests, "num_waiting_reqs": 0 });
    let loads: Vec<Value> = (0..).zip(running).map(entry).collect();
    shared.polls.send_modify(|polls| *polls += 1);
    Json(json!({ "version": "0.5.23", "loads": loads })).into_response()
}
