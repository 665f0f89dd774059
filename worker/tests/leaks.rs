//! A storm of requests of all kinds, many of whose clients leave at any time, bounded by counts and not by a clock:
//! afterwards nothing is left, and the counters add up. bench/worker/soak runs this for minutes, with processes and a
//! gateway.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, Ordering};

use semmoe_worker::KvBudget;
use serde_json::{Value, json};
use support::{LAYERS, TOP_K, Unit};

const REQUESTS: u32 = 160;
const CLIENTS: usize = 8;
const PAGES: u64 = 24;

/// How a client leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leave {
    AtOnce,
    InTheAnswer,
    Never,
}

fn request(random: &mut fastrand::Rng) -> (&'static str, Value) {
    let length = random.u32(1..400);
    let family = random.u32(0..3);
    let ids: Vec<u32> =
        (0..length).map(|i| if i < 200 { i * 7 % 900 + family } else { random.u32(10..9000) }).collect();
    let (new, stream) = (random.u32(1..40), random.bool());
    let rank = random.u16(0..2);
    match random.u8(0..3) {
        0 => (
            "/generate",
            json!({
                "input_ids": ids, "stream": stream, "return_routed_experts": random.bool(), "routed_dp_rank": rank,
                "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": true},
            }),
        ),
        1 => (
            "/v1/completions",
            json!({"prompt": [ids, [5, 6]], "max_tokens": new, "stream": stream, "logprobs": 2, "stop": [" the"]}),
        ),
        _ => (
            "/v1/chat/completions",
            json!({
                "messages": [{"role": "user", "content": "word ".repeat(length as usize / 3)}], "max_tokens": new,
                "stream": stream, "routed_dp_rank": rank,
            }),
        ),
    }
}

/// One request over its own socket; returns the status unless the client left before it arrived.
fn ask(address: &str, (path, body): &(&str, Value), leave: Leave) -> Option<u16> {
    let body = body.to_string();
    let mut client = TcpStream::connect(address).unwrap();
    write!(
        client,
        "POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    if leave == Leave::AtOnce {
        return None;
    }
    let mut head = [0; 12];
    client.read_exact(&mut head).unwrap();
    if leave == Leave::Never {
        client.read_to_end(&mut Vec::new()).unwrap();
    }
    std::str::from_utf8(&head[9..]).unwrap().parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_leaves_nothing_behind() {
    // So few pages that sequences wait for each other and prefixes are evicted.
    let unit = Unit::start_with(2, |config| {
        config.limits.kv = KvBudget::Tokens(PAGES as usize * 64);
        config.limits.running = 6;
    });
    let (address, served) = (unit.url.authority().to_string(), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (address, served) = (&address, &served);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(client as u64);
                for index in 0..REQUESTS / CLIENTS as u32 {
                    // The first of each kind is read completely.
                    let leave = match random.u8(0..10) {
                        _ if index == 0 => Leave::Never,
                        0..2 => Leave::AtOnce,
                        2..5 => Leave::InTheAnswer,
                        _ => Leave::Never,
                    };
                    let status = ask(address, &request(&mut random), leave);
                    assert!(matches!(status, None | Some(200)), "{status:?}");
                    served.fetch_add(u32::from(status == Some(200)), Ordering::Relaxed);
                }
            });
        }
    });
    assert!(served.load(Ordering::Relaxed) >= REQUESTS / 3);
    unit.quiet().await;

    let metrics = unit.metrics().await;
    let pages = |state| metrics.sum("semmoe_kv_pages", &[("state", state)]);
    assert_eq!((pages("used"), pages("cached") + pages("free")), (0, 2 * PAGES));
    assert!(metrics.sum("semmoe_cached_prompt_tokens_total", &[]) > 0, "prefixes were shared");
    assert!(metrics.sum("semmoe_kv_evicted_pages_total", &[]) > 0, "pages were scarce");
    for phase in ["prefill", "decode"] {
        let tokens = metrics.sum("semmoe_tokens_total", &[("phase", phase)]);
        for layer in 0..LAYERS {
            let of = [("phase", phase), ("layer", &layer.to_string())];
            assert_eq!(metrics.sum("semmoe_activations_total", &of), tokens * TOP_K as u64);
            assert!(metrics.sum("semmoe_dispatch_bytes_total", &of) > 0);
        }
    }
    let loads = unit.get("/v1/loads").await;
    for rank in 0..2 {
        for field in ["num_running_reqs", "num_waiting_reqs", "num_used_tokens", "num_total_tokens"] {
            assert_eq!(loads["loads"][rank][field], 0, "{field} of rank {rank}");
        }
    }
    assert!(unit.stop(0).iter().all(Result::is_ok));
}
