//! HTTP/2 frames that cost the sender little: bounded in number, memory and time, while others are served.

use tokio::io::AsyncWriteExt;

use crate::PATIENCE;
use crate::child::Process;
use crate::engine::Engine;
use crate::wire::{
    self, CONTINUATION, DATA, END_HEADERS, END_STREAM, GET, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS, frame, streams,
};

const CHAT: &str = "/v1/chat/completions";
const MB: u64 = 1_000_000;

/// Sends until the gateway stops reading, up to a time limit.
async fn flood(process: &Process, frames: Vec<u8>, times: usize) -> tokio::net::TcpStream {
    let mut stream = wire::open(process.data, &[]).await;
    let sending = async {
        for _ in 0..times {
            if stream.write_all(&frames).await.is_err() {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(std::time::Duration::from_secs(2), sending).await;
    stream
}

#[tokio::test]
async fn floods_hold_no_memory_and_block_no_client() {
    let engine = Engine::honest();
    let process = Process::start("", engine.address);
    drop(wire::open(process.data, &[]).await);
    let before = process.resident_bytes();
    let resets = streams(10_000).flat_map(|stream| {
        [frame(HEADERS, END_STREAM | END_HEADERS, stream, &GET), frame(RST_STREAM, 0, stream, &[0, 0, 0, 8])].concat()
    });
    let header = [&[0, 1, b'x', 127, 0][..], &[b'y'; 127]].concat();
    let continued = [frame(HEADERS, 0, 1, &GET), frame(CONTINUATION, 0, 1, &header.repeat(100)).repeat(1000)].concat();
    let mut bomb = [&GET[..], &[0x40, 1, b'x', 127, 0xf1, 0x1e], &[b'y'; 4080]].concat();
    bomb.extend([0xbe; 12_000]);
    let empty = [frame(HEADERS, END_HEADERS, 1, &wire::post(CHAT)), frame(DATA, 0, 1, &[]).repeat(10_000)].concat();
    for (name, frames, times) in [
        ("rapid reset", resets.collect(), 1),
        ("continuations", continued, 1),
        ("a header bomb", frame(HEADERS, END_STREAM | END_HEADERS, 1, &bomb), 1),
        ("empty pieces", empty, 1),
        ("pings", frame(PING, 0, 0, &[0; 8]).repeat(1000), 200),
        ("settings", frame(SETTINGS, 0, 0, &[]).repeat(1000), 200),
        ("goodbyes", frame(GOAWAY, 0, 0, &[0; 8]).repeat(1000), 20),
    ] {
        let stream = flood(&process, frames, times).await;
        let answer = wire::get(process.data, "/v1/models").await;
        assert_eq!(wire::status(&answer), "200", "{name}: {answer}");
        drop(stream);
    }
    let peak = process.peak_bytes();
    assert!(peak <= before + 100 * MB, "{} MB before, {} MB at most", before / MB, peak / MB);
    let ended = async { while wire::metric(process.admin, "semmoe_open_streams ").await > 0.0 {} };
    tokio::time::timeout(PATIENCE, ended).await.expect("every stream ends");
}

/// A byte now and then does not restart the time limit of a body.
#[tokio::test]
async fn slow_pieces_have_one_clock() {
    let engine = Engine::honest();
    let process = Process::start("[timeouts]\nbody_seconds = 0.3", engine.address);
    let mut stream = wire::open(process.data, &frame(HEADERS, END_HEADERS, 1, &wire::post(CHAT))).await;
    let (mut reader, mut writer) = stream.split();
    let dripping = async {
        while writer.write_all(&frame(DATA, 0, 1, b" ")).await.is_ok() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        std::future::pending::<()>().await;
    };
    let mut reported = Vec::new();
    let reading = async {
        let mut piece = [0; 1024];
        while !String::from_utf8_lossy(&reported).contains("body_timeout") {
            let length = tokio::io::AsyncReadExt::read(&mut reader, &mut piece).await.unwrap();
            assert!(length > 0, "the connection ended without an answer");
            reported.extend_from_slice(&piece[..length]);
        }
    };
    tokio::select! {
        () = dripping => {}
        ended = tokio::time::timeout(PATIENCE, reading) => ended.expect("an answer in time"),
    }
    assert!(engine.seen().is_empty());
}
