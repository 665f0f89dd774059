//! HTTP/2 end to end: a client, a gateway, and an engine that requires HTTP/2 with prior knowledge (another gateway, in
//! front of a mock).

use http::{Method, Version};
use semmoe_engines::http::ClientSettings;
use semmoe_gateway::Running;

use crate::support::{
    Client, Mock, PATIENCE, canned, leave_before_the_answer, next_frame, plain_model, rest_of, settled, start,
};

const CHAT: &str = "/v1/chat/completions";

/// The engine, and the gateway in front of it.
async fn both(mock: &Mock) -> (Running, Running) {
    let engine = start(&plain_model(mock, 1)).await;
    let toml = format!(
        "[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"e\"\nengine = \"openai\"\n\
         url = \"{}\"\nhttp2 = true\n",
        engine.data_url()
    );
    let gateway = start(&toml).await;
    gateway.wait_ready().await;
    (engine, gateway)
}

fn client(gateway: &Running) -> Client {
    let settings = ClientSettings { http2: true, ..ClientSettings::default() };
    Client::with(&settings, &gateway.data_url())
}

async fn end(gateways: (Running, Running)) {
    for gateway in [gateways.1, gateways.0] {
        settled(&gateway).await;
        gateway.shutdown(PATIENCE).await;
    }
}

#[tokio::test]
async fn many_requests_and_long_bodies_share_a_connection() {
    let mock = canned(1);
    let gateways = both(&mock).await;
    let client = client(&gateways.1);
    let calls: Vec<_> = (0..40)
        .map(|number: usize| {
            let client = client.clone();
            let body = format!("{{\"x\":\"{}\"}}", "x".repeat(number << 13));
            tokio::spawn(async move { (body.len(), client.post(CHAT, body).await) })
        })
        .collect();
    for call in calls {
        let (length, answer) = call.await.unwrap();
        assert_eq!((answer.status, &answer.json()["length"]), (200, &length.into()));
    }
    end(gateways).await;
}

#[tokio::test]
async fn events_come_one_by_one_and_who_leaves_is_seen_at_the_engine() {
    let mut mock = canned(1);
    let gateways = both(&mock).await;
    let client = client(&gateways.1);
    let mut stream = client.open(Method::POST, CHAT, &[("x-mock", "stream")], "{}").await;
    assert_eq!(stream.version(), Version::HTTP_2);
    for number in 1..3 {
        mock.release(1);
        assert_eq!(next_frame(&mut stream).await, Some(format!("data: {number}\n\n")));
    }
    drop(stream);
    mock.next_gone().await;
    // Also before there is an answer, while other requests continue.
    let mut other = client.open(Method::POST, CHAT, &[("x-mock", "stream")], "{}").await;
    for _ in 0..2 {
        mock.next().await;
    }
    leave_before_the_answer(&client, &mut mock, CHAT).await;
    mock.release(3);
    let rest = rest_of(&mut other).await;
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    end(gateways).await;
}

/// The engine's stream waits for a stalled client, and no hop buffers it.
#[tokio::test]
async fn nobody_buffers_for_a_client_that_does_not_read() {
    let mut mock = canned(1);
    let gateways = both(&mock).await;
    let client = client(&gateways.1);
    let stream = client.open(Method::POST, CHAT, &[("x-mock", "flood")], "{}").await;
    mock.next().await;
    let sent = mock.flooded().await;
    assert!(sent < 64 << 20, "{sent} bytes went somewhere");
    // Other requests on these connections are served meanwhile.
    assert_eq!(client.post(CHAT, "{}").await.status, 200);
    drop(stream);
    mock.next_gone().await;
    end(gateways).await;
}
