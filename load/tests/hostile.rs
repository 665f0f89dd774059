//! Servers that misbehave: each failure is counted under its own name, and nothing hangs.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::*;
use semmoe_load::{ErrorCount, Limit, Pace};

/// Every request of a run fails as `kind`.
async fn all_fail(name: &str, stream: bool, reply: fn() -> Reply, kind: &str) {
    let mock = Mock::start(move |_| std::future::ready(reply()));
    let report = mock.closed(stream, 6).await;
    assert_eq!(report.errors, [ErrorCount { kind: kind.to_owned(), count: 6 }], "{name}");
    assert_eq!((report.requests.ok, report.requests.failed, report.requests.unfinished), (0, 6, 0), "{name}");
    assert_eq!(report.e2e_ms, None, "{name}");
}

#[tokio::test]
async fn streams_that_break() {
    const SHORT: &str = "broken: the body is shorter than announced";
    all_fail("closed in mid-event", true, || close(stream(&[CONTENT, "data: {\"ch"], "")), SHORT).await;
    all_fail("closed after an event", true, || close(stream(&[CONTENT], "")), SHORT).await;
    all_fail("closed in a chunk's size", true, || close(stream(&[CONTENT], "5")), SHORT).await;
    let kind = "broken: the stream ended without [DONE]";
    all_fail("no [DONE]", true, || send(stream(&[CONTENT], LAST)), kind).await;
    let kind = "broken: the stream ended inside an event";
    all_fail("[DONE] without its end", true, || send(stream(&[CONTENT, "data: [DONE]\n"], LAST)), kind).await;
    all_fail(
        "error event",
        true,
        || send(stream(&[CONTENT, "data: {\"error\":{\"message\":\"boom\"}}\n\n", DONE], LAST)),
        "error event",
    )
    .await;
    all_fail(
        "named error event",
        true,
        || send(stream(&[CONTENT, "event: error\ndata: boom\n\n"], LAST)),
        "error event",
    )
    .await;
    let kind = "malformed: events after [DONE]";
    all_fail("events after [DONE]", true, || send(stream(&[DONE, CONTENT], LAST)), kind).await;
    let kind = "malformed: not the route's JSON";
    all_fail("no JSON", true, || send(stream(&["data: hello\n\n", DONE], LAST)), kind).await;
    all_fail("no stream", true, || send(chat("")), "malformed: not an event stream").await;
}

#[tokio::test]
async fn a_line_of_ten_megabytes_is_not_kept() {
    let kind = "malformed: an event of more than 4 MiB";
    let line = || send(stream(&[&format!("data: {}", "x".repeat(10 << 20)), "\n\n"], LAST));
    all_fail("one line", true, line, kind).await;
}

#[tokio::test]
async fn documents_that_lie() {
    let short = || close("HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{\"choices\":[]}");
    all_fail("short body", false, short, "broken: the body is shorter than announced").await;
    let kind = "malformed: not the route's JSON";
    all_fail("cut JSON", false, || send(document("", "{\"choices\":[{}")), kind).await;
    all_fail("other JSON", false, || send(document("", "{\"object\":\"list\"}")), kind).await;
    all_fail("error in 200", false, || send(document("", "{\"error\":{\"code\":1}}")), "error event").await;
    all_fail("not HTTP", false, || close("SSH-2.0-OpenSSH\r\n\r\n"), "malformed: not HTTP").await;
    all_fail("nothing", false, || vec![Step::Close], "closed before the answer").await;
    all_fail("half a head", false, || close("HTTP/1.1 200 OK\r\ncont"), "closed before the answer").await;
    let busy = || send("HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\nno");
    all_fail("429", false, busy, "status 429").await;
}

#[tokio::test]
async fn bytes_beyond_the_announced_length_are_reported() {
    let mut bytes = chat("");
    bytes.extend_from_slice(b"and some more");
    let mock = Mock::with_bytes(bytes);
    let report = mock.closed(false, 20).await;
    assert!(report.generator.stray_bytes + report.requests.failed > 0, "{report}");
}

#[tokio::test]
async fn no_answer_and_half_an_answer_time_out() {
    for (stream_answer, reply, kind) in [
        (false, (|| vec![Step::Hang]) as fn() -> Reply, "timeout: no answer"),
        (true, || send(stream(&[CONTENT], "")), "timeout: answer not complete"),
    ] {
        // Retry with a longer limit if a busy machine did not get to the head of the answer in time.
        for limit in [Duration::from_millis(50), Duration::from_secs(5), Duration::from_secs(60)] {
            let mock = Mock::start(move |_| std::future::ready(reply()));
            let mut options = mock.options(Pace::Closed { concurrency: 2 }, Limit::Requests(4));
            (options.stream, options.timeout) = (stream_answer, limit);
            let report = run(options).await;
            let seen = report.errors == [ErrorCount { kind: kind.to_owned(), count: 4 }];
            assert!(seen || limit < Duration::from_secs(60), "{report}");
            assert_eq!(report.requests.failed, 4, "{report}");
            if seen {
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_server_that_is_gone_is_an_error_before_the_run() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mock = Mock::with_bytes("");
    let mut options = mock.options(Pace::Closed { concurrency: 1 }, Limit::Requests(1));
    options.url = listener.local_addr().unwrap().into();
    drop(listener);
    let error = semmoe_load::run(options, &|_| {}, std::future::pending()).await.unwrap_err();
    assert!(error.to_string().starts_with("cannot connect to http://127.0.0.1:"), "{error}");
    assert!(!error.is_input());
}
