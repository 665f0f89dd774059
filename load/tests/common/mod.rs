//! A server of raw bytes on loopback, so that it can answer as no HTTP library would.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test file uses its own part")]

use std::io::Write;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use semmoe_load::{Limit, LoadOptions, Pace, Report};
use semmoe_mock_engine::RawRequest;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;

/// The server's action after it has read a request.
pub enum Reply {
    /// These bytes, then the next request.
    Bytes(Vec<u8>),
    /// These bytes, then the end of the connection.
    Close(Vec<u8>),
    /// Nothing, for ever.
    Never,
}

/// One request as it came.
pub struct Seen {
    /// From 0.
    pub number: usize,
    pub head: String,
    pub body: serde_json::Value,
}

type Answer = dyn Fn(Seen) -> Pin<Box<dyn Future<Output = Reply> + Send>> + Send + Sync;

/// A running server; it ends with the runtime.
pub struct Mock {
    pub url: String,
    pub requests: Arc<AtomicUsize>,
    pub connections: Arc<AtomicUsize>,
    folder: tempfile::TempDir,
}

impl Mock {
    /// Answers with what `answer` says.
    pub async fn start<F>(answer: impl Fn(Seen) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Reply> + Send + 'static,
    {
        Self::start_with(None, answer).await
    }

    /// The same over TLS.
    pub async fn start_with<F>(
        tls: Option<tokio_rustls::TlsAcceptor>,
        answer: impl Fn(Seen) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Reply> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://{}", listener.local_addr().unwrap());
        let answer: Arc<Answer> = Arc::new(move |seen| Box::pin(answer(seen)));
        let (requests, connections) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let counts = (Arc::clone(&requests), Arc::clone(&connections));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                counts.1.fetch_add(1, Ordering::SeqCst);
                let (tls, answer, requests) = (tls.clone(), Arc::clone(&answer), Arc::clone(&counts.0));
                tokio::spawn(async move {
                    match tls {
                        None => connection(stream, answer, requests).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                connection(stream, answer, requests).await;
                            }
                        }
                    }
                });
            }
        });
        Self { url, requests, connections, folder: tempfile::tempdir().unwrap() }
    }

    /// Answers every request with the same bytes.
    pub async fn with_bytes(bytes: impl Into<Vec<u8>>) -> Self {
        let bytes = bytes.into();
        Self::start(move |_| std::future::ready(Reply::Bytes(bytes.clone()))).await
    }

    /// Options of a run of three prompts against it.
    pub fn options(&self, pace: Pace, limit: Limit) -> LoadOptions {
        let lines = ["{\"prompt\": \"one\"}", "{\"prompt\": \"two\"}", "{\"prompt\": \"three\"}"];
        let mut options = LoadOptions::new(self.url.parse().unwrap(), self.file("prompts.jsonl", &lines), pace, limit);
        options.model = Some("m".into());
        options
    }

    /// A file of these lines.
    pub fn file(&self, name: &str, lines: &[&str]) -> std::path::PathBuf {
        let path = self.folder.path().join(name);
        let mut file = std::fs::File::create(&path).unwrap();
        lines.iter().for_each(|line| writeln!(file, "{line}").unwrap());
        path
    }

    /// A closed loop of two clients and these many requests.
    pub async fn closed(&self, stream: bool, requests: u64) -> Report {
        let mut options = self.options(Pace::Closed { concurrency: 2 }, Limit::Requests(requests));
        options.stream = stream;
        run(options).await
    }
}

/// Runs to the end.
pub async fn run(options: LoadOptions) -> Report {
    semmoe_load::run(options, &|_| {}, std::future::pending()).await.unwrap()
}

async fn connection(mut stream: impl AsyncRead + AsyncWrite + Unpin, answer: Arc<Answer>, requests: Arc<AtomicUsize>) {
    let mut read = Vec::new();
    loop {
        let Some(RawRequest { head, body }) = RawRequest::next(&mut stream, &mut read).await else { return };
        let (number, body) =
            (requests.fetch_add(1, Ordering::SeqCst), serde_json::from_slice(&body).unwrap_or_default());
        let seen = Seen { number, head, body };
        match answer(seen).await {
            Reply::Bytes(bytes) => {
                if stream.write_all(&bytes).await.is_err() {
                    return;
                }
            }
            Reply::Close(bytes) => {
                let _ = stream.write_all(&bytes).await;
                let _ = stream.shutdown().await;
                return;
            }
            Reply::Never => std::future::pending().await,
        }
    }
}

/// A whole answer with `Content-Length`.
pub fn document(headers: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{headers}content-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

/// A chat answer of seven tokens.
pub fn chat(headers: &str) -> Vec<u8> {
    document(headers, r#"{"choices":[{"message":{"role":"assistant","content":"a"}}],"usage":{"completion_tokens":7}}"#)
}

/// A chunked stream of these events, each a chunk; `end` is the last chunk or what stands for it.
pub fn stream(events: &[&str], end: &str) -> Vec<u8> {
    let mut text =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
    for event in events {
        text.push_str(&format!("{:x}\r\n{event}\r\n", event.len()));
    }
    (text + end).into_bytes()
}

/// The last chunk.
pub const LAST: &str = "0\r\n\r\n";
/// An event with content.
pub const CONTENT: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
/// The end of a stream.
pub const DONE: &str = "data: [DONE]\n\n";
