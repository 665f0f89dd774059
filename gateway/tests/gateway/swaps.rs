//! Hundreds of swaps of tables under load: no request is lost, and each goes where the generation named in its answer
//! sends it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use http::Method;
use semmoe_gateway::Running;
use serde_json::json;

use crate::support::{Client, Fixture, TEXTS, canned, metric, reloadable, settled};

const SWAPS: u64 = 300;
const CLIENTS: u64 = 8;

/// The content of one answer.
struct Placed {
    request: u64,
    text: usize,
    generation: u64,
    rank: String,
}

async fn requests(gateway: Arc<Running>, stop: Arc<AtomicBool>, number: Arc<AtomicU64>) -> Vec<Placed> {
    let client = Client::data(&gateway);
    let mut placed = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let request = number.fetch_add(1, Ordering::Relaxed);
        let text = (request % 2) as usize;
        let answer = client.post("/generate", json!({ "text": TEXTS[text], "rid": request }).to_string()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let generation = answer.header("x-semmoe-generation").parse().unwrap();
        placed.push(Placed { request, text, generation, rank: answer.header("x-semmoe-rank").to_owned() });
    }
    placed
}

/// Alternates upload, path and rollback. Returns which rank the first text prefers in each generation.
async fn swaps(gateway: &Running, fixture: &Fixture) -> HashMap<u64, u64> {
    let admin = Client::admin(gateway);
    let uploads: Vec<Vec<u8>> = (0..2).map(|shift| fixture.builder(&TEXTS, shift).to_bytes().unwrap()).collect();
    let files = ["first", "turned"];
    fixture.write(files[1], &TEXTS, 1);
    let mut homes = HashMap::from([(1, 0)]);
    for swap in 1..=SWAPS {
        let shift = swap % 2;
        let answer = match swap % 3 {
            0 => {
                let headers = [("content-type", "application/octet-stream")];
                let body = uploads[shift as usize].clone();
                admin.call(Method::POST, "/admin/tables?backend=pod-a", &headers, body).await
            }
            1 => {
                let command = json!({ "backend": "pod-a", "path": files[shift as usize] });
                admin.post("/admin/tables", command.to_string()).await
            }
            _ => admin.post("/admin/tables/rollback", json!({ "backend": "pod-a" }).to_string()).await,
        };
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(homes.insert(answer.json()["generation"].as_u64().unwrap(), shift), None);
    }
    homes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_swaps_under_load_lose_and_misroute_nothing() {
    let mut mock = canned(2);
    let fixture = Fixture::new(2);
    let gateway = Arc::new(reloadable(&mock, &fixture, "").await);
    let (stop, number) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| tokio::spawn(requests(Arc::clone(&gateway), Arc::clone(&stop), Arc::clone(&number))))
        .collect();
    let homes = swaps(&gateway, &fixture).await;
    stop.store(true, Ordering::Relaxed);
    let mut placed = Vec::new();
    for client in clients {
        placed.extend(client.await.unwrap());
    }
    settled(&gateway).await;
    assert_eq!(homes.len() as u64, SWAPS + 1);
    assert!(placed.len() as u64 >= CLIENTS, "there was load");
    let mut ran = HashMap::new();
    while let Ok(request) = mock.seen.try_recv() {
        let body = request.json();
        ran.insert(body["rid"].as_u64().unwrap(), body["routed_dp_rank"].as_u64().unwrap());
    }
    assert_eq!(ran.len(), placed.len(), "each request reached the engine");
    let misrouted = placed.iter().filter(|placed| {
        let expected = (homes[&placed.generation] + placed.text as u64) % 2;
        ran[&placed.request] != expected || placed.rank != expected.to_string()
    });
    assert_eq!(misrouted.count(), 0, "of {}", placed.len());
    let generations: std::collections::HashSet<u64> = placed.iter().map(|placed| placed.generation).collect();
    assert!(generations.len() > 10, "requests and swaps did not run side by side: {generations:?}");
    assert_eq!(metric(&gateway, "semmoe_table_reloads_total{outcome=\"ok\"}").await, SWAPS as f64);
    assert_eq!(metric(&gateway, "semmoe_tables_swap_seconds_count").await, SWAPS as f64);
    for clock in ["wall", "cpu"] {
        let waits = format!("semmoe_swap_wait_seconds_count{{clock=\"{clock}\"}}");
        assert!(metric(&gateway, &waits).await >= SWAPS as f64, "who reads the state beside a swap is timed");
    }
}
