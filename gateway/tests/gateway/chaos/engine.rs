//! The misbehaving engine: a process of its own, so that it can be killed and frozen. It writes HTTP to bare sockets,
//! so that it can send what no library would.
//!
//! The process is this test binary, started again with one test and an environment variable. It reads the fault for
//! requests from standard input, one word per line, and exits at its end.

use std::io::BufRead;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use semmoe_mock_engine::{RawRequest, Reply, Step, Wire, chunk, close, document, send};
use serde_json::json;

/// The port to listen on; 0 picks a free one.
pub(super) const PORT: &str = "SEMMOE_CHAOS_PORT";
/// The test that acts as the engine.
pub(super) const TEST: &str = "chaos::engine::process";
/// Printed by the engine before its port.
pub(super) const READY: &str = "listening on ";

/// The fault for requests. Probes always succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Good,
    /// Every response is slow.
    Slow,
    /// `content-length` exceeds the body.
    Long,
    /// `content-length` is less than the body.
    Short,
    /// The connection is reset in the middle of an event or a JSON document.
    Reset,
    /// The connection is closed instead of a response.
    HangUp,
    /// The head is not HTTP.
    Garbage,
    /// The head breaks off.
    HalfHead,
    /// A chunk has no size.
    BadChunk,
    /// More bytes follow the answer.
    Trailing,
    /// 503, as a proxy sends it.
    Proxy,
}

impl Mode {
    pub(super) const ALL: [Self; 11] = [
        Self::Good,
        Self::Slow,
        Self::Long,
        Self::Short,
        Self::Reset,
        Self::HangUp,
        Self::Garbage,
        Self::HalfHead,
        Self::BadChunk,
        Self::Trailing,
        Self::Proxy,
    ];

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| format!("{mode:?}") == name)
    }
}

static NOW: Mutex<Mode> = Mutex::new(Mode::Good);

/// Does nothing unless this process was started as an engine.
#[test]
fn process() {
    let Ok(port) = std::env::var(PORT) else { return };
    let address = SocketAddr::from(([127, 0, 0, 1], port.parse().unwrap()));
    let wire = Wire::start_at(address, None, async |request| answer(&request));
    println!("\n{READY}{}", wire.address.port());
    for line in std::io::stdin().lock().lines() {
        let Some(mode) = line.ok().as_deref().and_then(Mode::named) else { break };
        *NOW.lock().unwrap() = mode;
        println!("\nmode {mode:?}");
    }
}

fn answer(asked: &RawRequest) -> Reply {
    match asked.path() {
        "/health" | "/ping" => return send(document("", "{}")),
        "/server_info" => {
            let info = json!({ "model_path": "/models/tiny", "version": "0.5.23", "dp_size": 2 });
            return send(document("", &info.to_string()));
        }
        "/v1/chat/completions" => {}
        _ => return send(&b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"[..]),
    }
    let (mode, body) = (*NOW.lock().unwrap(), asked.json());
    match mode {
        Mode::HangUp => vec![Step::Close],
        Mode::Garbage => close(&b"\x16\x03\x01 what?\r\n\r\n"[..]),
        Mode::HalfHead => close("HTTP/1.1 200 OK\r\ncontent-ty"),
        Mode::Proxy => {
            send("HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\ngone")
        }
        _ if body["stream"] == true => stream(mode, &super::events(&body["id"])),
        _ => whole(mode, &super::document(&body["id"])),
    }
}

fn whole(mode: Mode, body: &str) -> Reply {
    let good = document("", body);
    let announced = |bytes: usize, sent: &str| {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length:";
        format!("{head} {bytes}\r\n\r\n{sent}")
    };
    match mode {
        Mode::Slow => vec![Step::Wait(Duration::from_millis(20)), Step::Send(good)],
        Mode::Long => close(announced(body.len() + 7, body)),
        // The connection stays open: the rest must not become another client's answer.
        Mode::Short => send(announced(body.len() - 7, body)),
        Mode::Reset | Mode::BadChunk => {
            vec![Step::Send(announced(body.len(), &body[..body.len() / 2]).into()), Step::Reset]
        }
        Mode::Trailing => [send(good), send("more than was announced")].concat(),
        _ => send(good),
    }
}

fn stream(mode: Mode, events: &[String]) -> Reply {
    let mut reply = send("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
    let pause = Duration::from_millis(if mode == Mode::Slow { 10 } else { 1 });
    for (at, event) in events.iter().enumerate() {
        if at == events.len() / 2 {
            match mode {
                Mode::Reset | Mode::Long => {
                    return [reply, vec![Step::Send(chunk(&event[..event.len() / 2]).into()), Step::Reset]].concat();
                }
                Mode::BadChunk | Mode::Short => return [reply, close("zz\r\nno size\r\n")].concat(),
                _ => {}
            }
        }
        reply.extend([Step::Wait(pause), Step::Send(chunk(event).into())]);
    }
    reply.extend(send("0\r\n\r\n"));
    if mode == Mode::Trailing {
        reply.extend(send("data: after the end\n\n"));
    }
    reply
}
