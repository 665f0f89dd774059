//! HTTP/1.1 heads that two readers could interpret differently.

use crate::child::Process;
use crate::engine::Engine;
use crate::wire;

const LINE: &str = "POST /v1/chat/completions HTTP/1.1\r\n";
const LENGTH: &str = "content-length: 2\r\nconnection: close\r\n\r\n{}";

#[tokio::test]
async fn hosts_and_expectations_are_checked() {
    let engine = Engine::honest();
    let process = Process::start("", engine.address);
    for (lines, expected) in [
        ("host: a\r\n", "200"),
        ("host: a\r\nhost: b\r\n", "400"),
        ("host: a\r\nHost: a\r\n", "400"),
        ("", "400"),
        ("host: a\r\nexpect: 200-ok\r\n", "417"),
        ("host: a\r\nexpect: 100-continue\r\nexpect: x\r\n", "417"),
    ] {
        let answer = wire::exchange(process.data, format!("{LINE}{lines}{LENGTH}").as_bytes()).await;
        assert_eq!(wire::status(&answer), expected, "{lines:?}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
    }
    // A server may send the interim response; the last one counts.
    let request = format!("{LINE}host: a\r\nexpect: 100-Continue\r\n{LENGTH}");
    let answer = wire::exchange(process.data, request.as_bytes()).await;
    assert!(answer.contains(" 200 OK"), "{answer}");
    // HTTP/1.0 has no Host.
    let old = wire::exchange(process.data, format!("{}{LENGTH}", LINE.replace("1.1", "1.0")).as_bytes()).await;
    assert!(old.starts_with("HTTP/1.0 200") || old.starts_with("HTTP/1.1 200"), "{old}");
    assert_eq!(engine.seen().len(), 3);
}
