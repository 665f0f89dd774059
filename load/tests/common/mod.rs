//! A server of raw bytes on loopback, so that it can answer like no HTTP library would.
#![allow(dead_code, unreachable_pub, unused_imports, clippy::unwrap_used, reason = "each test file uses its own part")]

use std::io::Write;

use semmoe_load::{Limit, LoadOptions, Pace, Report};
pub use semmoe_mock_engine::{RawRequest, Reply, Step, Wire, chunk, close, document, send};

/// A running server, and a folder for a run against it.
pub struct Mock {
    pub url: String,
    pub wire: Wire,
    folder: tempfile::TempDir,
}

impl Mock {
    /// Starts a server that answers according to `answer`.
    pub fn start<F>(answer: impl Fn(RawRequest) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Reply> + Send + 'static,
    {
        let wire = Wire::start(answer);
        Self { url: wire.url(), wire, folder: tempfile::tempdir().unwrap() }
    }

    /// Starts a server over TLS that answers according to `answer`.
    pub fn start_with<F>(
        tls: tokio_rustls::TlsAcceptor,
        answer: impl Fn(RawRequest) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Reply> + Send + 'static,
    {
        let wire = Wire::start_at(([127, 0, 0, 1], 0).into(), Some(tls), answer);
        Self { url: wire.url().replace("http:", "https:"), wire, folder: tempfile::tempdir().unwrap() }
    }

    /// Answers every request with the same bytes.
    pub fn with_bytes(bytes: impl Into<Vec<u8>>) -> Self {
        let bytes = bytes.into();
        Self::start(move |_| std::future::ready(send(bytes.clone())))
    }

    /// Options for a run of three prompts against it.
    pub fn options(&self, pace: Pace, limit: Limit) -> LoadOptions {
        let lines = ["{\"prompt\": \"one\"}", "{\"prompt\": \"two\"}", "{\"prompt\": \"three\"}"];
        let mut options = LoadOptions::new(self.url.parse().unwrap(), self.file("prompts.jsonl", &lines), pace, limit);
        options.model = Some("m".into());
        options
    }

    /// Writes a file of these lines.
    pub fn file(&self, name: &str, lines: &[&str]) -> std::path::PathBuf {
        let path = self.folder.path().join(name);
        let mut file = std::fs::File::create(&path).unwrap();
        lines.iter().for_each(|line| writeln!(file, "{line}").unwrap());
        path
    }

    /// Runs a closed loop of two clients and this many requests.
    pub async fn closed(&self, stream: bool, requests: u64) -> Report {
        let mut options = self.options(Pace::Closed { concurrency: 2 }, Limit::Requests(requests));
        options.stream = stream;
        run(options).await
    }
}

/// Runs to completion.
pub async fn run(options: LoadOptions) -> Report {
    semmoe_load::run(options, &|_| {}, std::future::pending()).await.unwrap()
}

/// A chat answer of seven tokens.
pub fn chat(headers: &str) -> Vec<u8> {
    document(headers, r#"{"choices":[{"message":{"role":"assistant","content":"a"}}],"usage":{"completion_tokens":7}}"#)
}

/// A chunked stream of these events, one per chunk; `end` is the last chunk or its replacement.
pub fn stream(events: &[&str], end: &str) -> Vec<u8> {
    let mut text =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
    for event in events {
        text.push_str(&chunk(event));
    }
    (text + end).into_bytes()
}

/// The last chunk.
pub const LAST: &str = "0\r\n\r\n";
/// An event with content.
pub const CONTENT: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
/// The end of a stream.
pub const DONE: &str = "data: [DONE]\n\n";
