//! Bad input: reported in OpenAI's form if it is the client's fault, left to the engine otherwise, never a panic.

use bytes::Bytes;
use http::Method;

use crate::support::{Client, Fixture, Fleet, alone, canned, canned_as, metric, plain_model, settled, start};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn check_error(answer: &crate::support::Answer, status: u16, code: &str, case: &str) {
    assert_eq!(answer.status, status, "{case}: {answer:?}");
    let error = &answer.json()["error"];
    assert_eq!(error["code"], code, "{case}");
    assert!(error["message"].is_string() && error["type"].is_string() && error["param"].is_null(), "{case}");
}

#[tokio::test]
async fn broken_bodies_are_refused_whatever_the_policy() {
    let fixture = Fixture::new(2);
    let mut mock = canned_as(fixture.info());
    let tables = fixture.write("t", &[], 0);
    let deep = format!("{{\"prompt\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let long_deep = format!("{{\"prompt\":{}", "{\"a\":".repeat(20_000));
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("empty", vec![]),
        ("no object", b"[1,2]".to_vec()),
        ("text", b"hello".to_vec()),
        ("cut off", b"{\"prompt\":\"a".to_vec()),
        ("broken inside", b"{\"prompt\":[1 2]}".to_vec()),
        ("trailing", b"{\"prompt\":\"a\"} x".to_vec()),
        ("trailing comma", b"{\"prompt\":\"a\",}".to_vec()),
        ("not a number", b"{\"prompt\":\"a\",\"n\":NaN}".to_vec()),
        ("invalid UTF-8", b"{\"prompt\":\"\xff\xfe\"}".to_vec()),
        ("deep", deep.into_bytes()),
        ("deep and cut off", long_deep.into_bytes()),
    ];
    for toml in [plain_model(&mock, 2), fixture.affinity(&mock.url(), &tables)] {
        let gateway = start(&toml).await;
        let client = Client::data(&gateway);
        for path in [COMPLETIONS, CHAT, "/generate", "/v1/embeddings"] {
            for (case, body) in &cases {
                let answer = client.post(path, body.clone()).await;
                check_error(&answer, 400, "body_not_json", &format!("{path}, {case}"));
            }
        }
        settled(&gateway).await;
    }
    assert!(mock.seen.try_recv().is_err(), "nothing of it reached the engine");
}

#[tokio::test]
async fn wrong_prompts_are_refused_and_odd_ones_are_routed_by_load() {
    let fixture = Fixture::new(2);
    let mut mock = canned_as(fixture.info());
    let tables = fixture.write("t", &["alpha", "beta"], 0);
    let patient = format!("[routing]\nscore_limit_seconds = 600\n{}", fixture.affinity(&mock.url(), &tables));
    let gateway = start(&patient).await;
    let client = Client::data(&gateway);
    for (path, body) in [
        (CHAT, r#"{"messages":"hello"}"#),
        (CHAT, r#"{"messages":[]}"#),
        (CHAT, "{}"),
        (COMPLETIONS, r#"{"prompt":5}"#),
        (COMPLETIONS, r#"{"prompt":[1,-1]}"#),
        (COMPLETIONS, r#"{"prompt":[99999999999]}"#),
        (COMPLETIONS, r#"{"prompt":[4294967295,7]}"#),
        ("/generate", r#"{"text":{}}"#),
        ("/generate", r#"{"text":"a","model":7,"input_ids":"b"}"#),
        (COMPLETIONS, r#"{"model":7,"prompt":"a"}"#),
    ] {
        let answer = client.post(path, body).await;
        if path == "/generate" && body.contains("input_ids") {
            assert_eq!(answer.status, 200);
            mock.next().await;
        } else {
            check_error(&answer, 400, "invalid_field", body);
        }
    }
    assert!(mock.seen.try_recv().is_err());

    let huge = format!("{{\"prompt\":\"{}\"}}", "word ".repeat(1 << 20));
    for (path, body, reason) in [
        (CHAT, r#"{"messages":[{"role":"alien","content":null}],"chat_template_kwargs":{"x":1}}"#.to_owned(), None),
        (
            CHAT,
            r#"{"messages":[{"content":[{"type":"image_url","image_url":{"url":"x"}}],"role":"user"}]}"#.to_owned(),
            None,
        ),
        (COMPLETIONS, r#"{"prompt_embeds":"AAAA"}"#.to_owned(), Some("other_prompt")),
        ("/generate", r#"{"input_embeds":[[0.5]]}"#.to_owned(), Some("other_prompt")),
        (COMPLETIONS, huge, Some("too_large")),
        // The engine validates these.
        (COMPLETIONS, r#"{"prompt":["a",1]}"#.to_owned(), Some("ids")),
        (COMPLETIONS, r#"{"prompt":[true,7]}"#.to_owned(), Some("ids")),
        (COMPLETIONS, r#"{"prompt":["1",7]}"#.to_owned(), Some("ids")),
        (COMPLETIONS, r#"{"prompt":[[7.0]]}"#.to_owned(), Some("ids")),
        ("/generate", r#"{"input_ids":["7"]}"#.to_owned(), Some("ids")),
    ] {
        let before =
            metric(&gateway, &format!("semmoe_score_failures_total{{reason=\"{}\"}}", reason.unwrap_or(""))).await;
        let answer = client.post(path, body.clone()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let placed_by = if reason.is_some() { "least_load" } else { "affinity" };
        assert_eq!(answer.header("x-semmoe-policy"), placed_by, "{reason:?}");
        assert_eq!(mock.next().await.body.len(), if path == "/generate" { body.len() + 19 } else { body.len() });
        if let Some(reason) = reason {
            let line = format!("semmoe_score_failures_total{{reason=\"{reason}\"}}");
            assert_eq!(metric(&gateway, &line).await, before + 1.0, "{reason}");
        }
    }
    settled(&gateway).await;
}

/// A megabyte takes more than a millisecond: the request does not wait for its score and is routed by load.
#[tokio::test]
async fn a_prompt_that_takes_long_to_score_is_routed_by_load() {
    let fixture = Fixture::new(2);
    let mut mock = canned_as(fixture.info());
    let tables = fixture.write("t", &["alpha", "beta"], 0);
    let hasty = format!("[routing]\nscore_limit_seconds = 0.001\n{}", fixture.affinity(&mock.url(), &tables));
    let gateway = start(&hasty).await;
    let client = Client::data(&gateway);
    let body = format!("{{\"prompt\":\"{}\"}}", "alpha beta\\n".repeat(100_000));
    for count in 1..=3 {
        assert_eq!(client.post(COMPLETIONS, body.clone()).await.status, 200);
        assert_eq!(mock.next().await.body.len(), body.len());
        assert_eq!(metric(&gateway, "semmoe_score_failures_total{reason=\"slow\"}").await, f64::from(count));
    }
    let broken = &body[..body.len() - 1];
    check_error(&client.post(COMPLETIONS, broken.to_owned()).await, 400, "body_not_json", "long and cut off");
    settled(&gateway).await;
}

#[tokio::test]
async fn long_bodies_are_refused_before_and_while_they_come() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(1, "[limits]\nbody_bytes = 1000\n").await;
    let body = |bytes: usize| format!("{{\"prompt\":\"{}\"}}", "x".repeat(bytes - 13));
    assert_eq!(client.post(COMPLETIONS, body(1000)).await.status, 200);
    mock.next().await;
    check_error(&client.post(COMPLETIONS, body(1001)).await, 413, "body_too_long", "announced");
    let answer = chunked(gateway.data_addr(), &body(1001)).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    let answer = announced(gateway.data_addr(), "18446744073709551615").await;
    assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");
    let answer = announced(gateway.data_addr(), "-1").await;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(mock.seen.try_recv().is_err());
}

/// Sends raw bytes and returns everything received until the connection closes.
async fn raw(address: std::net::SocketAddr, bytes: String) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    socket.write_all(bytes.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A server that closes with unread input resets the connection; data received before counts.
    let _ = socket.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

async fn chunked(address: std::net::SocketAddr, body: &str) -> String {
    let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    raw(address, format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len())).await
}

async fn announced(address: std::net::SocketAddr, length: &str) -> String {
    raw(address, format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n")).await
}

#[tokio::test]
async fn a_body_that_does_not_come_times_out() {
    let Fleet { mocks: [_mock], gateway, .. } =
        alone(1, "[timeouts]\nbody_seconds = 0.05\nheader_seconds = 0.05\n").await;
    let answer =
        raw(gateway.data_addr(), "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{".to_owned())
            .await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    // Half a head: closed without a response.
    raw(gateway.data_addr(), "POST /v1/completions HTTP/1.1\r\nhost".to_owned()).await;
}

#[tokio::test]
async fn unknown_routes_methods_and_models() {
    let Fleet { mocks: [_mock], gateway: _gateway, client } = alone(1, "").await;
    for path in ["/", "/v1", "/update_weights_from_disk", "/v1/chat/completions/", "/server_info", "/v1/chat/../models"]
    {
        check_error(&client.post(path, "{}").await, 404, "route_not_found", path);
    }
    check_error(&client.get(CHAT).await, 405, "method_not_allowed", "GET");
    for path in ["/v1/models", "/v1/models/tiny"] {
        check_error(&client.post(path, "{}").await, 405, "method_not_allowed", path);
    }
    check_error(&client.get("/v1/models/").await, 404, "route_not_found", "no name");
    let answer = client.post(CHAT, r#"{"model":"gpt-5"}"#).await;
    check_error(&answer, 404, "model_not_found", "unknown");
    assert_eq!(answer.message(), "there is no model 'gpt-5' (available: tiny)");
    assert_eq!(client.post(CHAT, r#"{"model":"small"}"#).await.status, 200);
    assert_eq!(client.post(CHAT, r#"{"model":null}"#).await.status, 200);
}

#[tokio::test]
async fn several_models_need_a_name() {
    let (mut a, mut b) = (canned(1), canned(1));
    let second = plain_model(&b, 1).replace("tiny", "other").replace("small", "tall").replace("pod-a", "pod-b");
    let gateway = start(&format!("{}{second}", plain_model(&a, 1))).await;
    let client = Client::data(&gateway);
    check_error(&client.post(CHAT, "{}").await, 400, "model_missing", "chat");
    check_error(&client.post("/generate", r#"{"model":"tiny"}"#).await, 400, "model_missing", "generate");
    assert_eq!(client.post(CHAT, r#"{"model":"tall"}"#).await.status, 200);
    b.next().await;
    let answer = client.call(Method::POST, "/generate", &[("x-semmoe-model", "tiny")], Bytes::from_static(b"{}")).await;
    assert_eq!(answer.status, 200);
    a.next().await;
    assert_eq!(client.get("/v1/models").await.json()["data"].as_array().unwrap().len(), 4);
}

/// Engines crash on ids that their embedding has no row for.
#[tokio::test]
async fn ids_outside_the_vocabulary_never_arrive() {
    let fixture = Fixture::new(2);
    let mut mock = canned_as(fixture.info());
    let tables = fixture.write("t", &[], 0);
    // Also if no policy reads prompts.
    let by_load = fixture
        .affinity(&mock.url(), &tables)
        .replace("name = \"tiny\"\n", "name = \"tiny\"\npolicy = \"least_load\"\n");
    for toml in [fixture.affinity(&mock.url(), &tables), by_load] {
        let gateway = start(&toml).await;
        let client = Client::data(&gateway);
        for (path, body, id) in [
            (COMPLETIONS, r#"{"prompt":[99999999]}"#, "99999999"),
            (COMPLETIONS, r#"{"prompt":[[1,2],[3,-4]]}"#, "-4"),
            (COMPLETIONS, r#"{"prompt":[1e8]}"#, "1e8"),
            (COMPLETIONS, r#"{"prompt":["1",99999999]}"#, "99999999"),
            (COMPLETIONS, r#"{"prompt":[["99999999"]]}"#, "99999999"),
            (COMPLETIONS, r#"{"prompt":[true,"\u0039\u0039_999 "]}"#, r"\u0039\u0039_999 "),
            (COMPLETIONS, r#"{"prompt":"a","stop_token_ids":["+10240"]}"#, "+10240"),
            (COMPLETIONS, r#"{"prompt":"a","logit_bias":{"5":1,"10240":1}}"#, "10240"),
            (CHAT, r#"{"messages":[{"role":"user","content":"a"}],"input_ids":["99_999_999"]}"#, "99_999_999"),
            (CHAT, r#"{"messages":[{"role":"user","content":"a"}],"allowed_token_ids":[10240.0]}"#, "10240.0"),
            ("/generate", r#"{"input_ids":[5,10240]}"#, "10240"),
            ("/generate", r#"{"input_ids":[[5],["99999999"]]}"#, "99999999"),
            ("/generate", r#"{"text":"a","sampling_params":[{"n":1},{"logit_bias":{"-1":2}}]}"#, "-1"),
            ("/generate", r#"{"text":"a","token_ids_logprob":[10240]}"#, "10240"),
            ("/v1/embeddings", r#"{"input":[1,99999]}"#, "99999"),
            ("/v1/embeddings", r#"{"input":[true,99999]}"#, "99999"),
            ("/v1/responses", r#"{"input":"a","logit_bias":{"99999":1}}"#, "99999"),
            ("/detokenize", r#"{"tokens":["99999"]}"#, "99999"),
        ] {
            let expected = format!("token id {id} is not in the model's vocabulary of 10240 tokens");
            for body in [body.to_owned(), format!("{{\"pad\":\"{}\",{}", "x".repeat(4 << 20), &body[1..])] {
                let answer = client.post(path, body.clone()).await;
                check_error(&answer, 400, "invalid_field", &body[..body.len().min(99)]);
                assert!(answer.message().ends_with(&expected), "{}", answer.message());
            }
        }
        assert!(mock.seen.try_recv().is_err(), "nothing of it reached the engine");
        for (path, body) in [
            (COMPLETIONS, r#"{"prompt":[0,10239]}"#),
            (COMPLETIONS, r#"{"prompt":["99999999"],"logit_bias":{"10239":1}}"#),
            ("/generate", r#"{"input_ids":[[1],[10239]]}"#),
            ("/v1/embeddings", r#"{"input":["99999999","-1"]}"#),
            ("/detokenize", r#"{"tokens":[10239]}"#),
        ] {
            assert_eq!(client.post(path, body).await.status, 200, "{body}");
            mock.next().await;
        }
        settled(&gateway).await;
    }
}

/// The engine neither computed nor caches a rejected prompt.
#[tokio::test]
async fn refused_prompts_leave_no_load() {
    let fixture = Fixture::new(2);
    let mock = canned_as(fixture.info());
    let tables = fixture.write("t", &["alpha", "beta"], 0);
    let prefix = "[routing.prefix]\nblock_tokens = 1\n";
    let gateway = start(&format!("{prefix}{}", fixture.balanced(&mock.url(), &tables))).await;
    let client = Client::data(&gateway);
    let ranks = async || {
        let shown = Client::admin(&gateway).get("/admin/backends").await.json();
        let rank = |rank: &serde_json::Value| {
            ["recent_tokens", "price", "in_flight_tokens", "pending_tokens"]
                .map(|field| rank[field].as_f64().unwrap_or_default())
        };
        shown["backends"][0]["ranks"].as_array().unwrap().iter().map(rank).collect::<Vec<_>>()
    };
    let before = ranks().await;
    for status in ["400", "413", "422", "404"] {
        for prompt in ["alpha beta gamma", "beta beta delta"] {
            let body = format!("{{\"prompt\":\"{prompt}\",\"stream\":true}}");
            assert_eq!(client.mock(COMPLETIONS, status, body).await.status.to_string(), status);
        }
    }
    settled(&gateway).await;
    let after = ranks().await;
    for (before, after) in before.iter().flatten().zip(after.iter().flatten()) {
        assert!((before - after).abs() < 1e-6, "{before} {after}");
    }
}
