//! The request as an engine receives it: with the pin in its place, and every other byte as the client sent it.

use http::Method;

use crate::support::{Fleet, alone, settled};

/// Unusual white space, escapes, a number that no float represents, and keys that only resemble pins.
const BODY: &str = " {\n \"prompt\" :\"caf\\u00e9 \\ud83d\\ude00\",\"n\": 1.0e0,\"big\":12345678901234567890,\t\
                     \"extra\":{\"routed_dp_rank\":7,\"x\":[1 , 2]},\"Routed_dp_rank\":1 }\n";

#[tokio::test]
async fn openai_routes_are_pinned_by_header_and_bodies_pass_byte_for_byte() {
    let Fleet { mocks: [mut mock], gateway: _gateway, client } = alone(4, "").await;
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/responses"] {
        let answer = client.post(&format!("{path}?trace=1"), BODY).await;
        let seen = mock.next().await;
        assert_eq!(answer.status, 200);
        assert_eq!(seen.path, format!("{path}?trace=1"));
        assert_eq!(seen.body, BODY);
        assert_eq!(seen.header_pin().unwrap().to_string(), answer.header("x-semmoe-rank"));
        assert_eq!(answer.header("x-semmoe-backend"), "pod-a");
        assert_eq!(answer.header("x-semmoe-policy"), "round_robin");
        assert_eq!(seen.headers["host"], mock.address.to_string().as_str());
        assert_eq!(seen.headers["content-length"], BODY.len().to_string().as_str());
    }
}

#[tokio::test]
async fn generate_is_pinned_in_the_body_and_only_there() {
    let Fleet { mocks: [mut mock], gateway: _gateway, client } = alone(4, "").await;
    let answer = client.post("/generate", BODY).await;
    let seen = mock.next().await;
    let rank = answer.header("x-semmoe-rank");
    assert_eq!(seen.body, format!(" {{\"routed_dp_rank\":{rank},{}", BODY.strip_prefix(" {").unwrap()));
    assert_eq!(seen.header_pin(), None);
}

#[tokio::test]
async fn routes_without_a_carrier_are_relayed_unpinned() {
    let Fleet { mocks: [mut mock], gateway: _gateway, client } = alone(4, "").await;
    for path in ["/v1/embeddings", "/tokenize"] {
        let answer = client.post(path, r#"{"model":"tiny","prompt":"a"}"#).await;
        let seen = mock.next().await;
        assert_eq!((answer.status, answer.header("x-semmoe-rank")), (200, ""));
        assert_eq!((seen.header_pin(), &seen.body[..]), (None, &br#"{"model":"tiny","prompt":"a"}"#[..]));
    }
}

#[tokio::test]
async fn pins_of_clients_are_stripped() {
    let Fleet { mocks: [mut mock], gateway: _gateway, client } = alone(2, "").await;
    let headers = [
        ("x-data-parallel-rank", "9"),
        ("X-DP-Rank", "9"),
        ("x-worker-instance-id", "9"),
        ("connection", "x-secret"),
        ("x-secret", "1"),
        ("authorization", "Bearer key"),
    ];
    let body = r#"{"routed_dp_rank":9,"prompt":"a","data_parallel_rank":9,"routed\u005fdp_rank":9}"#;
    for (path, expected) in [
        ("/v1/completions", r#"{"prompt":"a"}"#.to_owned()),
        ("/v1/embeddings", r#"{"prompt":"a"}"#.to_owned()),
        ("/generate", r#"{"routed_dp_rank":RANK,"prompt":"a"}"#.to_owned()),
    ] {
        let answer = client.call(Method::POST, path, &headers, body).await;
        let seen = mock.next().await;
        assert_eq!(seen.body, expected.replace("RANK", answer.header("x-semmoe-rank")), "{path}");
        assert_ne!(seen.header_pin(), Some(9));
        for name in ["x-dp-rank", "x-worker-instance-id", "x-secret"] {
            assert!(!seen.headers.contains_key(name), "{name} on {path}");
        }
        assert_eq!(seen.headers["authorization"], "Bearer key");
    }
}

#[tokio::test]
async fn trusted_pins_are_honoured() {
    let Fleet { mocks: [mut mock], gateway: _gateway, client } =
        alone(4, "[routing]\ntrust_client_pins = true\n").await;
    for _ in 0..3 {
        let answer = client.post("/generate", r#"{"text":"a","routed_dp_rank":2}"#).await;
        assert_eq!((answer.status, answer.header("x-semmoe-rank")), (200, "2"));
        assert_eq!(mock.next().await.body, r#"{"routed_dp_rank":2,"text":"a"}"#);
        let headers = [("x-data-parallel-rank", "3")];
        let answer = client.call(Method::POST, "/v1/completions", &headers, r#"{"routed_dp_rank":1}"#).await;
        assert_eq!((answer.status, answer.header("x-semmoe-rank")), (200, "3"));
        assert_eq!(mock.next().await.header_pin(), Some(3));
    }
    let answer = client.post("/generate", r#"{"routed_dp_rank":4}"#).await;
    assert_eq!((answer.status, answer.message().as_str()), (400, "pin 4 is not a rank of model 'tiny'"));
    let answer = client.post("/generate", r#"{"routed_dp_rank":-1}"#).await;
    assert_eq!((answer.status, answer.message().as_str()), (400, "the pin '-1' is not a valid rank"));
}

#[tokio::test]
async fn answers_pass_with_headers_of_the_message_only() {
    let Fleet { mocks: [mut mock], gateway: _gateway, client } = alone(2, "").await;
    let answer = client.post("/v1/completions", "{}").await;
    mock.next().await;
    assert_eq!(answer.header("x-upstream"), "yes");
    assert!(!answer.headers.contains_key("x-private"));
    assert_ne!(answer.header("x-semmoe-rank"), "99", "the engine's own is not ours");
    assert_eq!(answer.json()["path"], "/v1/completions");
}

/// The client sees the engine's own errors, which are no reason to evict the engine.
#[tokio::test]
async fn errors_of_the_engine_are_relayed_and_evict_nobody() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(2, "").await;
    for status in ["400", "422", "429", "500", "503"] {
        let answer = client.mock("/v1/completions", status, "{}").await;
        mock.next().await;
        assert_eq!(answer.status.to_string(), status);
        assert_eq!(answer.message(), "the engine's own words");
    }
    assert!(gateway.health("pod-a").unwrap().is_healthy());
    assert_eq!(client.post("/v1/completions", "{}").await.status, 200);
    settled(&gateway).await;
}
