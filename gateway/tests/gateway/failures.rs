//! Engines that report their own failure: in a 500, by an abort, in a stream.

use http::Method;
use http_body_util::BodyExt;

use crate::support::{
    Answer, Client, Fleet, Mock, PATIENCE, all_succeed, alone, canned, metric, next_frame, settled, several, shown,
    start, start_bare,
};

const COMPLETIONS: &str = "/v1/completions";
const PLAIN: &str = r#"{"prompt":"x"}"#;
const STREAM: &str = r#"{"prompt":"x","stream":true}"#;

/// Both backends are vLLM.
fn two(mocks: &[&Mock]) -> String {
    several(mocks).replace("sglang", "vllm")
}

/// The prober is slower than the requests.
async fn start_unprobed(toml: &str) -> semmoe_gateway::Running {
    start_bare(&format!("[health]\ninterval_seconds = 3600\n{toml}")).await
}

async fn failures(gateway: &semmoe_gateway::Running, kind: &str) -> f64 {
    metric(gateway, &format!("semmoe_engine_failures_total{{backend=\"pod-a\",kind=\"{kind}\"}}")).await
}

fn served_by(answer: &Answer) -> (u16, &str) {
    (answer.status, answer.header("x-semmoe-backend"))
}

/// In whatever form the engine fails, no request is lost, and the breaker and metrics count it.
#[tokio::test]
async fn a_failure_before_the_first_byte_is_retried() {
    for (behaviour, body, kind) in [
        ("dead", PLAIN, "engine_dead"),
        ("dead", STREAM, "engine_dead"),
        ("dead-stream", STREAM, "engine_dead"),
        ("abort", PLAIN, "abort"),
        ("abort-stream", STREAM, "abort"),
    ] {
        let (a, b) = (canned(2), canned(2));
        let gateway = start_unprobed(&two(&[&a, &b])).await;
        a.behave(behaviour);
        if kind == "engine_dead" {
            a.settings().health = 503;
        }
        let client = Client::data(&gateway);
        for _ in 0..4 {
            assert_eq!(served_by(&client.post(COMPLETIONS, body).await), (200, "pod-b"), "{behaviour} {body}");
        }
        assert!(failures(&gateway, kind).await >= 1.0, "{behaviour} {body}");
        let retried = format!("semmoe_retries_total{{cause=\"{kind}\",outcome=\"answered\"}}");
        assert!(metric(&gateway, &retried).await >= 1.0, "{behaviour} {body}");
        settled(&gateway).await;
    }
}

/// The server in front of the dead core is alive; its health route is asked at once, and only until it has answered.
#[tokio::test]
async fn a_dead_core_takes_the_backend_out_at_its_first_word() {
    let (a, b) = (canned(2), canned(2));
    let gateway = start_unprobed(&two(&[&a, &b])).await;
    a.behave("dead");
    a.settings().health = 503;
    let client = Client::data(&gateway);
    for _ in 0..8 {
        assert_eq!(served_by(&client.post(COMPLETIONS, PLAIN).await), (200, "pod-b"));
    }
    assert_eq!(failures(&gateway, "engine_dead").await, 1.0, "it got one request");
    let pod = shown(&gateway, "pod-a").await;
    assert!(pod["cause"].as_str().unwrap().contains("health"), "{pod}");
    b.behave("dead");
    b.settings().health = 503;
    assert_eq!(client.post(COMPLETIONS, PLAIN).await.status, 500);
    assert_eq!(Client::admin(&gateway).get("/readyz").await.status, 503);
    settled(&gateway).await;
}

/// Bytes went to the client: the engine's own error is relayed, and the answer counts as broken off.
#[tokio::test]
async fn a_failure_behind_the_first_byte_is_counted() {
    for (behaviour, body, kind, last) in
        [("dead-late", STREAM, "engine_error", "data: [DONE]\n\n"), ("abort-late", PLAIN, "abort", "}]}")]
    {
        let (a, b) = (canned(2), canned(2));
        let gateway = start(&two(&[&a, &b])).await;
        a.behave(behaviour);
        let client = Client::data(&gateway);
        let relayed = async {
            loop {
                let answer = client.post(COMPLETIONS, body).await;
                assert_eq!(answer.status, 200);
                if answer.header("x-semmoe-backend") == "pod-a" {
                    return answer;
                }
            }
        };
        let answer = tokio::time::timeout(PATIENCE, relayed).await.unwrap();
        let text = answer.text();
        assert!(text.ends_with(last) && text.contains("choices"), "{text}");
        assert_eq!(failures(&gateway, kind).await, 1.0);
        settled(&gateway).await;
        let metrics = Client::admin(&gateway).get("/metrics").await.body;
        let metrics = String::from_utf8(metrics.to_vec()).unwrap();
        let counted = |line: &&str| line.contains("requests_total{backend=\"pod-a\"") && line.contains("code=\"502\"");
        assert_eq!(metrics.lines().filter(counted).count(), 1, "{metrics}");
    }
}

#[tokio::test]
async fn aborts_open_the_breaker() {
    let (a, b) = (canned(2), canned(2));
    let rules = "[breaker]\nerrors = 2\nopen_seconds = 3600\nlongest_seconds = 3600\n";
    let gateway = start(&format!("{rules}{}", two(&[&a, &b]))).await;
    a.behave("abort");
    let client = Client::data(&gateway);
    for _ in 0..8 {
        assert_eq!(served_by(&client.post(COMPLETIONS, PLAIN).await), (200, "pod-b"));
    }
    assert_eq!(shown(&gateway, "pod-a").await["breaker"]["state"], "open");
    assert_eq!(failures(&gateway, "abort").await, 2.0);
    settled(&gateway).await;
}

/// Whatever a client makes engines say, as text or as an echoed object, no backend is blamed.
#[tokio::test]
async fn a_client_cannot_forge_a_failure() {
    const GENERATE: &str = "/generate";
    const RESPONSES: &str = "/v1/responses";
    let aborted = r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"no grammar: {\"a\": {}}","status_code":400}}}"#;
    let repeated = r#"{"status":"completed","error":null,"metadata":{"finish_reason":"abort","error":{"code":500},"type":"abort"}}"#;
    let (whole, event) = (|document: &str| format!("say {document}"), |document: &str| format!("say-event {document}"));
    for (path, behaviour, body) in [
        (GENERATE, whole(aborted), PLAIN),
        (GENERATE, event(aborted), STREAM),
        (RESPONSES, whole(repeated), r#"{"input":"x"}"#),
        (
            RESPONSES,
            event(&format!(r#"{{"type":"response.created","response":{repeated}}}"#)),
            r#"{"input":"x","stream":true}"#,
        ),
        (COMPLETIONS, "dead".to_owned(), PLAIN),
        (COMPLETIONS, "dead-stream".to_owned(), STREAM),
        (COMPLETIONS, "dead-late".to_owned(), STREAM),
        (COMPLETIONS, "die-json".to_owned(), PLAIN),
    ] {
        let (a, b) = (canned(2), canned(2));
        let gateway = start(&two(&[&a, &b])).await;
        a.release(100);
        b.release(100);
        let client = Client::data(&gateway);
        // Twelve in a row, and twelve with successful answers in between.
        for between in [0, 1] {
            for _ in 0..12 {
                let answer = client.open(Method::POST, path, &[("x-mock", &behaviour)], body).await;
                let _ = answer.into_body().collect().await;
                for _ in 0..between {
                    client.post(COMPLETIONS, r#"{"prompt":"another"}"#).await;
                }
            }
            let relayed = if path == COMPLETIONS { &[][..] } else { &["abort", "engine_error"] };
            for kind in ["engine_dead"].iter().chain(relayed) {
                assert_eq!(failures(&gateway, kind).await, 0.0, "{kind}: {behaviour}");
            }
            for pod in ["pod-a", "pod-b"] {
                let shown = shown(&gateway, pod).await;
                let breaker = &shown["breaker"];
                let state = (&breaker["state"], &shown["healthy"], &breaker["failures"]);
                assert_eq!(state, (&"closed".into(), &true.into(), &0.into()), "{behaviour}: {shown}");
                // The first late failure is not recognised.
                assert!(breaker["errors"].as_u64().unwrap() <= 2, "{behaviour}: {shown}");
            }
        }
        settled(&gateway).await;
    }
}

/// If no other backend can serve, the engine's own error is relayed.
#[tokio::test]
async fn the_last_backend_says_it_itself() {
    let a = canned(2);
    let gateway = start(&two(&[&a])).await;
    a.behave("abort");
    let answer = Client::data(&gateway).post(COMPLETIONS, PLAIN).await;
    assert_eq!((answer.status, &answer.json()["choices"][0]["finish_reason"]), (200, &"abort".into()));
    settled(&gateway).await;
}

/// The head of a stream waits for the first event, up to a limit; a stream that breaks off before it is retried.
#[tokio::test]
async fn the_head_of_a_stream_waits_for_its_first_event() {
    let (mut a, mut b) = (canned(2), canned(2));
    let gateway = start(&format!("[retry]\nhold_seconds = 0.3\n{}", two(&[&a, &b]))).await;
    a.behave("stream");
    b.behave("stream");
    let client = Client::data(&gateway);
    let began = std::time::Instant::now();
    let mut answer = client.open(Method::POST, COMPLETIONS, &[], STREAM).await;
    assert!(began.elapsed().as_secs_f64() >= 0.3, "{:?}", began.elapsed());
    let (asked, other) =
        if answer.headers()["x-semmoe-backend"] == "pod-a" { (&mut a, &mut b) } else { (&mut b, &mut a) };
    asked.next().await;
    asked.release(3);
    assert!(next_frame(&mut answer).await.unwrap().starts_with("data: 1\n\n"));
    drop(answer.into_body().collect().await);
    other.behave("");
    let gateway = start(&format!("[retry]\nhold_seconds = 30\n{}", two(&[asked, other]))).await;
    let client = Client::data(&gateway);
    let calls = [client.begin(COMPLETIONS, STREAM), client.begin(COMPLETIONS, STREAM)];
    asked.next().await;
    asked.kill();
    all_succeed(calls).await;
    settled(&gateway).await;
}

/// No client, of a failing engine or any other, learns where engines are or what they were asked.
#[tokio::test]
async fn clients_learn_neither_the_address_of_an_engine_nor_a_query() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(2, "[timeouts]\nfirst_byte_seconds = 0.3\n").await;
    let (client, address) = (Client::data(&gateway), mock.address.to_string());
    let path = format!("{COMPLETIONS}?secret=query%C2%9B");
    let check = |answer: &Answer, status: u16| {
        assert_eq!(answer.status, status, "{answer:?}");
        let text = answer.text();
        assert!(!text.contains(&address) && !text.contains("secret") && !text.contains("http://"), "{text}");
        assert!(!answer.message().contains(char::is_control), "{text}");
    };
    check(&client.mock(&path, "hang", "{}").await, 504);
    mock.next().await;
    let (answer, ()) = tokio::join!(client.mock(&path, "hang", "{}"), async {
        mock.next().await;
        mock.kill();
    });
    check(&answer, 502);
    gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    check(&client.mock(&path, "", "{}").await, 503);
    let answer = client.post(COMPLETIONS, "{\"model\":\"\\u009b2Jx\\n\"}").await;
    check(&answer, 404);
    assert!(answer.message().contains("\\u{9b}2Jx\\u{a}"), "{}", answer.message());
}
