//! Engines, or proxies in front of them, with ambiguous framing: the client gets 502, and the connection is closed.

use crate::child::Process;
use crate::engine::Engine;
use crate::wire;

const REQUEST: &[u8] =
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}";

#[tokio::test]
async fn answers_that_lie_about_their_end_are_502() {
    let kind = "content-type: application/json\r\n";
    let hidden = "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged";
    for (name, answer) in [
        (
            "length and chunks",
            format!(
                "HTTP/1.1 200 OK\r\n{kind}content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n{hidden}"
            ),
        ),
        (
            "chunks and length",
            format!(
                "HTTP/1.1 200 OK\r\n{kind}transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n{hidden}"
            ),
        ),
        (
            "another coding",
            format!("HTTP/1.1 200 OK\r\n{kind}transfer-encoding: gzip, chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"),
        ),
        (
            "chunks twice",
            format!(
                "HTTP/1.1 200 OK\r\n{kind}transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"
            ),
        ),
        ("two lengths", format!("HTTP/1.1 200 OK\r\n{kind}content-length: 2\r\ncontent-length: 3\r\n\r\n{{}}")),
        ("a length of letters", format!("HTTP/1.1 200 OK\r\n{kind}content-length: two\r\n\r\n{{}}")),
        (
            "another protocol",
            format!("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n{hidden}"),
        ),
        ("no HTTP", "SSH-2.0-OpenSSH_9.9\r\n".to_owned()),
    ] {
        let engine = Engine::start(answer.as_bytes());
        let process = Process::start("", engine.address);
        for _ in 0..2 {
            let answer = wire::exchange(process.data, REQUEST).await;
            assert_eq!(wire::status(&answer), "502", "{name}: {answer}");
            assert!(!answer.contains("forged"), "{name}: {answer}");
        }
    }
}

/// Any status from 100 to 999 is valid; only registered ones become labels.
#[tokio::test]
async fn statuses_without_a_name_are_counted_by_class() {
    let engine = Engine::start(b"HTTP/1.1 477 Odd\r\ncontent-length: 2\r\n\r\n{}");
    let process = Process::start("", engine.address);
    let answer = wire::exchange(process.data, REQUEST).await;
    assert_eq!(wire::status(&answer), "477", "the client sees what the engine said");
    let text = wire::get(process.admin, "/metrics").await;
    assert!(text.contains("code=\"4xx\"") && !text.contains("code=\"477\""), "{text}");
}
