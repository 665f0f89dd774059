//! Backends that are drained: no new requests, running ones finish.

use http::Method;

use crate::support::{Client, Mock, next_frame, settled, several, shown, start};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_drained_backend_finishes_and_gets_nothing_new() {
    let (a, b) = (Mock::start(2), Mock::start(2));
    let gateway = start(&several(&[&a, &b])).await;
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
    let mut rest = String::new();
    while let Some(frame) = next_frame(&mut stream).await {
        rest += &frame;
    }
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
    let mock = Mock::start(2);
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
