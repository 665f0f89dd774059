//! Streams and disconnects: frames are relayed as they arrive, both ends are notified at once, and counters return to
//! zero however it ends.

use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt;
use semmoe_engines::http::ClientSettings;

use crate::support::{Client, Fleet, PATIENCE, alone, in_flight, metric, next_frame, rest_of, settled};

const CHAT: &str = "/v1/chat/completions";

/// The mock holds each event back until the client has the previous one.
#[tokio::test]
async fn events_arrive_one_by_one() {
    let Fleet { mocks: [mock], gateway, client } = alone(2, "").await;
    let mut answer = client.open(Method::POST, CHAT, &[("x-mock", "stream")], "{}").await;
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    assert_eq!(in_flight(&gateway).await, (1, 1.0));
    for event in 1..=2 {
        mock.release(1);
        assert_eq!(next_frame(&mut answer).await, Some(format!("data: {event}\n\n")));
    }
    // The mock sends its final bytes right after its last event, so they may arrive together.
    mock.release(1);
    let rest = answer.collect().await.unwrap().to_bytes();
    assert_eq!(rest, "data: 3\n\ndata: [DONE]\n\n");
    settled(&gateway).await;
    let line = "semmoe_requests_total{backend=\"pod-a\",model=\"tiny\",rank=\"0\",policy=\"round_robin\",code=\"200\"}";
    assert_eq!(metric(&gateway, line).await, 1.0);
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_is_seen_at_the_engine() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(2, "").await;
    let mut answer = client.open(Method::POST, CHAT, &[("x-mock", "stream")], "{}").await;
    mock.release(1);
    assert_eq!(next_frame(&mut answer).await.as_deref(), Some("data: 1\n\n"));
    drop(answer);
    mock.next_gone().await;
    settled(&gateway).await;
    let line = "semmoe_requests_total{backend=\"pod-a\",model=\"tiny\",rank=\"0\",policy=\"round_robin\",code=\"499\"}";
    assert_eq!(metric(&gateway, line).await, 1.0);
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_is_seen_at_the_engine() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(2, "").await;
    let call = client.begin_with("/generate", "hang", "{}");
    mock.next().await;
    assert_eq!(in_flight(&gateway).await, (1, 1.0));
    call.abort();
    mock.next_gone().await;
    settled(&gateway).await;
    assert!(gateway.health("pod-a").unwrap().is_healthy(), "it is not the backend's fault");
}

/// Reads a stream of three events to its end.
async fn whole_stream(behaviour: &str) -> (String, bool) {
    let Fleet { mocks: [mock], gateway, client } = alone(1, "[timeouts]\nidle_seconds = 2\n").await;
    mock.release(3);
    let mut answer = client.open(Method::POST, CHAT, &[("x-mock", behaviour)], "{}").await;
    let mut text = Vec::new();
    let clean = loop {
        match tokio::time::timeout(PATIENCE, answer.frame()).await.unwrap() {
            None => break true,
            Some(Err(_)) => break false,
            Some(Ok(frame)) => text.extend_from_slice(&frame.into_data().unwrap()),
        }
    };
    settled(&gateway).await;
    let line = "semmoe_requests_total{backend=\"pod-a\",model=\"tiny\",rank=\"0\",policy=\"round_robin\",code=\"502\"}";
    assert_eq!(metric(&gateway, line).await, 1.0);
    (String::from_utf8(text).unwrap(), clean)
}

/// An error event is an event of its own, even if the engine died in the middle of one.
#[tokio::test]
async fn an_engine_that_dies_in_a_stream_ends_it_with_an_error_event() {
    for behaviour in ["die-between", "die-inside", "silent"] {
        let (text, clean) = whole_stream(behaviour).await;
        assert!(clean, "{behaviour}");
        let events: Vec<&str> = text.split_terminator("\n\n").collect();
        assert_eq!(events[..3], ["data: 1", "data: 2", "data: 3"], "{behaviour}");
        assert_eq!(events.len(), 4, "{behaviour}: {text}");
        let error: serde_json::Value = serde_json::from_str(events[3].strip_prefix("data: ").unwrap()).unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("backend 'pod-a' broke off: "), "{message}");
        assert_eq!(message.contains("sent nothing for 2s"), behaviour == "silent", "{message}");
    }
}

/// An answer with no place for an error is cut off, so that it cannot be mistaken for a complete one: the connection is
/// closed, or its HTTP/2 stream reset. It counts as the engine's failure.
#[tokio::test]
async fn an_engine_that_dies_in_a_json_answer_cuts_it_off() {
    let Fleet { mocks: [mock], gateway, .. } = alone(1, "").await;
    for (http2, failed) in [(false, 1.0), (true, 2.0)] {
        let settings = ClientSettings { http2, ..ClientSettings::default() };
        let client = Client::with(&settings, &gateway.data_url());
        let answer = client.open(Method::POST, CHAT, &[("x-mock", "die-json")], "{}").await;
        assert_eq!(answer.status(), 200);
        mock.release(1);
        assert!(answer.into_body().collect().await.is_err());
        settled(&gateway).await;
        let line =
            "semmoe_requests_total{backend=\"pod-a\",model=\"tiny\",rank=\"0\",policy=\"round_robin\",code=\"502\"}";
        assert_eq!(metric(&gateway, line).await, failed);
        if http2 {
            // The connection stays usable.
            assert_eq!(client.get("/v1/models").await.status, 200);
        }
    }
}

#[tokio::test]
async fn a_killed_engine_ends_what_runs_and_a_silent_one_times_out() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(1, "[timeouts]\nfirst_byte_seconds = 0.3\n").await;
    let answer = client.mock(CHAT, "hang", "{}").await;
    assert_eq!(answer.status, 504);
    assert!(answer.message().contains("did not send the response head within 300ms"), "{}", answer.message());
    mock.next_gone().await;
    mock.next().await;

    let call = client.begin_with(CHAT, "hang", Bytes::from_static(b"{}"));
    mock.next().await;
    mock.kill();
    let answer = call.await.unwrap();
    assert_eq!(answer.status, 502);
    assert!(answer.message().starts_with("backend 'pod-a' broke off: "), "{}", answer.message());
    settled(&gateway).await;
}

/// Running streams finish, new connections are refused, and the rest is closed after the grace period.
#[tokio::test]
async fn shutdown_finishes_streams() {
    let Fleet { mocks: [mock], gateway, client } = alone(1, "").await;
    let address = gateway.data_addr();
    let mut answer = client.open(Method::POST, CHAT, &[("x-mock", "stream")], "{}").await;
    mock.release(1);
    assert!(next_frame(&mut answer).await.is_some());
    let stopping = tokio::spawn(gateway.shutdown(PATIENCE));
    while tokio::net::TcpStream::connect(address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert!(!stopping.is_finished());
    mock.release(2);
    let rest = rest_of(&mut answer).await;
    assert_eq!(rest, "data: 2\n\ndata: 3\n\ndata: [DONE]\n\n");
    stopping.await.unwrap();
}

#[tokio::test]
async fn shutdown_does_not_wait_for_ever() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(1, "").await;
    let answer = client.open(Method::POST, CHAT, &[("x-mock", "stream")], "{}").await;
    gateway.shutdown(std::time::Duration::from_millis(10)).await;
    let rest = answer.into_body().collect().await.unwrap().to_bytes();
    let event = rest.strip_prefix(b"data: ").unwrap();
    let error: serde_json::Value = serde_json::from_slice(event).unwrap();
    assert_eq!(error["error"]["code"], "shutting_down", "{error}");
    mock.next_gone().await;
}
