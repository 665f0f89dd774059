//! Drained backends and gateways that shut down: no new requests, running ones finish or get an error.

use std::time::Duration;

use http::Method;
use http_body_util::BodyExt;

use crate::support::{
    Client, Fleet, PATIENCE, alone, canned, fleet, metric, next_frame, plain_model, rest_of, settled, several, shown,
    start,
};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_drained_backend_finishes_and_gets_nothing_new() {
    let Fleet { mocks: [a, b], gateway, .. } = fleet("").await;
    let (client, admin) = (Client::data(&gateway), Client::admin(&gateway));
    let mut stream = client.open(Method::POST, CHAT, &[("x-mock", "stream")], "{}").await;
    let (pod, mock) = if stream.headers()["x-semmoe-backend"] == "pod-a" { ("pod-a", &a) } else { ("pod-b", &b) };
    mock.release(1);
    assert!(next_frame(&mut stream).await.is_some());

    let answer = admin.post(&format!("/admin/backends/{pod}/drain"), "").await.json();
    assert_eq!((&answer["draining"], &answer["in_flight_requests"]), (&true.into(), &1.into()), "{answer}");
    for _ in 0..4 {
        assert_ne!(client.post(CHAT, "{}").await.header("x-semmoe-backend"), pod);
    }
    let seen = shown(&gateway, pod).await;
    assert_eq!(
        (&seen["draining"], &seen["healthy"], &seen["in_flight_requests"]),
        (&true.into(), &true.into(), &1.into())
    );
    mock.release(2);
    let rest = rest_of(&mut stream).await;
    assert_eq!(rest, "data: 2\n\ndata: 3\n\ndata: [DONE]\n\n");
    settled(&gateway).await;
    assert_eq!(shown(&gateway, pod).await["in_flight_requests"], 0);

    admin.post(&format!("/admin/backends/{pod}/undrain"), "").await;
    let mut backends: Vec<String> = Vec::new();
    for _ in 0..4 {
        backends.push(client.post(CHAT, "{}").await.header("x-semmoe-backend").to_owned());
    }
    assert!(backends.iter().any(|name| name == pod), "{backends:?}");
    settled(&gateway).await;
}

#[tokio::test]
async fn a_model_whose_backends_are_all_drained_is_not_ready() {
    let mock = canned(2);
    let gateway = start(&several(&[&mock])).await;
    let (client, admin) = (Client::data(&gateway), Client::admin(&gateway));
    assert_eq!(admin.post("/admin/backends/pod-a/drain", "").await.status, 200);
    let answer = client.post(CHAT, "{}").await;
    assert_eq!(answer.status, 503);
    assert!(answer.message().contains("backend 'pod-a' is drained"), "{}", answer.message());
    let ready = admin.get("/readyz").await;
    assert_eq!(ready.status, 503);
    assert!(String::from_utf8_lossy(&ready.body).contains("'pod-a': is drained"));
    assert_eq!(client.get("/v1/models").await.json()["data"], serde_json::json!([]));
    assert_eq!(admin.post("/admin/backends/pod-x/drain", "").await.status, 404);
    assert_eq!(admin.get("/admin/backends/pod-a/drain").await.status, 405);
    admin.post("/admin/backends/pod-a/undrain", "").await;
    assert_eq!(client.post(CHAT, "{}").await.status, 200);
    settled(&gateway).await;
}

/// Load balancers notice first; requests arriving meanwhile are served, and running ones finish.
#[tokio::test]
async fn a_gateway_that_is_asked_to_end_is_unready_first() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(2, "[drain]\ndelay_seconds = 1\n").await;
    let (client, admin, address) = (Client::data(&gateway), Client::admin(&gateway), gateway.data_addr());
    let ending = tokio::spawn(gateway.drain(false));
    while admin.get("/readyz").await.status != 503 {
        tokio::task::yield_now().await;
    }
    let late = client.begin_with(CHAT, "late", "{}");
    mock.next().await;
    while tokio::net::TcpStream::connect(address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert_eq!(admin.get("/readyz").await.status, 503, "the admin plane is there to the end");
    assert!(!ending.is_finished());
    mock.release(1);
    assert_eq!(late.await.unwrap().status, 200);
    ending.await.unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

/// Requests that do not finish in time get an error: before the answer, in the queue, in a stream; a partial answer is
/// cut off.
#[tokio::test]
async fn what_does_not_finish_in_time_is_reported() {
    let mut mock = canned(1);
    let rules = "[drain]\ndelay_seconds = 0\ngrace_seconds = 0.01\n[queue]\nmax_in_flight = 3\n";
    let gateway = start(&format!("{rules}{}", plain_model(&mock, 1))).await;
    let client = Client::data(&gateway);
    let stream = client.open(Method::POST, CHAT, &[("x-mock", "stream")], "{}").await;
    let half = client.open(Method::POST, CHAT, &[("x-mock", "die-json")], "{}").await;
    let ask = || {
        let client = client.clone();
        tokio::spawn(async move { client.mock(CHAT, "hang", "{}").await })
    };
    let waiting = [ask(), ask()];
    for _ in 0..3 {
        mock.next().await;
    }
    while metric(&gateway, "semmoe_queue_depth{model=\"tiny\"}").await != 1.0 {
        tokio::task::yield_now().await;
    }
    tokio::time::timeout(PATIENCE, gateway.drain(false)).await.unwrap();
    for call in waiting {
        let answer = call.await.unwrap();
        assert_eq!((answer.status, answer.message().as_str()), (503, "the gateway is shutting down"));
    }
    let rest = stream.into_body().collect().await.unwrap().to_bytes();
    assert!(rest.starts_with(b"data: {\"error\":{\"message\":\"the gateway is shutting down\""), "{rest:?}");
    assert!(half.into_body().collect().await.is_err());
    for _ in 0..2 {
        mock.next_gone().await;
    }
}

/// Connections that send nothing, or half a head, delay nothing.
#[tokio::test]
async fn idle_connections_do_not_delay_the_end() {
    let Fleet { mocks: [_mock], gateway, client } = alone(1, "").await;
    let mut sockets = Vec::new();
    for head in [
        "",
        "POST /v1/chat/completions HTT",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{",
    ] {
        let mut socket = tokio::net::TcpStream::connect(gateway.data_addr()).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut socket, head.as_bytes()).await.unwrap();
        sockets.push(socket);
    }
    assert_eq!(client.post(CHAT, "{}").await.status, 200);
    tokio::time::timeout(PATIENCE, gateway.shutdown(Duration::from_millis(200))).await.unwrap();
}
