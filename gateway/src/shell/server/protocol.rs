//! Determines a connection's HTTP version, and its limits for either version.

use std::io;
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper_util::rt::TokioTimer;
use tokio::net::TcpStream;

use super::connection::StreamTasks;
use crate::config::Config;

/// The number of headers that hyper keeps on the stack.
const HEADERS_ON_STACK: usize = 100;
/// The first bytes of HTTP/2 on a plain connection ("prior knowledge"); no HTTP/1.1 method begins like this.
const PREFACE: &[u8] = b"PRI * HTTP/2.0";

/// Number of bytes that a client may send ahead of the reader: per request, and per connection.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Number of bytes per stream that HTTP/2 buffers ahead of the socket.
const SEND_BUFFER_BYTES: usize = 32 << 10;
/// Maximum size of a connection's read buffer, unless `limits.header_bytes` is larger.
const READ_BUFFER_BYTES: usize = 64 << 10;
/// Maximum number of streams that a client may open and reset before they are handled; more close the connection
/// (CVE-2023-44487).
const PENDING_RESETS: usize = 20;
/// Maximum number of streams reset for client errors; more close the connection (CVE-2025-8671). Streams beyond
/// `limits.streams` count, and an honest client may open some before it learns the limit.
const ERROR_RESETS: usize = 1024;
/// Time after which a client that does not answer a ping is considered gone.
const PING: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

impl Protocol {
    /// Detects the protocol from the first bytes of a plain connection.
    pub(super) async fn of_plain(stream: &TcpStream) -> io::Result<Self> {
        let mut first = [0; PREFACE.len()];
        let length = stream.peek(&mut first).await?;
        // Three bytes suffice to distinguish the protocols; a client whose first packet is shorter is treated as
        // HTTP/1.1, or gets an error.
        let is_http2 = length >= 3 && PREFACE.starts_with(&first[..length]);
        Ok(if is_http2 { Self::Http2 } else { Self::Http1 })
    }

    /// Returns the protocol negotiated in a handshake.
    pub(super) fn of_alpn(agreed: Option<&[u8]>) -> Self {
        if agreed == Some(b"h2") { Self::Http2 } else { Self::Http1 }
    }
}

pub(super) fn http1(config: &Config) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(config.timeouts.header)
        .max_header_size(config.limits.header_bytes)
        // A connection keeps its buffer until it ends.
        .max_buf_size(config.limits.header_bytes.max(READ_BUFFER_BYTES));
    // hyper keeps up to this many headers on the stack; setting any number costs an allocation per request.
    if config.limits.headers != HEADERS_ON_STACK {
        http.max_headers(config.limits.headers);
    }
    http
}

pub(super) fn http2(config: &Config, tasks: StreamTasks) -> http2::Builder<StreamTasks> {
    let mut http = http2::Builder::new(tasks);
    http.timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(config.limits.header_bytes).unwrap_or(u32::MAX))
        .max_concurrent_streams(config.limits.streams)
        .max_pending_accept_reset_streams(PENDING_RESETS)
        .max_local_error_reset_streams(ERROR_RESETS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING);
    http
}
