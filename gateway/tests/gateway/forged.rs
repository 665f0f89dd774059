//! An engine, or what stands before it, that sends more than it was asked for: no other client gets that.

use std::net::SocketAddr;

use semmoe_mock_engine::RawRequest;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::support::{Client, PATIENCE, eventually, metric, settled, start};

/// When the forged answer goes out.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    /// In one piece with the answer.
    Together,
    /// While the connection waits for the next request; then it is signalled.
    Later,
}

struct Forger {
    address: SocketAddr,
    later: mpsc::UnboundedReceiver<()>,
}

impl Forger {
    /// Its answers have a length, or come in chunks.
    async fn start(when: When, chunked: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, later) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(serve(socket, when, chunked, sender.clone()));
            }
        });
        Self { address, later }
    }
}

fn answer(body: &str, chunked: bool) -> String {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
    match chunked {
        true => format!("{head}transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len()),
        false => format!("{head}content-length: {}\r\n\r\n{body}", body.len()),
    }
}

async fn serve(mut socket: TcpStream, when: When, chunked: bool, reported: mpsc::UnboundedSender<()>) -> Option<()> {
    // Written bytes are sent at once.
    socket.set_nodelay(true).ok()?;
    let mut read = Vec::new();
    loop {
        let RawRequest { head, body } = RawRequest::next(&mut socket, &mut read).await?;
        if head.starts_with("get") {
            socket.write_all(answer("{}", false).as_bytes()).await.ok()?;
            continue;
        }
        let (own, forged) = (String::from_utf8(body).ok()?, answer("\"forged\"", chunked));
        let own = answer(&own, chunked);
        match when {
            When::Together => socket.write_all((own + &forged).as_bytes()).await.ok()?,
            When::Later => {
                socket.write_all(own.as_bytes()).await.ok()?;
                socket.write_all(forged.as_bytes()).await.ok()?;
                let _ = reported.send(());
            }
        }
    }
}

#[tokio::test]
async fn an_answer_that_nobody_asked_for_is_nobodys() {
    for (when, chunked) in [(When::Together, false), (When::Together, true), (When::Later, false), (When::Later, true)]
    {
        let mut forger = Forger::start(when, chunked).await;
        let gateway = start(&format!(
            "[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"pod-a\"\nengine = \"openai\"\n\
             url = \"http://{}\"\n",
            forger.address
        ))
        .await;
        let client = Client::data(&gateway);
        for number in 0..50 {
            let body = json!({ "model": "tiny", "number": number }).to_string();
            let answer = client.post("/v1/completions", body.clone()).await;
            assert_eq!((answer.status, &answer.body[..]), (200, body.as_bytes()), "{when:?} {chunked} {number}");
            if when == When::Later {
                tokio::time::timeout(PATIENCE, forger.later.recv()).await.expect("forged in time").unwrap();
            }
        }
        settled(&gateway).await;
        let strays = async || metric(&gateway, "semmoe_stray_answers_total{backend=\"pod-a\"}").await;
        eventually(&format!("{when:?} {chunked}: counted"), async || strays().await >= 40.0).await;
        gateway.shutdown(PATIENCE).await;
    }
}
