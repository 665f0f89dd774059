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

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const GENERATE: &str = "/generate";

/// How the engine behaves.
#[derive(Clone)]
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
    version: Mutex<&'static str>,
    /// Paths on which pins are read.
    reads: Mutex<Vec<&'static str>>,
    /// Ranks that it has, however many it reports; 0: it does not look at pins.
    real: AtomicU32,
    /// Rank that each client's request ran on.
    ran: Mutex<Vec<u32>>,
    /// Pins of clients' requests.
    pins: Mutex<Vec<Option<u32>>>,
    /// Requests with a prompt of one token, for one token, and all, of each rank.
    counts: Mutex<Vec<[u64; 3]>>,
}

pub(crate) struct Ranked {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
}

impl Ranked {
    pub(crate) async fn start(behaviour: Behaviour) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let counts = Mutex::new(vec![[0; 3]; behaviour.ranks as usize]);
        let responses = if behaviour.info.is_null() { None } else { Some(RESPONSES) };
        let reads = [CHAT, COMPLETIONS, GENERATE, MESSAGES].into_iter().chain(responses).collect();
        let shared = Arc::new(Shared {
            ignores: AtomicBool::new(false),
            turn: AtomicU32::new(0),
            version: Mutex::new("0.33.0"),
            reads: Mutex::new(reads),
            real: AtomicU32::new(behaviour.ranks),
            ran: Mutex::default(),
            pins: Mutex::default(),
            counts,
            behaviour,
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

    /// Another version of vLLM, which reads pins on these paths.
    pub(crate) fn upgrade(&self, version: &'static str, reads: &[&'static str]) {
        *self.shared.reads.lock().unwrap() = reads.to_vec();
        *self.shared.version.lock().unwrap() = version;
    }

    /// It has so many ranks from now on, and reports as many as before.
    pub(crate) fn have_ranks(&self, ranks: u32) {
        self.shared.real.store(ranks, Ordering::SeqCst);
    }

    /// The ranks that requests ran on since the last call.
    pub(crate) fn ran(&self) -> Vec<u32> {
        std::mem::take(&mut *self.shared.ran.lock().unwrap())
    }

    /// The pins of requests since the last call.
    pub(crate) fn pins(&self) -> Vec<Option<u32>> {
        std::mem::take(&mut *self.shared.pins.lock().unwrap())
    }
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let vllm = shared.behaviour.info.is_null();
    let path = request.uri().path().to_owned();
    match path.as_str() {
        "/health" | "/ping" => return "".into_response(),
        "/v1/models" => return Json(json!({ "data": [{ "id": "tiny" }] })).into_response(),
        "/version" if vllm => return Json(json!({ "version": *shared.version.lock().unwrap() })).into_response(),
        "/server_info" if !vllm => return Json(shared.behaviour.info.clone()).into_response(),
        "/metrics" if vllm => return metrics(&shared),
        "/v1/loads" if !vllm => return loads(&shared),
        GENERATE | CHAT | COMPLETIONS | RESPONSES | MESSAGES => {}
        _ => return StatusCode::NOT_FOUND.into_response(),
    }
    let (head, body) = request.into_parts();
    let body: Value = serde_json::from_slice(&body.collect().await.unwrap().to_bytes()).unwrap();
    let header = head.headers.get("x-data-parallel-rank").map(|value| value.to_str().unwrap().parse().unwrap());
    let generate = path == GENERATE;
    let sent: Option<u32> = if generate { body["routed_dp_rank"].as_u64().map(|rank| rank as u32) } else { header };
    let probe = body["prompt"] == json!([1])
        || body["input_ids"] == json!([0])
        || body["messages"][0]["content"] == "0"
        || body["input"] == "0";
    if !probe {
        shared.pins.lock().unwrap().push(sent);
    }
    let pin = sent.filter(|_| shared.reads.lock().unwrap().contains(&path.as_str()));
    let rank = match shared.rank(pin) {
        Ok(rank) => rank,
        Err(message) => return refused(&message, body["stream"] == true),
    };
    if !probe {
        shared.ran.lock().unwrap().push(rank);
    }
    if !vllm && (body["prompt"] == json!([0]) || body["max_output_tokens"].as_u64().is_some_and(|most| most < 2)) {
        return refused("SGLang 0.5.23 takes this for an empty prompt, or for a negative number of tokens", false);
    }
    let asked = ["max_tokens", "max_output_tokens"].iter().any(|field| body[field] == 1);
    let more = [body["prompt"] == json!([1]), asked, true];
    let mut counts = shared.counts.lock().unwrap();
    let counts = counts.get_mut(rank as usize).into_iter().flatten();
    counts.zip(more).for_each(|(count, more)| *count += u64::from(more));
    let meta = json!({ "dp_rank": rank + shared.behaviour.first_in_pins });
    if generate {
        return Json(json!({ "text": "\"dp_rank\":77,", "meta_info": meta })).into_response();
    }
    let mut choice = json!({ "text": "\"dp_rank\":77,", "message": { "content": "\"dp_rank\":77," } });
    if !vllm && body["return_meta_info"] == true {
        choice["meta_info"] = meta;
    }
    Json(json!({ "choices": [choice] })).into_response()
}

impl Shared {
    /// Where a request runs, or why it does not.
    fn rank(&self, pin: Option<u32>) -> Result<u32, String> {
        let (first, real) = (self.behaviour.first_in_pins, self.real.load(Ordering::SeqCst));
        match pin.filter(|_| !self.ignores.load(Ordering::SeqCst)) {
            _ if real == 0 => Ok(0),
            None => Ok(self.turn.fetch_add(1, Ordering::SeqCst) % real.max(1)),
            Some(pin) if (first..first + real).contains(&pin) => Ok(pin - first),
            Some(pin) if self.behaviour.info.is_null() => {
                Err(format!("data_parallel_rank {pin} is out of range [0, {}).", first + real))
            }
            Some(pin) => Err(format!("routed_dp_rank={pin} out of range [0, {real})")),
        }
    }
}

/// Streams of vLLM and those of SGLang's `/generate` begin before their pins are looked at.
fn refused(message: &str, as_event: bool) -> Response {
    let body = json!({ "error": { "message": message } });
    if as_event {
        let events = format!("data: {body}\n\ndata: [DONE]\n\n");
        return ([("content-type", "text/event-stream")], events).into_response();
    }
    (StatusCode::BAD_REQUEST, Json(body)).into_response()
}

/// As a vLLM with several API servers reports before and after its first requests: gauges of requests are not there.
fn metrics(shared: &Shared) -> Response {
    let line = |(rank, [prompts, asked, all]): (u32, [u64; 3])| {
        let engine = rank + shared.behaviour.first;
        let of = |name: &str, labels: &str, count: u64| {
            format!("vllm:{name}{{engine=\"{engine}\",{labels}model_name=\"tiny\"}} {count}.0\n")
        };
        [
            of("prompt_tokens_total", "", 0),
            of("request_prompt_tokens_bucket", "le=\"1.0\",", prompts),
            of("request_params_max_tokens_bucket", "le=\"1.0\",", asked),
            of("request_success_total", "finished_reason=\"stop\",", all),
        ]
        .concat()
    };
    (0..).zip(shared.counts.lock().unwrap().clone()).map(line).collect::<String>().into_response()
}

fn loads(shared: &Shared) -> Response {
    let entry = |rank| json!({ "dp_rank": rank, "num_running_reqs": 0, "num_waiting_reqs": 0 });
    let loads: Vec<Value> = (0..shared.behaviour.ranks).map(entry).collect();
    Json(json!({ "version": "0.5.23", "loads": loads })).into_response()
}
