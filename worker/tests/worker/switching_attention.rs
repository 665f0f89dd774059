//! A unit whose attention switches between dp and tp while it serves: no request is lost or changed, nothing is left
//! behind, and sequences return to their ranks.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{LAYERS, TOP_K, Unit, golden, greedy};
use crate::switching::keep_asking;
use futures_util::future::join_all;
use semmoe_tables::Attention;
use semmoe_worker::{KvBudget, TransportChoice};
use serde_json::{Value, json};

fn start(world: u16, attention: Attention) -> Unit {
    start_over(TransportChoice::Auto, world, attention)
}

fn start_over(transport: TransportChoice, world: u16, attention: Attention) -> Unit {
    Unit::start_with(world, |config| {
        config.transport = transport;
        config.attention = attention;
        config.both_attentions = true;
        config.limits.running = 64;
    })
}

/// Keys and values move during the switch, or `kv_step_bytes` before each step.
async fn changes_under_load(unit: Unit, targets: &[&str], clients: usize, kv_step_bytes: Option<u64>) {
    switches_under_load(&unit, targets, clients, kv_step_bytes).await;
    unit.end();
}

/// Switches while clients ask, whose answers are golden in every layout; afterwards nothing is left of them.
pub(crate) async fn switches_under_load(unit: &Unit, targets: &[&str], clients: usize, kv_step_bytes: Option<u64>) {
    let world = unit.world();
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let clients = join_all((0..clients).map(|client| keep_asking(unit, client, true, &stop, &answered)));
    let operator = async {
        for (epoch, layout) in targets.iter().enumerate() {
            let before = answered.load(Ordering::Relaxed);
            let switch = json!({"to": layout, "if_epoch": epoch, "kv_step_bytes": kv_step_bytes});
            let status = unit.ok("/switch", &switch).await;
            assert_eq!((&status["state"], &status["epoch"]), (&json!("stable"), &json!(epoch + 1)), "{status}");
            assert_eq!(status["layout"], *layout);
            let info = unit.get("/server_info").await;
            let ranks = match layout.strip_prefix("tp:").and_then(|groups| groups.split_once('x')) {
                Some((_, ranks)) => ranks.parse().unwrap(),
                None => {
                    if layout.starts_with("tp") {
                        world
                    } else {
                        1
                    }
                }
            };
            assert_eq!(
                ["dp_size", "tp_size"].map(|size| &info[size]),
                [&json!(world / ranks), &json!(ranks)],
                "{layout}"
            );
            assert_eq!(info["epoch"], json!(epoch + 1));
            // Requests continue in the new layout.
            while answered.load(Ordering::Relaxed) < before + 40 {
                tokio::task::yield_now().await;
            }
        }
        stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(clients, operator);
    unit.quiet().await;
    let metrics = unit.metrics().await;
    assert_eq!(metrics.sum("semmoe_switch_total", &[("outcome", "committed")]), targets.len() as u64);
    assert_eq!(metrics.sum("semmoe_kv_pages", &[("state", "used")]), 0);
    let activations = metrics.sum("semmoe_activations_total", &[]);
    assert_eq!(activations, metrics.sum("semmoe_tokens_total", &[]) * (LAYERS * TOP_K) as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_golden_through_every_change() {
    for kv_step_bytes in [None, Some(0)] {
        let unit = start(2, Attention::Dp);
        let targets = ["tp-ep", "ep", "tp", "dp-tp", "tp-ep", "tp", "ep"];
        changes_under_load(unit, &targets, 24, kv_step_bytes).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_golden_where_keys_and_values_move_in_messages() {
    for kv_step_bytes in [None, Some(1 << 20)] {
        let unit = start_over(TransportChoice::Tcp, 2, Attention::Dp);
        changes_under_load(unit, &["tp-ep", "ep", "tp", "ep"], 24, kv_step_bytes).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_of_four_that_began_with_tp_serves_200_at_once() {
    for kv_step_bytes in [None, Some(1 << 20)] {
        changes_under_load(start(4, Attention::Tp), &["ep", "tp", "ep", "tp-ep"], 200, kv_step_bytes).await;
    }
}

/// One request over its own socket, left in the middle of its answer unless `whole`.
fn ask(address: &str, body: &Value, whole: bool) -> u16 {
    let body = body.to_string();
    let mut client = TcpStream::connect(address).unwrap();
    let length = body.len();
    write!(client, "POST /generate HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
        .unwrap();
    let mut head = [0; 12];
    client.read_exact(&mut head).unwrap();
    if whole {
        client.read_to_end(&mut Vec::new()).unwrap();
    }
    std::str::from_utf8(&head[9..]).unwrap().parse().unwrap()
}

/// One client's requests: long prompts with common prefixes, sampled answers, some of which it abandons.
fn storm(address: &str, client: u64) {
    let mut random = fastrand::Rng::with_seed(client);
    for index in 0..14 {
        let (family, length) = (random.u32(0..3), random.u32(1..400));
        let ids: Vec<u32> =
            (0..length).map(|at| if at < 200 { at * 7 % 900 + family } else { at * 3 % 9000 }).collect();
        let body = json!({
            "input_ids": ids, "stream": random.bool(), "return_routed_experts": random.bool(),
            "routed_dp_rank": random.u16(0..2),
            "sampling_params": {"max_new_tokens": random.u32(1..60), "temperature": 0.8, "ignore_eos": true},
        });
        assert_eq!(ask(address, &body, index == 0 || random.u8(0..10) > 3), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_through_changes_leaves_nothing_behind() {
    storm_through_changes(None).await;
}

/// Many switches find sequences whose pages have not moved since the previous one.
#[tokio::test(flavor = "multi_thread")]
async fn a_storm_through_lazy_changes_leaves_nothing_behind() {
    storm_through_changes(Some(0)).await;
}

/// Chunked prompts, and so few pages that requests wait for each other and prefixes are evicted, while attention
/// switches.
async fn storm_through_changes(kv_step_bytes: Option<u64>) {
    const PAGES: u64 = 40;
    let unit = Unit::start_with(2, |config| {
        config.both_attentions = true;
        config.limits.kv = KvBudget::Tokens(PAGES as usize * 64);
        config.limits.running = 6;
        config.limits.step_tokens = 64;
        config.threads = if kv_step_bytes.is_some() { 2 } else { 1 };
    });
    let address = unit.url.authority().to_string();
    let clients: Vec<_> = (0..8)
        .map(|client| {
            let address = address.clone();
            tokio::task::spawn_blocking(move || storm(&address, client))
        })
        .collect();
    let mut changes = 0;
    while clients.iter().any(|client| !client.is_finished()) {
        let to = ["tp-ep", "ep", "tp", "ep"][changes % 4];
        let (status, _, answer) = unit.ask("/switch", &json!({"to": to, "kv_step_bytes": kv_step_bytes})).await;
        // Without room it is refused, and nothing changes.
        assert!(status == 200 || (status == 422 && answer.to_string().contains("pages")), "{status} {answer}");
        changes += usize::from(status == 200);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for client in clients {
        client.await.unwrap();
    }
    assert!(changes > 4, "{changes} changes");
    unit.quiet().await;
    let to_dp = unit.ok("/switch", &json!({"to": "ep", "kv_step_bytes": kv_step_bytes})).await;
    assert_eq!(to_dp["layout"], "ep");
    let metrics = unit.metrics().await;
    let pages = |state| metrics.sum("semmoe_kv_pages", &[("state", state)]);
    assert_eq!((pages("used"), pages("cached") + pages("free")), (0, 2 * PAGES));
    for phase in ["prefill", "decode"] {
        let tokens = metrics.sum("semmoe_tokens_total", &[("phase", phase)]);
        assert_eq!(metrics.sum("semmoe_activations_total", &[("phase", phase)]), tokens * (LAYERS * TOP_K) as u64);
    }
    for rank in unit.get("/v1/loads").await["loads"].as_array().unwrap() {
        assert_eq!((&rank["num_running_reqs"], &rank["num_waiting_reqs"]), (&json!(0), &json!(0)));
    }
    unit.end();
}

/// Prefixes that no sequence holds move during a switch, and are dropped if pages move afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn prefixes_that_no_sequence_holds_are_left_behind_lazily() {
    let unit = start(2, Attention::Dp);
    let prompt: Vec<u32> = (0..200).collect();
    let cached = async || unit.metrics().await.sum("semmoe_kv_pages", &[("rank", "0"), ("state", "cached")]);
    let mut answers = Vec::new();
    for (switch, pages) in [
        (json!({"to": "tp-ep"}), 3),
        (json!({"to": "ep", "kv_step_bytes": 0}), 0),
        (json!({"to": "tp", "kv_step_bytes": 0}), 0),
    ] {
        let mut body = greedy(&json!(prompt), 8);
        body["routed_dp_rank"] = json!(0);
        answers.push(unit.ok("/generate", &body).await["output_ids"].clone());
        assert_eq!(cached().await, 3);
        unit.ok("/switch", &switch).await;
        assert_eq!(cached().await, pages, "{switch}");
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    let (status, _, answer) = unit.ask("/switch", &json!({"action": "commit", "kv_step_bytes": 1})).await;
    assert!(status == 400 && answer["error"]["param"] == "kv_step_bytes", "{status} {answer}");
    unit.stop(0);
}

/// Clients leave right after a lazy switch, and the unit is stopped: ranks that still move pages wait for each other.
#[tokio::test(flavor = "multi_thread")]
async fn a_unit_stops_while_pages_of_cancelled_sequences_are_to_come() {
    let unit = start(2, Attention::Tp);
    let streams = join_all((0..24).map(|client: u32| {
        let prompt: Vec<u32> = (0..300).map(|at| (at * 7 + client * 13) % 9000).collect();
        let mut body = greedy(&json!(prompt), 1500);
        body["stream"] = json!(true);
        unit.client.send(unit.post("/generate", body.to_string().as_bytes()))
    }))
    .await;
    assert!(streams.iter().all(|stream| stream.as_ref().unwrap().status() == 200));
    while running(&unit).await < 24 {
        tokio::task::yield_now().await;
    }
    unit.ok("/switch", &json!({"to": "ep", "kv_step_bytes": 0})).await;
    drop(streams);
    unit.end();
}

/// Sequences in the batches of all ranks.
async fn running(unit: &Unit) -> u64 {
    let loads = unit.get("/v1/loads").await;
    loads["loads"].as_array().unwrap().iter().map(|rank| rank["num_running_reqs"].as_u64().unwrap()).sum()
}

/// Local and all activations so far.
async fn activations(unit: &Unit) -> (u64, u64) {
    let metrics = unit.metrics().await;
    let of = |labels: &[(&str, &str)]| metrics.sum("semmoe_activations_total", labels);
    (of(&[("where", "local")]), of(&[]))
}

/// The share of local activations of long requests on their best ranks, before attention was tp for a while and after.
#[tokio::test(flavor = "multi_thread")]
async fn sequences_come_back_to_the_ranks_that_host_their_experts() {
    let unit = start(4, Attention::Dp);
    let golden = golden();
    // Each prompt's local activations on each rank.
    let mut best = Vec::new();
    for prompt in &golden {
        let mut local = Vec::new();
        for rank in 0..4 {
            let before = activations(&unit).await;
            let mut body = greedy(&prompt["input_ids"], 40);
            body["routed_dp_rank"] = json!(rank);
            unit.ok("/generate", &body).await;
            local.push(activations(&unit).await.0 - before.0);
        }
        best.push(local);
    }
    // Pinned as a gateway would: to the best rank, with equal load on all ranks. (Uneven pins would be evened out, at
    // some cost in locality.)
    let mut loads = [0; 4];
    let pins: Vec<usize> = (0..24)
        .map(|index| {
            let open = (0..4).filter(|rank| loads[*rank] < 6);
            let rank = open.max_by_key(|rank| best[index % golden.len()][*rank]).unwrap();
            loads[rank] += 1;
            rank
        })
        .collect();
    let requests = join_all((0..24).map(|index| {
        let (prompt, unit) = (index % golden.len(), &unit);
        let mut body = greedy(&golden[prompt]["input_ids"], 1500);
        body["routed_dp_rank"] = json!(pins[index]);
        async move { unit.ok("/generate", &body).await }
    }));
    let watch = async {
        let share = async || {
            let begin = activations(&unit).await;
            loop {
                tokio::time::sleep(Duration::from_millis(50)).await;
                let now = activations(&unit).await;
                if now.1 - begin.1 > 24 * 100 * (LAYERS * TOP_K) as u64 {
                    return (now.0 - begin.0) as f64 / (now.1 - begin.1) as f64;
                }
            }
        };
        // All of them are decoding.
        while running(&unit).await < 24 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let before = share().await;
        unit.ok("/switch", &json!({"to": "tp-ep"})).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        unit.ok("/switch", &json!({"to": "ep"})).await;
        let after = share().await;
        println!("LAR {before:.4} before, {after:.4} after");
        assert!(after >= 0.95 * before, "{after} after, {before} before");
    };
    tokio::join!(requests, watch);
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn attention_that_the_ranks_do_not_have_is_refused() {
    let unit = Unit::start(2);
    let (status, _, answer) = unit.ask("/switch", &json!({"to": "tp-ep"})).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("only to one of ep, dp-tp"), "{status} {message}");
    unit.stop(0);
    let unit = start(2, Attention::Dp);
    assert_eq!(unit.get("/server_info").await["layouts"], json!(["ep", "tp", "dp-tp", "tp-ep"]));
    let status = unit.ok("/switch", &json!({"to": "tp-ep", "action": "prepare"})).await;
    assert_eq!(status["state"], "prepared");
    unit.ok("/switch", &json!({"action": "abort"})).await;
    assert_eq!(unit.get("/server_info").await["layout"], "ep");
    let prompt = &golden()[0];
    assert_eq!(unit.ok("/generate", &greedy(&prompt["input_ids"], 16)).await["output_ids"], prompt["greedy_16"]);
    unit.stop(0);
}
