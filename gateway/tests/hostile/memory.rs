//! How much memory clients can make the gateway hold, measured by the size of its process.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::PATIENCE;
use crate::child::Process;
use crate::engine::Engine;
use crate::wire::{self, DATA, END_HEADERS, HEADERS, RST_STREAM, frame, streams};

const CHAT: &str = "/v1/chat/completions";
const MB: u64 = 1_000_000;
const CONNECTIONS: u32 = 400;
const STREAMS: u32 = 100;

/// Opens all connections at once with these frames, and waits until the gateway has read them.
async fn attack(process: &Process, frames: &[u8]) -> Vec<TcpStream> {
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut stream = wire::open(process.data, &[]).await;
        // By then the gateway's settings and its window have arrived.
        wire::seen(&mut stream).await;
        // A gateway that has seen enough closes the connection.
        let _ = stream.write_all(frames).await;
        open.push(stream);
    }
    for stream in &mut open {
        wire::seen(stream).await;
    }
    open
}

/// The size of the process once it stops shrinking, or is below the limit.
async fn settles_below(process: &Process, limit: u64) -> u64 {
    let mut now = process.resident_bytes();
    for _ in 0..300 {
        if now <= limit {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        now = process.resident_bytes();
    }
    now
}

fn with_heads() -> Vec<u8> {
    let head = wire::post(CHAT);
    streams(STREAMS).flat_map(|stream| frame(HEADERS, END_HEADERS, stream, &head)).collect()
}

#[tokio::test]
async fn streams_with_headers_alone_are_bounded() {
    let engine = Engine::honest();
    let process = Process::start("", engine.address);
    drop(attack(&process, &[]).await);
    let before = process.resident_bytes();
    let open = attack(&process, &with_heads()).await;
    let during = process.resident_bytes();
    // `limits.open_streams` may stay open; the others get 503.
    assert_eq!(wire::metric(process.admin, "semmoe_open_streams ").await, 16_384.0);
    let refused = f64::from(CONNECTIONS * STREAMS) - 16_384.0;
    assert_eq!(wire::metric(process.admin, "semmoe_streams_refused_total ").await, refused);
    // Other clients are served.
    let answer = wire::get(process.data, "/v1/models").await;
    assert_eq!(wire::status(&answer), "200", "{answer}");
    drop(open);
    let closed = async { while wire::metric(process.admin, "semmoe_open_streams ").await > 0.0 {} };
    tokio::time::timeout(PATIENCE, closed).await.expect("every stream is counted out");
    let after = settles_below(&process, before + 50 * MB).await;
    assert!(during <= 300 * MB, "{CONNECTIONS} x {STREAMS} streams with headers hold {} MB", during / MB);
    assert!(after <= before + 50 * MB, "{} MB before, {} MB after", before / MB, after / MB);
}

/// A stream over the limit gets an answer that says so, and when to retry.
#[tokio::test]
async fn streams_over_the_limit_get_503() {
    let engine = Engine::honest();
    let process = Process::start("[limits]\nopen_streams = 5", engine.address);
    let mut stream = wire::open(process.data, &with_heads()).await;
    let mut reported = 0;
    while reported < 95 {
        let frame = wire::next(&mut stream).await.expect("the connection stays open");
        let is_reset = frame.kind == RST_STREAM && frame.payload != [0; 4];
        assert!(!is_reset, "an answer, not an error of the protocol");
        // The body says it in plain text; the status is in a compressed head.
        if frame.kind == DATA && !frame.payload.is_empty() {
            let body = String::from_utf8(frame.payload).unwrap();
            assert!(body.contains("too_many_streams"), "{body}");
            reported += 1;
        }
    }
    // The first five still wait for their bodies.
    assert_eq!(wire::metric(process.admin, "semmoe_open_streams ").await, 5.0);
}

#[tokio::test]
async fn first_pieces_of_bodies_are_bounded() {
    let engine = Engine::honest();
    let process = Process::start("[limits]\nbody_memory_bytes = 16_777_216", engine.address);
    drop(attack(&process, &[]).await);
    let before = process.resident_bytes();
    let mut frames = with_heads();
    // The connection's window is used up: 10 kB per stream.
    for stream in streams(STREAMS) {
        frames.extend(frame(DATA, 0, stream, &[b' '; 10_000]));
    }
    let open = attack(&process, &frames).await;
    let during = process.resident_bytes();
    drop(open);
    let after = settles_below(&process, before + 50 * MB).await;
    assert!(during <= 200 * MB, "{CONNECTIONS} x {STREAMS} streams with 10 kB hold {} MB", during / MB);
    assert!(after <= before + 50 * MB, "{} MB before, {} MB after", before / MB, after / MB);
}

/// HTTP/1.1 requests that wait for their bodies, each on its own connection.
#[tokio::test]
async fn waiting_requests_of_http1_are_small() {
    let engine = Engine::honest();
    let process = Process::start("", engine.address);
    drop(attack(&process, &[]).await);
    let before = process.resident_bytes();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n ");
    let mut open = Vec::new();
    for _ in 0..2 * CONNECTIONS {
        let mut socket = TcpStream::connect(process.data).await.unwrap();
        socket.write_all(head.as_bytes()).await.unwrap();
        open.push(socket);
    }
    // The last one was accepted; give it time.
    let served =
        async { while wire::metric(process.admin, "semmoe_open_connections ").await < f64::from(2 * CONNECTIONS) {} };
    tokio::time::timeout(PATIENCE, served).await.unwrap();
    let each = (process.resident_bytes() - before) / u64::from(2 * CONNECTIONS);
    assert!(each <= 20_000, "{each} bytes for each");
}

/// The whole answer to a long body.
async fn post(process: &Process, body: &str) -> String {
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
    wire::exchange(process.data, (head + body).as_bytes()).await
}

/// A short text can become a large tree of values, or many small messages: the parsed forms of bodies count too.
#[tokio::test]
async fn parsed_bodies_are_bounded() {
    let engine = Engine::honest();
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m/tokenizer.json");
    let model = format!("policy = \"prefix\"\ntokenizer = \"{tokenizer}\"");
    let process = Process::start_with("[limits]\nbody_memory_bytes = 134_217_728", engine.address, &model, None);
    let message = r#"{"role":"user","content":""}"#;
    let chat = |message: &str, count: usize| format!("{{\"messages\":[{}]}}", vec![message; count].join(","));
    assert_eq!(wire::status(&post(&process, &chat(message, 1)).await), "200");
    let before = process.resident_bytes();
    for (body, times) in [(chat(message, 140_000), 24), (chat("0", 1_000_000), 4)] {
        let answers = futures_util::future::join_all((0..times).map(|_| post(&process, &body))).await;
        for answer in answers {
            assert!(["200", "400", "503"].contains(&wire::status(&answer)), "{answer:.300}");
        }
    }
    let peak = process.peak_bytes();
    let after = settles_below(&process, before + 50 * MB).await;
    // The bodies' own limit, and as much again for one chat being scored.
    assert!(peak <= before + 200 * MB, "{} MB before, {} MB at most", before / MB, peak / MB);
    assert!(after <= before + 50 * MB, "{} MB before, {} MB after", before / MB, after / MB);
}
