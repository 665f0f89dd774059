//! A thousand swaps of tables for 151,936 tokens and 8 ranks under load: the pause of each, and whether anything went
//! wrong.
//!
//! `cargo run --release -p semmoe-gateway --example swaps -- [swaps] [clients]`
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement; what fails may panic")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::{Json, Router};
use half::f16;
use http::Method;
use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient, request};
use semmoe_gateway::{Config, Gateway, Running};
use semmoe_tables::{ModelInfo, Placement, Provenance, TablesBuilder};
use semmoe_text::Tokenizer;
use serde_json::{Value, json};

const MODEL_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m");
const VOCABULARY: u32 = 151_936;
const RANKS: u16 = 8;
const TEXTS: [&str; 2] = ["river water boat fish ", "king queen castle sword "];

/// Tables in which text 0 is at home on rank `home` and text 1 on the next one.
fn write_tables(path: &Path, tokenizer: &Tokenizer, home: u16) {
    let ranks = usize::from(RANKS);
    let mut t = vec![f16::from_f32(0.125); VOCABULARY as usize * ranks];
    for (text, offset) in TEXTS.iter().zip(0..) {
        for id in tokenizer.encode(text).unwrap() {
            let row = &mut t[id as usize * ranks..][..ranks];
            row.fill(f16::from_f32(0.05));
            row[usize::from((home + offset) % RANKS)] = f16::from_f32(0.6);
        }
    }
    let model = ModelInfo {
        model: "big".to_owned(),
        tokenizer_sha256: Some(tokenizer.sha256().to_owned()),
        num_experts: 128,
        top_k: 8,
        vocab_size: VOCABULARY,
        num_hidden_layers: 48,
        layer_ids: (0..48).collect(),
    };
    let provenance = Provenance { source: "example".to_owned(), created: "2026-01-01T00:00:00Z".to_owned() };
    let placement = Placement::contiguous(48, 128, RANKS).unwrap();
    TablesBuilder::dp(model, provenance, placement, t, vec![0.0; ranks]).write(path).unwrap();
}

/// An engine that answers at once.
async fn engine() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let info = json!({ "model_path": "big", "version": "0.5.23", "dp_size": RANKS });
    let answer = move |request: axum::extract::Request| {
        let info = info.clone();
        async move { if request.uri().path() == "/server_info" { Json(info) } else { Json(json!({ "text": "" })) } }
    };
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    url
}

async fn start(folder: &Path) -> Running {
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ntables_root = \"{0}\"\n\
         [routing.prefix]\nblocks_per_rank = 0\n[routing.settings]\nload_margin = 10.0\nprice_step = 0.0\nprice_pull = 0.0\n\
         [[models]]\nname = \"big\"\ntokenizer = \"{MODEL_DIR}/tokenizer.json\"\n\
         [[models.backends]]\nname = \"pod-a\"\nengine = \"sglang\"\nurl = \"{1}\"\ntables = \"{0}/0\"\n",
        folder.display(),
        engine().await
    );
    Gateway::start(Config::from_toml(&text, Path::new("")).unwrap()).await.unwrap()
}

/// Generation, text and rank of each answer.
async fn client(base: BaseUrl, stop: Arc<AtomicBool>, count: Arc<AtomicU64>) -> Vec<(u64, u64, u64)> {
    let http = HttpClient::default();
    let mut placed = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let number = count.fetch_add(1, Ordering::Relaxed) % 2;
        let body = json!({ "text": TEXTS[number as usize].repeat(100) }).to_string();
        let answer = http.send(request(Method::POST, &base, "/generate", Some(body.into())).unwrap()).await.unwrap();
        assert_eq!(answer.status(), 200);
        let reported = |name: &str| answer.headers()[name].to_str().unwrap().parse().unwrap();
        placed.push((reported("x-semmoe-generation"), number, reported("x-semmoe-rank")));
    }
    placed
}

/// Loads the two files in turn; returns the homes of the first text by generation, and how long each reload took.
async fn swap(admin: &BaseUrl, swaps: u64) -> (Vec<(u64, u64)>, Vec<Duration>) {
    let http = HttpClient::default();
    let limits = AnswerLimits { timeout: Duration::from_secs(60), max_bytes: 1 << 20 };
    let (mut homes, mut took) = (vec![(1, 0)], Vec::new());
    for number in 1..=swaps {
        let began = Instant::now();
        let command = json!({ "backend": "pod-a", "path": (number % 2).to_string() });
        let answer: Value = http.post_json(admin, "/admin/tables", &command, &limits).await.unwrap();
        took.push(began.elapsed());
        homes.push((answer["generation"].as_u64().unwrap(), number % 2));
    }
    took.sort_unstable();
    (homes, took)
}

/// How many times a histogram has, and upper bounds of the buckets that hold half, 99% and all of them.
fn times(metrics: &str, histogram: &str) -> String {
    let prefix = format!("{histogram}le=\"");
    let buckets: Vec<(&str, f64)> = metrics
        .lines()
        .filter_map(|line| line.strip_prefix(&prefix)?.split_once("\"} "))
        .map(|(bound, count)| (bound, count.parse().unwrap()))
        .collect();
    let all = buckets.last().unwrap().1;
    let bound = |share: f64| buckets.iter().find(|(_, count)| *count >= share * all).unwrap().0;
    format!("{all} times, half at most {} s, 99% at most {} s, all at most {} s", bound(0.5), bound(0.99), bound(1.0))
}

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>().unwrap());
    let (swaps, clients) = (arguments.next().unwrap_or(1000), arguments.next().unwrap_or(16));
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::from_file(&Path::new(MODEL_DIR).join("tokenizer.json")).unwrap();
    (0..2).for_each(|home| write_tables(&folder.path().join(home.to_string()), &tokenizer, home));
    let gateway = start(folder.path()).await;
    gateway.wait_ready().await;
    let (data, admin) = (BaseUrl::from(gateway.data_addr()), BaseUrl::from(gateway.admin_addr()));
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let running: Vec<_> =
        (0..clients).map(|_| tokio::spawn(client(data.clone(), Arc::clone(&stop), Arc::clone(&count)))).collect();
    let began = Instant::now();
    let (homes, took) = swap(&admin, swaps).await;
    let seconds = began.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    let mut placed = Vec::new();
    for client in running {
        placed.extend(client.await.unwrap());
    }
    let home = |generation: u64| homes.iter().find(|(of, _)| *of == generation).unwrap().1;
    let misrouted = placed.iter().filter(|(of, text, rank)| (home(*of) + text) % u64::from(RANKS) != *rank).count();
    let requests = placed.len();
    println!("{swaps} swaps in {seconds:.1} s under {requests} requests ({:.0} a second)", requests as f64 / seconds);
    println!("failed 0, misrouted {misrouted}");
    let metrics = HttpClient::default().get_text(&admin, "/metrics", &AnswerLimits::default()).await.unwrap();
    println!("the swap itself: {}", times(&metrics, "semmoe_tables_swap_seconds_bucket{"));
    for (clock, what) in [("wall", "as time went by"), ("cpu", "as long as their threads ran")] {
        let found = times(&metrics, &format!("semmoe_swap_wait_seconds_bucket{{clock=\"{clock}\","));
        println!("requests waited for the state, {what}: {found}");
    }
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    println!("whole reload: median {:.1?}, 99% {:.1?}, longest {:.1?}", at(0.5), at(0.99), at(1.0));
    gateway.shutdown(Duration::from_secs(5)).await;
}
