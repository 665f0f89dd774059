//! HTTP as no honest client writes it: HTTP/2 frames and HTTP/1.1 lines.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::PATIENCE;

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const CONTINUATION: u8 = 9;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

/// The header block of `GET /`, host `a`.
pub(crate) const GET: [u8; 6] = [0x82, 0x86, 0x84, 0x41, 1, b'a'];

/// One frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// The header block of a POST to a path, host `a`; a body should follow.
pub(crate) fn post(path: &str) -> Vec<u8> {
    let length = u8::try_from(path.len()).unwrap();
    assert!(length < 127, "longer lengths take another form");
    [&[0x83, 0x86, 0x04, length][..], path.as_bytes(), &[0x41, 1, b'a']].concat()
}

/// The first odd numbers: streams of a client.
pub(crate) fn streams(count: u32) -> impl Iterator<Item = u32> {
    (0..count).map(|at| 2 * at + 1)
}

/// An HTTP/2 connection on which these frames were sent, after the preface and empty settings.
pub(crate) async fn open(address: SocketAddr, frames: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let opening = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    stream.write_all(&opening).await.unwrap();
    // A gateway that has seen enough closes the connection.
    let _ = stream.write_all(frames).await;
    stream
}

/// A received frame.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) payload: Vec<u8>,
}

/// The next frame; `None` at the end of the connection.
pub(crate) async fn next(stream: &mut TcpStream) -> Option<Frame> {
    let read = async {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.ok()?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload).await.ok()?;
        Some(Frame { kind: head[3], payload })
    };
    tokio::time::timeout(PATIENCE, read).await.expect("a frame or an end in time")
}

/// Returns once everything sent before has been read and handled: the answer to a ping follows it.
pub(crate) async fn seen(stream: &mut TcpStream) -> Vec<Frame> {
    stream.write_all(&frame(PING, 0, 0, b"all read")).await.unwrap();
    let mut frames = Vec::new();
    while let Some(frame) = next(stream).await {
        if frame.kind == PING && frame.payload == b"all read" {
            break;
        }
        frames.push(frame);
    }
    frames
}

/// Sends an HTTP/1.1 request and reads until the gateway closes the connection.
pub(crate) async fn exchange(address: SocketAddr, request: &[u8]) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    // A gateway that has seen enough does not read the rest.
    let _ = socket.write_all(request).await;
    rest(&mut socket).await
}

/// Everything until the gateway closes the connection.
pub(crate) async fn rest(socket: &mut TcpStream) -> String {
    let mut text = Vec::new();
    // A reset is an end too: some of our bytes were not read.
    let _ = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut text)).await.expect("an end in time");
    String::from_utf8(text).unwrap()
}

/// The status of an HTTP/1.1 response; `none` without one.
pub(crate) fn status(answer: &str) -> &str {
    answer.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)).unwrap_or("none")
}

/// The response to `GET path`, on a connection of its own.
pub(crate) async fn get(address: SocketAddr, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n");
    exchange(address, request.as_bytes()).await
}

/// The value of a metric line; 0 if absent.
pub(crate) async fn metric(admin: SocketAddr, line: &str) -> f64 {
    let text = get(admin, "/metrics").await;
    text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok()).unwrap_or(0.0)
}
