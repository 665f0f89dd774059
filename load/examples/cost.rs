//! The load generator's own cost of a request: CPU time against a server in another process that answers at once.
//!
//! `cargo run --release -p semmoe-load --example cost [EVENTS]`; with 0 events (the default) answers are not streamed.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use semmoe_load::{Limit, LoadOptions, Pace};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Words of a prompt.
const WORDS: usize = 700;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let events: usize = arguments.last().map_or(Ok(0), |events| events.parse())?;
    if arguments.first().is_some_and(|first| first == "serve") {
        return serve(events).await;
    }
    let mut server =
        Command::new(std::env::current_exe()?).args(["serve", &events.to_string()]).stdout(Stdio::piped()).spawn()?;
    let mut url = String::new();
    BufReader::new(server.stdout.take().ok_or("no output")?).read_line(&mut url)?;
    let folder = tempfile::tempdir()?;
    let prompts = folder.path().join("prompts.txt");
    std::fs::write(&prompts, "words ".repeat(WORDS))?;
    for concurrency in [1, 32] {
        let requests = if events == 0 { 100_000 } else { 20_000 };
        let pace = Pace::Closed { concurrency };
        let mut options = LoadOptions::new(url.trim().parse()?, prompts.clone(), pace, Limit::Requests(requests));
        (options.model, options.stream, options.threads) = (Some("m".into()), events > 0, Some(1));
        let report = semmoe_load::run(options, &|_| {}, std::future::pending()).await?;
        writeln!(std::io::stdout(), "{report}")?;
    }
    server.kill()?;
    server.wait()?;
    Ok(())
}

/// Answers every request with the same bytes.
async fn serve(events: usize) -> Result<(), Failure> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    writeln!(std::io::stdout(), "http://{}", listener.local_addr()?)?;
    let answer = std::sync::Arc::new(answer(events));
    loop {
        let (mut stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let answer = std::sync::Arc::clone(&answer);
        tokio::spawn(async move {
            let mut read = Vec::new();
            // The body is the last thing that a client sends, and ends with a brace.
            while stream.read_buf(&mut read).await.is_ok_and(|bytes| bytes > 0) {
                if read.ends_with(b"}") {
                    read.clear();
                    for piece in answer.iter() {
                        if stream.write_all(piece).await.is_err() {
                            return;
                        }
                    }
                }
            }
        });
    }
}

/// The writes of one answer: an event each, as engines send them.
fn answer(events: usize) -> Vec<Vec<u8>> {
    if events == 0 {
        let body = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hello there"},"finish_reason":"stop"}],"usage":{"prompt_tokens":700,"completion_tokens":2,"total_tokens":702}}"#;
        let head =
            format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
        return vec![(head + body).into_bytes()];
    }
    let event = r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}"#;
    let chunk = format!("{:x}\r\n{event}\n\n\r\n", event.len() + 2).into_bytes();
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    let mut pieces = vec![head];
    pieces.extend(std::iter::repeat_n(chunk, events));
    pieces.push(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n".to_vec());
    pieces
}
