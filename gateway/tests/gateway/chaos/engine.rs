//! The engine that misbehaves: a process of its own, so that it can be killed and frozen. It speaks HTTP over bare
//! sockets, so that it can say what no library would.
//!
//! The process is this test binary, started again with one test and an environment variable. It reads
//! the fault for requests from its standard input, one word a line, and ends when that ends.

use std::io::BufRead;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use semmoe_mock_engine::RawRequest;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

/// The port to listen on; 0 takes a free one.
pub(super) const PORT: &str = "SEMMOE_CHAOS_PORT";
/// The test that is the engine.
pub(super) const TEST: &str = "chaos::engine::process";
/// The text that the engine prints before its port.
pub(super) const READY: &str = "listening on ";

/// The fault for requests. Probes are always answered well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Good,
    /// Everything takes its time.
    Slow,
    /// `content-length` is more than what comes.
    Long,
    /// `content-length` is less than what comes.
    Short,
    /// The connection is reset in the middle of an event, or of a JSON document.
    Reset,
    /// The connection is closed in place of an answer.
    HangUp,
    /// The head is no HTTP.
    Garbage,
    /// The head breaks off.
    HalfHead,
    /// A chunk has no size.
    BadChunk,
    /// More bytes follow the answer.
    Trailing,
    /// 503, as a proxy says it.
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

/// The mode now, as an index of [`Mode::ALL`].
static NOW: AtomicUsize = AtomicUsize::new(0);

fn now() -> Mode {
    Mode::ALL[NOW.load(Ordering::SeqCst)]
}

/// Does nothing, unless this process was started to be an engine.
#[test]
fn process() {
    let Ok(port) = std::env::var(PORT) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = TcpListener::bind(("127.0.0.1", port.parse().unwrap())).await.unwrap();
        println!("\n{READY}{}", listener.local_addr().unwrap().port());
        std::thread::spawn(|| {
            for line in std::io::stdin().lock().lines() {
                let Some(mode) = line.ok().as_deref().and_then(Mode::named) else { break };
                let at = Mode::ALL.iter().position(|known| *known == mode).unwrap();
                NOW.store(at, Ordering::SeqCst);
                println!("\nmode {mode:?}");
            }
            std::process::exit(0);
        });
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(connection(stream));
        }
    });
}

async fn connection(mut stream: TcpStream) {
    let mut buffer = Vec::new();
    // Every `None` is the other side's end.
    while let Some(request) = RawRequest::next(&mut stream, &mut buffer).await {
        if respond(&mut stream, &request).await.is_none() {
            return;
        }
    }
}

async fn respond(stream: &mut TcpStream, asked: &RawRequest) -> Option<()> {
    match asked.path() {
        "/health" | "/ping" => return whole(stream, "200 OK", b"{}", 2).await,
        "/server_info" => {
            let info = json!({ "model_path": "/models/tiny", "version": "0.5.23", "dp_size": 2 }).to_string();
            return whole(stream, "200 OK", info.as_bytes(), info.len()).await;
        }
        "/v1/chat/completions" => {}
        _ => return whole(stream, "404 Not Found", b"{}", 2).await,
    }
    let body: Value = serde_json::from_slice(&asked.body).unwrap();
    match now() {
        Mode::HangUp => return None,
        Mode::Garbage => {
            stream.write_all(b"\x16\x03\x01 what?\r\n\r\n").await.ok()?;
            return None;
        }
        Mode::HalfHead => {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-ty").await.ok()?;
            return None;
        }
        Mode::Proxy => {
            let text = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\ngone";
            return stream.write_all(text.as_bytes()).await.ok();
        }
        _ => {}
    }
    if body["stream"] == true { events(stream, &body["id"]).await } else { document(stream, &body["id"]).await }
}

async fn whole(stream: &mut TcpStream, status: &str, body: &[u8], length: usize) -> Option<()> {
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n");
    let mut answer = head.into_bytes();
    answer.extend_from_slice(body);
    stream.write_all(&answer).await.ok()
}

async fn document(stream: &mut TcpStream, id: &Value) -> Option<()> {
    let body = super::document(id);
    let body = body.as_bytes();
    match now() {
        Mode::Slow => {
            tokio::time::sleep(Duration::from_millis(20)).await;
            whole(stream, "200 OK", body, body.len()).await
        }
        Mode::Long => {
            whole(stream, "200 OK", body, body.len() + 7).await?;
            None
        }
        // It goes on as if nothing was wrong: the rest must not become the answer to somebody else.
        Mode::Short => whole(stream, "200 OK", body, body.len() - 7).await,
        Mode::Reset | Mode::BadChunk => {
            whole(stream, "200 OK", &body[..body.len() / 2], body.len()).await?;
            reset(stream).await
        }
        Mode::Trailing => {
            whole(stream, "200 OK", body, body.len()).await?;
            stream.write_all(b"more than was announced").await.ok()
        }
        _ => whole(stream, "200 OK", body, body.len()).await,
    }
}

/// The sent bytes arrive before the reset discards the rest.
async fn reset(stream: &mut TcpStream) -> Option<()> {
    tokio::time::sleep(Duration::from_millis(5)).await;
    stream.set_zero_linger().ok()?;
    None
}

async fn chunk(stream: &mut TcpStream, text: &str) -> Option<()> {
    stream.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).await.ok()
}

async fn events(stream: &mut TcpStream, id: &Value) -> Option<()> {
    let mode = now();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.ok()?;
    let events = super::events(id);
    for (at, event) in events.iter().enumerate() {
        if at == events.len() / 2 {
            match mode {
                Mode::Reset | Mode::Long => {
                    chunk(stream, &event[..event.len() / 2]).await?;
                    return reset(stream).await;
                }
                Mode::BadChunk | Mode::Short => {
                    stream.write_all(b"zz\r\nno size\r\n").await.ok()?;
                    return None;
                }
                _ => {}
            }
        }
        let pause = if mode == Mode::Slow { 10 } else { 1 };
        tokio::time::sleep(Duration::from_millis(pause)).await;
        chunk(stream, event).await?;
    }
    stream.write_all(b"0\r\n\r\n").await.ok()?;
    if mode == Mode::Trailing {
        stream.write_all(b"data: after the end\n\n").await.ok()?;
    }
    Some(())
}
