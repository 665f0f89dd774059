//! Clients that request and do not read: the memory for each of them is bounded, counted, and returned.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::PATIENCE;
use crate::child::Process;
use crate::engine::Engine;
use crate::wire::{self, DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM, frame, streams};

const CHAT: &str = "/v1/chat/completions";
const MB: u64 = 1_000_000;
const HELD: f64 = 131_072.0;
const READERS: u32 = 300;

/// On a busy machine an engine accepts some of hundreds of connections late; their requests would get a 503 and hold
/// nothing.
const UNHURRIED: &str = "[timeouts]\nconnect_seconds = 60";

/// An engine whose every answer is 4 MB, as events or as one document.
fn talkative(kind: &str, line: &str) -> Engine {
    let body = line.repeat((4 << 20) / line.len());
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n", body.len());
    Engine::start((head + &body).as_bytes())
}

fn documents() -> Engine {
    talkative("application/json", &" ".repeat(1 << 16))
}

fn events() -> Engine {
    talkative("text/event-stream", &format!("data: {{\"text\": \"{}\"}}\n\n", "x".repeat(4000)))
}

/// An HTTP/1.1 client that sends a request and reads nothing.
async fn ask(process: &Process) -> TcpStream {
    let mut socket = TcpStream::connect(process.data).await.unwrap();
    let body = "{\"stream\": true}";
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", body.len());
    socket.write_all((head + body).as_bytes()).await.unwrap();
    socket
}

/// Waits until a metric line has this value, at most [`PATIENCE`] for each change: hundreds of readers take minutes to
/// stall on a busy machine.
async fn shows(process: &Process, line: &str, value: f64) {
    let mut seen = Vec::new();
    let mut changed = Instant::now();
    while seen.last() != Some(&value) {
        let now = wire::metric(process.admin, line).await;
        if seen.last() != Some(&now) {
            seen.push(now);
            changed = Instant::now();
        }
        if changed.elapsed() > PATIENCE || seen.len() > 10_000 {
            let metrics = wire::get(process.admin, "/metrics").await;
            let ended = metrics.lines().filter(|line| line.contains("_total{") && !line.ends_with(" 0"));
            panic!("{line} is never {value}: {seen:?}\n{}", ended.collect::<Vec<_>>().join("\n"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

const ANSWERS: &str = "semmoe_memory_bytes{kind=\"answers\"} ";

/// Resident memory, once it stops growing.
async fn steady_bytes(process: &Process) -> u64 {
    let (mut bytes, mut still) = (process.resident_bytes(), 0);
    while still < 10 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = process.resident_bytes();
        still = if now > bytes + MB { 0 } else { still + 1 };
        bytes = now;
    }
    bytes
}

/// Memory is held for all of them, and then for none.
async fn bounded(process: &Process, before: u64, clients: Vec<TcpStream>, answers: u32) {
    let each = steady_bytes(process).await.saturating_sub(before) / u64::from(answers);
    assert!(each <= HELD as u64, "{each} bytes for each answer");
    shows(process, ANSWERS, HELD * f64::from(answers)).await;
    drop(clients);
    shows(process, ANSWERS, 0.0).await;
    let mut after = process.resident_bytes();
    for _ in 0..100 {
        if after <= before + 30 * MB {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        after = process.resident_bytes();
    }
    assert!(after <= before + 30 * MB, "{} MB before, {} MB after", before / MB, after / MB);
}

#[tokio::test]
async fn slow_readers_of_http1_hold_little() {
    for engine in [documents(), events()] {
        let process = Process::start(UNHURRIED, engine.address);
        drop(wire::get(process.data, "/v1/models").await);
        let before = process.resident_bytes();
        let mut clients = Vec::new();
        for _ in 0..READERS {
            clients.push(ask(&process).await);
        }
        bounded(&process, before, clients, READERS).await;
    }
}

/// Without a window: the socket accepts everything, and each stream waits for its own window.
#[tokio::test]
async fn slow_readers_of_http2_hold_little() {
    for engine in [documents(), events()] {
        let process = Process::start(UNHURRIED, engine.address);
        drop(wire::get(process.data, "/v1/models").await);
        let before = process.resident_bytes();
        let head = wire::post(CHAT);
        let asked: Vec<u8> = streams(READERS / 3)
            .flat_map(|stream| {
                let head = frame(HEADERS, END_HEADERS, stream, &head);
                [head, frame(DATA, END_STREAM, stream, b"{\"stream\": true}")].concat()
            })
            .collect();
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(wire::open(process.data, &asked).await);
        }
        bounded(&process, before, clients, READERS).await;
    }
}

/// A client that resumes reading receives everything, however long it paused.
#[tokio::test]
async fn a_slow_reader_gets_its_whole_answer() {
    let engine = events();
    let process = Process::start("", engine.address);
    let mut client = ask(&process).await;
    shows(&process, ANSWERS, HELD).await;
    let (mut text, mut piece) = (Vec::new(), vec![0; 4096]);
    let read = async {
        while !text.ends_with(b"\r\n0\r\n\r\n") {
            let length = client.read(&mut piece).await.unwrap();
            assert_ne!(length, 0, "the answer was cut");
            text.extend_from_slice(&piece[..length]);
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("all of it in time");
    assert!(text.len() > 4_000_000, "{}", text.len());
    shows(&process, ANSWERS, 0.0).await;
}

#[tokio::test]
async fn slow_readers_hold_memory_to_a_limit() {
    let engine = events();
    let process = Process::start("[limits]\nanswer_memory_bytes = 524_288", engine.address);
    let mut clients = Vec::new();
    for _ in 0..10 {
        clients.push(ask(&process).await);
    }
    shows(&process, "semmoe_slow_clients_closed_total{reason=\"memory\"} ", 6.0).await;
    shows(&process, ANSWERS, 4.0 * HELD).await;
    // A client that reads is served.
    let answer = wire::get(process.data, "/v1/models").await;
    assert_eq!(wire::status(&answer), "200", "{answer}");
}

/// A stream without a window occupies a rank, so it is ended after a limit; its connection is left alone.
#[tokio::test]
async fn a_stream_that_takes_nothing_is_reset() {
    let engine = events();
    let process = Process::start("[timeouts]\nclient_seconds = 0.4", engine.address);
    let head = frame(HEADERS, END_HEADERS, 1, &wire::post(CHAT));
    let asked = [head, frame(DATA, END_STREAM, 1, b"{\"stream\": true}")].concat();
    let mut client = wire::open(process.data, &asked).await;
    let mut last = wire::next(&mut client).await;
    while last.as_ref().is_some_and(|frame| frame.kind != RST_STREAM) {
        last = wire::next(&mut client).await;
    }
    assert!(last.is_some(), "the connection was closed");
    shows(&process, "semmoe_slow_clients_closed_total{reason=\"time\"} ", 1.0).await;
    shows(&process, "semmoe_open_streams ", 0.0).await;
    wire::seen(&mut client).await;
}
