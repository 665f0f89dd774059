//! A mock engine with ranks: it reads pins as its dialect does, runs each request on a rank, and counts it there.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use http::StatusCode;
use http_body_util::BodyExt;
use serde_json::{Value, json};

/// How the engine behaves.
pub(crate) struct Behaviour {
    /// `/server_info`; `Null` for an engine that has none (vLLM, plain OpenAI).
    pub(crate) info: Value,
    pub(crate) ranks: u32,
    /// Number of the first rank in metrics.
    pub(crate) first: u32,
    /// Number of the first rank in pins.
    pub(crate) first_in_pins: u32,
}

struct Shared {
    behaviour: Behaviour,
    ignores: AtomicBool,
    turn: AtomicU32,
    /// Rank that each client's request ran on.
    ran: Mutex<Vec<u32>>,
    /// Probes of pins that ran on each rank.
    probes: Mutex<Vec<u64>>,
}

pub(crate) struct Ranked {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
}

impl Ranked {
    pub(crate) async fn start(behaviour: Behaviour) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let probes = Mutex::new(vec![0; behaviour.ranks as usize]);
        let shared = Arc::new(Shared {
            behaviour,
            ignores: AtomicBool::new(false),
            turn: AtomicU32::new(0),
            ran: Mutex::default(),
            probes,
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
    let probe = body["prompt"] == json!([0]) || body["messages"][0]["content"] == "0";
    if probe {
        shared.probes.lock().unwrap()[rank as usize] += 1;
    } else {
        shared.ran.lock().unwrap().push(rank);
    }
    let meta = json!({ "dp_rank": rank + first_in_pins });
    if generate {
        return Json(json!({ "text": "\"dp_rank\":77,", "meta_info": meta })).into_response();
    }
    let mut choice = json!({ "text": "\"dp_rank\":77,", "message": { "content": "\"dp_rank\":77," } });
    if !vllm && body["return_meta_info"] == true {
        choice["meta_info"] = meta;
    }
    Json(json!({ "choices": [choice] })).into_response()
}

/// As a vLLM with several API servers reports before and after its first requests: gauges of requests are not there.
fn metrics(shared: &Shared) -> Response {
    let line = |(rank, probes): (u32, u64)| {
        let engine = rank + shared.behaviour.first;
        format!(
            "vllm:prompt_tokens_total{{engine=\"{engine}\",model_name=\"tiny\"}} 0.0\n\
             vllm:request_prompt_tokens_bucket{{engine=\"{engine}\",le=\"1.0\",model_name=\"tiny\"}} {probes}.0\n"
        )
    };
    (0..).zip(shared.probes.lock().unwrap().clone()).map(line).collect::<String>().into_response()
}

fn loads(shared: &Shared) -> Response {
    let entry = |rank| json!({ "dp_rank": rank, "num_running_reqs": 0, "num_waiting_reqs": 0 });
    let loads: Vec<Value> = (0..shared.behaviour.ranks).map(entry).collect();
    Json(json!({ "version": "0.5.23", "loads": loads })).into_response()
}
