//! A whole unit inside the test's process: every rank on its own thread, over real loopback connections.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request};
use http_body_util::BodyExt as _;
use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient, RequestBody, request};
use semmoe_worker::{Shutdown, WorkerConfig, WorkerError, WorkerEvent, run};
use serde_json::Value;

pub const LAYERS: usize = 7;
pub const TOP_K: usize = 4;
pub const EXPERTS: u16 = 32;
pub const CONTEXT: usize = 2048;

pub fn model_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-qwen3moe-15m")
}

pub fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// A rank's configuration for tests: no signal handlers, free ports.
pub fn config(rank: u16, world: u16, rendezvous: SocketAddr) -> WorkerConfig {
    WorkerConfig {
        handle_signals: false,
        listen: (rank == 0).then(loopback),
        tables_root: Some(std::env::temp_dir()),
        ..WorkerConfig::new(model_dir(), rank, world, rendezvous)
    }
}

pub struct Unit {
    pub url: BaseUrl,
    pub client: HttpClient,
    shutdowns: Vec<Shutdown>,
    ranks: Vec<JoinHandle<Result<(), WorkerError>>>,
}

impl Unit {
    pub fn start(world: u16) -> Self {
        Self::start_with(world, |_| {})
    }

    /// Starts all ranks, with each configuration modified by `adjust`, and waits until requests are served.
    pub fn start_with(world: u16, adjust: impl Fn(&mut WorkerConfig)) -> Self {
        let (sender, events) = mpsc::channel();
        let (mut shutdowns, mut ranks) = (Vec::new(), Vec::new());
        let mut start = |rank: u16, rendezvous| {
            let mut config = config(rank, world, rendezvous);
            adjust(&mut config);
            let sender = sender.clone();
            config.announce = Arc::new(move |event| sender.send(*event).unwrap());
            shutdowns.push(config.shutdown.clone());
            ranks.push(std::thread::spawn(move || run(config)));
        };
        start(0, loopback());
        let WorkerEvent::Bound { rendezvous } = events.recv().unwrap() else { panic!("not bound first") };
        (1..world).for_each(|rank| start(rank, rendezvous));
        let http = (0..world).filter_map(|_| match events.recv().unwrap() {
            WorkerEvent::Ready { http, .. } => http,
            WorkerEvent::Bound { .. } => panic!("bound twice"),
        });
        // Wait for all of them: only then is every rank ready.
        let http: Vec<SocketAddr> = http.collect();
        let url = http[0].into();
        Self { url, client: HttpClient::default(), shutdowns, ranks }
    }

    /// The number of ranks.
    pub fn world(&self) -> u16 {
        self.ranks.len() as u16
    }

    /// Asks one rank to stop and returns every rank's outcome.
    pub fn stop(self, rank: usize) -> Vec<Result<(), WorkerError>> {
        self.shutdowns[rank].request();
        self.ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    pub async fn get(&self, path: &str) -> Value {
        self.client.get_json(&self.url, path, &AnswerLimits::default()).await.unwrap()
    }

    pub async fn metrics(&self) -> Metrics {
        Metrics(self.client.get_text(&self.url, "/metrics", &AnswerLimits::default()).await.unwrap())
    }

    pub fn post(&self, path: &str, body: &[u8]) -> Request<RequestBody> {
        request(Method::POST, &self.url, path, Some(Bytes::copy_from_slice(body))).unwrap()
    }

    /// Posts JSON; returns status, the rank that answered, and the body.
    pub async fn ask(&self, path: &str, body: &Value) -> (u16, Option<u16>, Value) {
        self.ask_pinned(path, body, None).await
    }

    pub async fn ask_pinned(&self, path: &str, body: &Value, header: Option<&str>) -> (u16, Option<u16>, Value) {
        let mut request = self.post(path, body.to_string().as_bytes());
        if let Some(pin) = header {
            request.headers_mut().insert("x-data-parallel-rank", HeaderValue::from_str(pin).unwrap());
        }
        let response = self.client.send(request).await.unwrap();
        let status = response.status().as_u16();
        let rank = response.headers().get("x-data-parallel-rank").map(|rank| rank.to_str().unwrap().parse().unwrap());
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, rank, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    /// Posts JSON that must succeed.
    pub async fn ok(&self, path: &str, body: &Value) -> Value {
        let (status, _, answer) = self.ask(path, body).await;
        assert_eq!(status, 200, "{body}: {answer}");
        answer
    }

    /// Posts JSON; returns the data of every event of the stream.
    pub async fn stream(&self, path: &str, body: &Value) -> Vec<String> {
        let response = self.client.send(self.post(path, body.to_string().as_bytes())).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        events(std::str::from_utf8(&body).unwrap())
    }

    /// Sends every golden prompt, and must get the golden tokens.
    pub async fn serves_golden(&self) {
        for golden in golden() {
            let answer = self.ok("/generate", &greedy(&golden["input_ids"], 16)).await;
            assert_eq!(answer["output_ids"], golden["greedy_16"]);
        }
    }

    /// Stops the unit; every rank must succeed.
    pub fn end(self) {
        self.stop(0).into_iter().for_each(|outcome| outcome.unwrap());
    }

    /// Waits until no sequence is in flight anywhere.
    pub async fn quiet(&self) {
        let quiet = async {
            while self.metrics().await.sum("semmoe_requests_in_flight", &[]) > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(120), quiet).await.expect("sequences never ended");
    }
}

/// The error with which a rank refuses a configuration modified by `adjust`.
pub fn refused(world: u16, adjust: impl Fn(&mut WorkerConfig)) -> String {
    let mut config = config(0, world, loopback());
    config.rendezvous_timeout = Duration::from_millis(500);
    adjust(&mut config);
    let (message, code) = failure(run(config));
    assert!(code == 2 && !message.contains('\n'), "{code}: {message}");
    message
}

/// Runs a unit with configurations modified by `adjust` that cannot form; returns every rank's error and exit code.
pub fn refused_unit(world: u16, adjust: impl Fn(&mut WorkerConfig)) -> Vec<(String, u8)> {
    let (sender, events) = mpsc::channel();
    let start = |rank, rendezvous| {
        let mut config = config(rank, world, rendezvous);
        config.rendezvous_timeout = Duration::from_secs(120);
        let sender = sender.clone();
        config.announce = Arc::new(move |event| sender.send(*event).unwrap());
        adjust(&mut config);
        std::thread::spawn(move || run(config))
    };
    let mut ranks = vec![start(0, loopback())];
    let WorkerEvent::Bound { rendezvous } = events.recv().unwrap() else { panic!("not bound first") };
    ranks.extend((1..world).map(|rank| start(rank, rendezvous)));
    ranks.into_iter().map(|rank| failure(rank.join().unwrap())).collect()
}

/// Message and exit code of a failed rank.
pub fn failure(outcome: Result<(), WorkerError>) -> (String, u8) {
    let error = outcome.unwrap_err();
    (error.to_string(), error.exit_code())
}

/// The data of every event of a stream.
pub fn events(text: &str) -> Vec<String> {
    let (whole, rest) = text.rsplit_once("\n\n").unwrap();
    assert_eq!(rest, "", "the stream ends inside an event");
    whole.split("\n\n").map(|event| event.strip_prefix("data: ").unwrap().to_owned()).collect()
}

pub struct Metrics(pub String);

impl Metrics {
    /// The sum of a family's samples with these labels.
    pub fn sum(&self, family: &str, labels: &[(&str, &str)]) -> u64 {
        let samples = self.0.lines().filter_map(|line| line.strip_prefix(family)?.rsplit_once(' '));
        let fits = |series: &str| labels.iter().all(|(name, value)| series.contains(&format!("{name}=\"{value}\"")));
        samples.filter(|(series, _)| fits(series)).map(|(_, value)| value.parse::<u64>().unwrap()).sum()
    }
}

/// The bundled golden vectors.
pub fn golden() -> Vec<Value> {
    let json = std::fs::read(model_dir().join("golden/golden.json")).unwrap();
    serde_json::from_slice::<Value>(&json).unwrap()["prompts"].as_array().unwrap().clone()
}

/// Greedy decoding of a golden prompt that ignores end-of-text tokens.
pub fn greedy(input_ids: &Value, tokens: u32) -> Value {
    serde_json::json!({
        "input_ids": input_ids,
        "sampling_params": {
            "max_new_tokens": tokens, "temperature": 0, "ignore_eos": true, "skip_special_tokens": false,
        },
    })
}
