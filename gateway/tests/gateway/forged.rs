//! An engine, or a proxy in front of it, that sends more than it was asked for: no other client receives that.

use semmoe_mock_engine::{Step, Wire, chunk, document, send};
use serde_json::json;
use tokio::sync::mpsc;

use crate::support::{Client, PATIENCE, eventually, metric, settled, start};

/// When the forged answer is sent.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    /// In one write with the answer.
    Together,
    /// While the connection waits for the next request; then it is signalled.
    Later,
}

fn answer(body: &str, chunked: bool) -> Vec<u8> {
    if !chunked {
        return document("", body);
    }
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    format!("{head}{}0\r\n\r\n", chunk(body)).into_bytes()
}

/// Its answers have a length or are chunked. A signal is sent for each request that an unrequested forged answer
/// followed.
fn forger(when: When, chunked: bool) -> (Wire, mpsc::UnboundedReceiver<()>) {
    let (reported, later) = mpsc::unbounded_channel();
    let wire = Wire::start(move |request| {
        let (own, forged) = (String::from_utf8(request.body.clone()).unwrap(), answer("\"forged\"", chunked));
        let own = answer(&own, chunked);
        std::future::ready(match when {
            _ if request.is_get() => send(document("", "{}")),
            When::Together => send([own, forged].concat()),
            When::Later => vec![Step::Send(own), Step::Send(forged), Step::Signal(reported.clone())],
        })
    });
    (wire, later)
}

#[tokio::test]
async fn an_answer_that_nobody_asked_for_is_nobodys() {
    for (when, chunked) in [(When::Together, false), (When::Together, true), (When::Later, false), (When::Later, true)]
    {
        let (wire, mut later) = forger(when, chunked);
        let gateway = start(&format!(
            "[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"pod-a\"\nengine = \"openai\"\n\
             url = \"{}\"\n",
            wire.url()
        ))
        .await;
        let client = Client::data(&gateway);
        for number in 0..50 {
            let body = json!({ "model": "tiny", "number": number }).to_string();
            let answer = client.post("/v1/completions", body.clone()).await;
            assert_eq!((answer.status, &answer.body[..]), (200, body.as_bytes()), "{when:?} {chunked} {number}");
            if when == When::Later {
                tokio::time::timeout(PATIENCE, later.recv()).await.expect("forged in time").unwrap();
            }
        }
        settled(&gateway).await;
        let strays = async || metric(&gateway, "semmoe_stray_answers_total{backend=\"pod-a\"}").await;
        eventually(&format!("{when:?} {chunked}: counted"), async || strays().await >= 40.0).await;
        gateway.shutdown(PATIENCE).await;
    }
}
