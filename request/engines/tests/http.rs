//! The HTTP client against well-behaved and misbehaving servers.

#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]

use std::net::SocketAddr;
use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use axum::routing::{get, post};
use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt;
use semmoe_engines::Engine;
use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient, HttpError, request};
use semmoe_engines::probe::{self, Target};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

async fn serve(router: axum::Router) -> BaseUrl {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address.into()
}

/// Answers every connection with these bytes once it has read something, then closes it.
async fn raw_server(answer: &'static [u8]) -> BaseUrl {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut buffer = [0; 1024];
            let _ = socket.read(&mut buffer).await;
            let _ = socket.write_all(answer).await;
        }
    });
    address.into()
}

async fn closed_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

#[tokio::test]
async fn json_goes_there_and_back() {
    let base = serve(axum::Router::new().route("/echo", post(|body: Json<Value>| async move { body }))).await;
    let client = HttpClient::default();
    let answer: Value =
        client.post_json(&base, "/echo", &json!({"a": [1, 2]}), &AnswerLimits::default()).await.unwrap();
    assert_eq!(answer, json!({"a": [1, 2]}));
}

#[tokio::test]
async fn errors_name_url_and_cause_and_say_whether_anything_was_sent() {
    let client = HttpClient::default();
    let limits = AnswerLimits { timeout: Duration::from_secs(30), max_bytes: 64 };
    let router = axum::Router::new()
        .route("/bad", get(|| async { (StatusCode::SERVICE_UNAVAILABLE, "model\nloading") }))
        .route("/long", get(|| async { "x".repeat(65) }))
        .route("/text", get(|| async { "no json" }));
    let base = serve(router).await;

    let error = client.get_text(&base, "/bad", &limits).await.unwrap_err();
    assert_eq!(error.status(), Some(503));
    assert_eq!(error.to_string(), format!("{base}/bad answered 503: model loading"));
    assert_eq!(error.reason(), "/bad answered 503: model loading");
    assert_eq!(error.reason_without_body(), "/bad answered 503", "clients may read it");
    let error = client.get_text(&base, "/long", &limits).await.unwrap_err();
    assert!(matches!(error, HttpError::TooLarge { limit_bytes: 64, .. }), "{error}");
    let error = client.get_json::<Value>(&base, "/text", &limits).await.unwrap_err();
    assert!(matches!(error, HttpError::Json { .. }) && error.may_have_been_sent(), "{error}");
    assert_eq!(error.reason_without_body(), "unexpected response from /text");

    let nobody = BaseUrl::from(closed_port().await);
    let error = client.get_text(&nobody, "/", &limits).await.unwrap_err();
    assert!(matches!(&error, HttpError::Connect { .. }) && !error.may_have_been_sent(), "{error}");
    assert!(error.to_string().contains("refused"), "{error}");

    let closes = raw_server(b"").await;
    let error = client.get_text(&closes, "/", &limits).await.unwrap_err();
    assert!(matches!(&error, HttpError::Exchange { .. }) && error.may_have_been_sent(), "{error}");

    let short = raw_server(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc").await;
    let error = client.get_text(&short, "/", &limits).await.unwrap_err();
    assert!(matches!(error, HttpError::Body { .. }), "{error}");
}

#[tokio::test]
async fn a_silent_server_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = BaseUrl::from(listener.local_addr().unwrap());
    let client = HttpClient::default();
    let limits = AnswerLimits { timeout: Duration::from_millis(20), ..AnswerLimits::default() };
    let error = client.get_text(&base, "/", &limits).await.unwrap_err();
    assert!(matches!(error, HttpError::Timeout { .. }), "{error}");
    let head = request(Method::GET, &base, "/", None).unwrap();
    let error = client.send_within(head, Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(error, HttpError::Timeout { waiting_for: "the response head", .. }), "{error}");
}

/// The first frame is readable while the server still holds back the second; the server then sees the body being
/// dropped.
#[tokio::test]
async fn bodies_stream_and_a_drop_is_seen() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = BaseUrl::from(listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut buffer = [0; 1024];
        let _ = socket.read(&mut buffer).await.unwrap();
        socket.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n").await.unwrap();
        // Ends only when the client closes the connection.
        while socket.read(&mut buffer).await.is_ok_and(|n| n > 0) {}
    });
    let client = HttpClient::default();
    let mut response = client.send(request(Method::POST, &base, "/", Some(Bytes::new())).unwrap()).await.unwrap();
    let frame = response.frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "one");
    drop(response);
    server.await.unwrap();
}

/// The server also sees a caller that gives up before the head of the answer.
#[tokio::test]
async fn a_dropped_request_is_seen() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = BaseUrl::from(listener.local_addr().unwrap());
    let (arrived, wait) = tokio::sync::oneshot::channel();
    let server = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut buffer = [0; 1024];
        let _ = socket.read(&mut buffer).await.unwrap();
        arrived.send(()).unwrap();
        while socket.read(&mut buffer).await.is_ok_and(|n| n > 0) {}
    });
    let client = HttpClient::default();
    let call = tokio::spawn(async move { client.send(request(Method::GET, &base, "/", None).unwrap()).await.is_ok() });
    wait.await.unwrap();
    call.abort();
    server.await.unwrap();
}

#[tokio::test]
async fn probes_old_and_new_servers() {
    let healthy = || axum::Router::new().route("/health", get(|| async {}));
    let info = || get(|| async { Json(json!({"dp_size": 4, "model_path": "/m/tiny", "placement_digest": "ab"})) });
    let client = HttpClient::default();
    let limits = AnswerLimits::default();
    for path in ["/server_info", "/get_server_info"] {
        let base = serve(healthy().route(path, info())).await;
        let found = probe::probe(&client, &Target::new(Engine::Sglang, &base), &limits).await.unwrap();
        assert_eq!(found.dp_size, Some(4));
        assert_eq!(found.server.unwrap().model_name(), Some("tiny"));
    }
    let base = serve(healthy()).await;
    // A vLLM without metrics and version.
    let found = probe::probe(&client, &Target::new(Engine::Vllm, &base), &limits).await.unwrap();
    assert_eq!((found.dp_size, found.version, found.server), (None, None, None));
    let error = probe::probe(&client, &Target::new(Engine::Semmoe, &base), &limits).await.unwrap_err();
    assert_eq!(error.status(), Some(404));
    assert!(probe::probe(&client, &Target::new(Engine::Openai, &base), &limits).await.is_err());
}

/// Serves connections one after the other, each for a given number of requests, and returns the number of requests on
/// each.
async fn counting_server(
    requests_per_connection: &'static [usize],
    answer: &'static [u8],
) -> (BaseUrl, tokio::task::JoinHandle<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = BaseUrl::from(listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let mut served = 0;
        for requests in requests_per_connection {
            let (mut socket, _) = listener.accept().await.unwrap();
            for _ in 0..*requests {
                let mut buffer = [0; 4096];
                let mut read = 0;
                while !buffer[..read].ends_with(b"\r\n\r\n") {
                    let count = socket.read(&mut buffer[read..]).await.unwrap();
                    assert!(count > 0, "the client closed a connection that it could have used again");
                    read += count;
                }
                socket.write_all(answer).await.unwrap();
                served += 1;
            }
        }
        served
    });
    (base, server)
}

/// One connection is enough, whether a body ends by its length, by its last chunk or is empty.
#[tokio::test]
async fn connections_are_used_again() {
    for answer in [
        &b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"[..],
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No\r\n\r\n",
    ] {
        let (base, server) = counting_server(&[3], answer).await;
        let client = HttpClient::default();
        for _ in 0..3 {
            client.get_text(&base, "/", &AnswerLimits::default()).await.unwrap();
        }
        assert_eq!(server.await.unwrap(), 3);
    }
}

/// A connection closed by the engine while idle is detected before anything is sent on it.
#[tokio::test]
async fn closed_idle_connections_are_replaced() {
    let (base, server) = counting_server(&[2, 1, 2], b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na").await;
    let client = HttpClient::default();
    for _ in 0..5 {
        assert_eq!(client.get_text(&base, "/", &AnswerLimits::default()).await.unwrap(), "a");
    }
    assert_eq!(server.await.unwrap(), 5);
}

/// A terminating engine closes its idle connections, which is noticed without a request; a live one is left alone.
#[tokio::test]
async fn a_closed_idle_connection_is_reported() {
    // It accepts one connection, and waits for a third request on it.
    let (base, server) = counting_server(&[3], b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na").await;
    let client = HttpClient::default();
    client.get_text(&base, "/", &AnswerLimits::default()).await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(1200), client.connection_lost()).await;
    assert!(early.is_err(), "nothing was closed");
    client.get_text(&base, "/", &AnswerLimits::default()).await.unwrap();
    server.abort();
    tokio::time::timeout(Duration::from_secs(10), client.connection_lost()).await.unwrap();
    assert!(client.take_broken());
}

/// A connection with unsolicited bytes is not reused: the next answer would be forged.
#[tokio::test]
async fn what_nobody_asked_for_is_not_taken_for_an_answer() {
    const TWO: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\naHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nb";
    let (base, server) = counting_server(&[1, 1], TWO).await;
    let client = HttpClient::default();
    for _ in 0..2 {
        assert_eq!(client.get_text(&base, "/", &AnswerLimits::default()).await.unwrap(), "a");
    }
    assert_eq!(server.await.unwrap(), 2);
}

/// Dropping an answer before its end closes its connection.
#[tokio::test]
async fn half_read_answers_close_their_connection() {
    let (base, server) = counting_server(&[1, 1], b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\na").await;
    let client = HttpClient::default();
    for _ in 0..2 {
        let mut answer = client.send(request(Method::GET, &base, "/", None).unwrap()).await.unwrap();
        assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
    }
    assert_eq!(server.await.unwrap(), 2);
}
