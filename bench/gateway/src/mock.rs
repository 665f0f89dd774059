//! A mock engine with SGLang's API and canned answers, on one thread, cheap enough that the gateway is the bottleneck.

mod request;

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use serde_json::json;

use crate::canned;
use crate::error::BenchError;
use crate::poller::Poller;
use request::Request;

const LISTENER: u64 = u64::MAX;
/// Bytes read from a connection at a time.
const READ_BYTES: usize = 64 << 10;
/// Size limit of a request.
const REQUEST_BYTES: usize = 32 << 20;

/// How the events of a stream leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// All at once, each in its own chunk.
    Burst,
    /// One event of each stream at a time.
    Single,
}

/// Prebuilt answers.
struct Canned {
    chat: Vec<u8>,
    /// The events of a stream in chunked coding; the last one includes the end of the body.
    events: Vec<Vec<u8>>,
    burst: Vec<u8>,
    server_info: Vec<u8>,
    models: Vec<u8>,
}

impl Canned {
    fn new(ranks: u16) -> Self {
        let mut events: Vec<Vec<u8>> = canned::events().iter().map(|event| canned::chunk(event)).collect();
        if let Some(last) = events.last_mut() {
            last.extend_from_slice(b"0\r\n\r\n");
        }
        let info = json!({
            "model_path": "/models/bench", "served_model_name": "bench", "version": "0.5.23", "dp_size": ranks, "init_expert_location": "trivial",
            "tp_size": ranks, "ep_size": ranks, "enable_dp_attention": true, "tokenizer_path": "/models/bench",
        });
        let models = json!({ "object": "list", "data": [{ "id": "bench", "object": "model", "created": 1, "owned_by": "mock" }] });
        Self {
            chat: canned::chat(),
            burst: events.concat(),
            events,
            server_info: info.to_string().into_bytes(),
            models: models.to_string().into_bytes(),
        }
    }
}

struct Connection {
    socket: TcpStream,
    /// An incomplete request.
    read: Vec<u8>,
    /// Bytes that the socket has not accepted yet.
    unsent: Vec<u8>,
    /// The next event of a stream that is sent event by event.
    next_event: Option<usize>,
}

/// The engine.
pub(crate) struct Mock {
    poller: Poller,
    listener: TcpListener,
    connections: HashMap<u64, Connection>,
    next_key: u64,
    /// Connections in the middle of a stream.
    streaming: Vec<u64>,
    pace: Pace,
    canned: Canned,
    buffer: Vec<u8>,
}

impl Mock {
    pub(crate) fn new(listener: TcpListener, ranks: u16) -> Result<Self, BenchError> {
        listener.set_nonblocking(true).map_err(BenchError::io("listen"))?;
        let poller = Poller::new()?;
        poller.add(&listener, LISTENER)?;
        Ok(Self {
            poller,
            listener,
            connections: HashMap::new(),
            next_key: 0,
            streaming: Vec::new(),
            pace: Pace::Burst,
            canned: Canned::new(ranks),
            buffer: vec![0; READ_BYTES],
        })
    }

    /// Serves until `stop` returns true, which is polled at least ten times a second.
    pub(crate) fn run(&mut self, stop: impl Fn() -> bool) -> Result<(), BenchError> {
        let mut ready = Vec::new();
        while !stop() {
            let limit = if self.streaming.is_empty() { Duration::from_millis(100) } else { Duration::ZERO };
            self.poller.wait(Some(limit), &mut ready)?;
            for key in ready.drain(..) {
                if key == LISTENER {
                    self.accept()?;
                } else if !self.serve(key) {
                    self.connections.remove(&key);
                }
            }
            self.stream();
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<(), BenchError> {
        while let Ok((socket, _)) = self.listener.accept() {
            socket.set_nonblocking(true).map_err(BenchError::io("accept"))?;
            socket.set_nodelay(true).map_err(BenchError::io("accept"))?;
            let key = self.next_key;
            self.next_key += 1;
            self.poller.add(&socket, key)?;
            let connection = Connection { socket, read: Vec::new(), unsent: Vec::new(), next_event: None };
            self.connections.insert(key, connection);
        }
        Ok(())
    }

    /// Reads what is available and answers; false if the connection has ended.
    fn serve(&mut self, key: u64) -> bool {
        let Some(connection) = self.connections.get_mut(&key) else { return true };
        if !connection.flush() {
            return false;
        }
        loop {
            let count = match connection.socket.read(&mut self.buffer) {
                Ok(0) => return false,
                Ok(count) => count,
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            };
            connection.read.extend_from_slice(&self.buffer[..count]);
            loop {
                let Ok(request) = Request::first(&connection.read) else { return false };
                let Some(request) = request else { break };
                let length = request.length;
                let goes_on = connection.answer(&request.kind, request.rank, &self.canned, &mut self.pace);
                connection.read.drain(..length);
                if !goes_on {
                    return false;
                }
                if connection.next_event.is_some() {
                    self.streaming.push(key);
                }
            }
            if connection.read.len() > REQUEST_BYTES {
                return false;
            }
            // A short read has emptied the socket; new bytes raise a new event.
            if count < self.buffer.len() {
                return true;
            }
        }
    }

    /// Sends one event of each stream.
    fn stream(&mut self) {
        let Self { streaming, connections, canned, .. } = self;
        streaming.retain(|key| {
            let Some(connection) = connections.get_mut(key) else { return false };
            let Some(at) = connection.next_event else { return false };
            // A client that does not read stalls its stream, as it would an engine's.
            if !connection.unsent.is_empty() {
                return true;
            }
            if !connection.send(&canned.events[at]) {
                connections.remove(key);
                return false;
            }
            connection.next_event = Some(at + 1).filter(|next| *next < canned.events.len());
            connection.next_event.is_some()
        });
    }
}

impl Connection {
    /// False if the connection has ended.
    fn answer(&mut self, kind: &request::Kind, rank: Option<u16>, canned: &Canned, pace: &mut Pace) -> bool {
        let json = "application/json";
        match kind {
            request::Kind::Chat { streams: false } => self.respond("200 OK", json, rank, &canned.chat),
            request::Kind::Chat { streams: true } => {
                let mut head = head("200 OK", "text/event-stream", rank, "transfer-encoding: chunked");
                if *pace == Pace::Burst {
                    head.extend_from_slice(&canned.burst);
                } else {
                    self.next_event = Some(0);
                }
                self.send(&head)
            }
            request::Kind::Healthy => self.respond("200 OK", json, rank, b"{}"),
            request::Kind::ServerInfo => self.respond("200 OK", json, rank, &canned.server_info),
            request::Kind::Models => self.respond("200 OK", json, rank, &canned.models),
            request::Kind::Pace { single } => {
                *pace = if *single { Pace::Single } else { Pace::Burst };
                self.respond("200 OK", json, rank, b"{}")
            }
            request::Kind::Unknown => self.respond("404 Not Found", json, rank, b"{}"),
        }
    }

    fn respond(&mut self, status: &str, kind: &str, rank: Option<u16>, body: &[u8]) -> bool {
        let mut answer = head(status, kind, rank, &format!("content-length: {}", body.len()));
        answer.extend_from_slice(body);
        self.send(&answer)
    }

    /// False if the connection has ended.
    fn send(&mut self, bytes: &[u8]) -> bool {
        if !self.unsent.is_empty() {
            self.unsent.extend_from_slice(bytes);
            return true;
        }
        match self.socket.write(bytes) {
            Ok(count) => {
                self.unsent.extend_from_slice(&bytes[count..]);
                true
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.unsent.extend_from_slice(bytes);
                true
            }
            Err(_) => false,
        }
    }

    fn flush(&mut self) -> bool {
        let unsent = std::mem::take(&mut self.unsent);
        unsent.is_empty() || self.send(&unsent)
    }
}

/// A head as uvicorn would write it. It echoes the pin, so that a client can check the rank that the engine received.
fn head(status: &str, kind: &str, rank: Option<u16>, length: &str) -> Vec<u8> {
    let pin = rank.map_or_else(String::new, |rank| format!("x-mock-rank: {rank}\r\n"));
    format!(
        "HTTP/1.1 {status}\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: {kind}\r\n{pin}{length}\r\n\r\n"
    )
    .into_bytes()
}
