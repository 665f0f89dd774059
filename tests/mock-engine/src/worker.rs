//! A scripted worker: `/switch`, step counters and loads like semmoe's worker, with every fault of a switch.

use std::sync::{Arc, Mutex, MutexGuard};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use http::{HeaderValue, Method, StatusCode};
use http_body_util::BodyExt;
use semmoe_engines::pin;
use serde_json::{Value, json};

use crate::mock::Server;

/// The fault to inject into a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchFault {
    None,
    RefusePrepare,
    HangPrepare,
    /// Prepares, but reports another epoch.
    WrongEpoch,
    RefuseCommit,
    /// The connection breaks before the commit.
    LoseCommitBefore,
    /// The connection breaks after the commit.
    LoseCommitAfter,
    /// The switch never finishes.
    HangCommit,
}

#[derive(Debug)]
pub struct Script {
    pub fault: SwitchFault,
    pub running: u64,
    pub layout: String,
    pub epoch: u64,
    /// Runs every request on rank 0 and ignores pins.
    pub ignores_pins: bool,
    /// Bodies of the `POST /switch` requests received.
    pub asked: Vec<Value>,
    state: &'static str,
    to: String,
    steps: u64,
    seconds: f64,
    tokens: u64,
}

impl Script {
    fn status(&self) -> Value {
        json!({ "state": self.state, "epoch": self.epoch, "layout": self.layout, "placement_digest": "p", "last_seconds": 0.002 })
    }

    fn ranks(&self) -> u16 {
        if self.layout == "ep" { 2 } else { 1 }
    }

    /// The rank on which it runs a request with this pin.
    fn rank(&self, pin: Option<&HeaderValue>) -> u16 {
        let pinned = pin.and_then(|pin| pin.to_str().ok()?.parse().ok()).unwrap_or(0);
        if self.ignores_pins || pinned >= self.ranks() { 0 } else { pinned }
    }

    fn info(&self) -> Value {
        let ranks = self.ranks();
        json!({ "version": "0.1.0", "dp_size": ranks, "tp_size": 2 / ranks, "layout": self.layout, "layouts": ["ep", "tp"] })
    }

    /// Some steps have run since the last query.
    fn metrics(&mut self) -> String {
        let step = if (self.layout == "tp") == (self.running < 16) { 0.001 } else { 0.005 };
        if self.running > 0 && self.state == "stable" {
            self.steps += 10;
            self.seconds += 10.0 * step;
            self.tokens += 10 * self.running;
        }
        let labels = format!("rank=\"0\",layout=\"{}\",phase=\"decode\",batch=\"64\"", self.layout);
        format!(
            "semmoe_layout_steps_total{{{labels}}} {}\nsemmoe_layout_step_seconds_total{{{labels}}} {}\n\
             semmoe_tokens_total{{rank=\"0\",phase=\"decode\"}} {}\n",
            self.steps, self.seconds, self.tokens
        )
    }
}

/// A running scripted worker.
#[derive(Debug)]
pub struct Worker {
    server: Server,
    script: Arc<Mutex<Script>>,
}

impl Worker {
    /// Starts in this layout with `running` running requests.
    pub fn start(layout: &str, running: u64) -> Self {
        let script = Arc::new(Mutex::new(Script {
            fault: SwitchFault::None,
            running,
            layout: layout.to_owned(),
            epoch: 3,
            ignores_pins: false,
            asked: Vec::new(),
            state: "stable",
            to: String::new(),
            steps: 0,
            seconds: 0.0,
            tokens: 0,
        }));
        let server = Server::start(Router::new().fallback(answer).with_state(Arc::clone(&script)));
        Self { server, script }
    }

    pub fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    pub fn url(&self) -> String {
        self.server.url()
    }

    /// The actions requested, in order.
    pub fn actions(&self) -> Vec<String> {
        self.script().asked.iter().map(|asked| asked["action"].as_str().unwrap().to_owned()).collect()
    }

    pub fn kill(&mut self) {
        self.server.kill();
    }
}

async fn answer(State(script): State<Arc<Mutex<Script>>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let locked = || script.lock().unwrap();
    match (&head.method, head.uri.path()) {
        (_, "/health" | "/ping") => "".into_response(),
        (_, "/v1/models") => Json(json!({ "data": [{ "id": "tiny" }] })).into_response(),
        (_, "/server_info") => Json(locked().info()).into_response(),
        (_, "/metrics") => locked().metrics().into_response(),
        (_, "/v1/loads") => {
            let load = json!({ "dp_rank": 0, "num_running_reqs": locked().running, "num_waiting_reqs": 0 });
            Json(json!({ "loads": [load] })).into_response()
        }
        (&Method::GET, "/switch") => Json(locked().status()).into_response(),
        (_, "/switch") => switch(&script, body.collect().await.unwrap().to_bytes()).await,
        _ => {
            let rank = locked().rank(head.headers.get(pin::HEADER)).to_string();
            ([(pin::HEADER, rank)], Json(json!({ "choices": [] }))).into_response()
        }
    }
}

async fn switch(script: &Mutex<Script>, body: Bytes) -> Response {
    let asked: Value = serde_json::from_slice(&body).unwrap();
    let action = asked["action"].as_str().unwrap_or("").to_owned();
    let refusal =
        |message: &str| (StatusCode::CONFLICT, Json(json!({ "error": { "message": message } }))).into_response();
    {
        let mut script = script.lock().unwrap();
        script.asked.push(asked.clone());
        match (action.as_str(), script.fault) {
            ("prepare", SwitchFault::RefusePrepare) => return refusal("rank 1 refuses: no room"),
            ("prepare", SwitchFault::HangPrepare) => {}
            ("prepare", fault) => {
                assert_eq!(asked["if_epoch"], script.epoch);
                script.state = "prepared";
                asked["to"].as_str().unwrap().clone_into(&mut script.to);
                let mut status = script.status();
                if fault == SwitchFault::WrongEpoch {
                    status["epoch"] = json!(script.epoch + 7);
                }
                return Json(status).into_response();
            }
            ("commit", SwitchFault::RefuseCommit) => {
                script.state = "stable";
                return refusal("the experts are where they were: a checksum differs");
            }
            ("commit", SwitchFault::LoseCommitBefore) => return broken(),
            ("commit", SwitchFault::HangCommit) => script.state = "moving",
            ("", _) => {
                asked["to"].as_str().unwrap().clone_into(&mut script.layout);
                script.epoch += 1;
                return Json(script.status()).into_response();
            }
            ("commit", fault) => {
                script.layout = script.to.clone();
                (script.epoch, script.state) = (script.epoch + 1, "stable");
                return if fault == SwitchFault::LoseCommitAfter {
                    broken()
                } else {
                    Json(script.status()).into_response()
                };
            }
            _ => {
                script.state = "stable";
                return Json(script.status()).into_response();
            }
        }
    }
    std::future::pending().await
}

/// Sends a head, then closes the connection.
fn broken() -> Response {
    let cut = futures_util::stream::once(async { Err::<Bytes, _>(std::io::Error::other("killed")) });
    ([("content-type", "application/json"), ("content-length", "100")], Body::from_stream(cut)).into_response()
}
