//! Engines that are busy, hung or dead: a busy one must never be marked down, the others must, within the documented
//! time.

use std::time::{Duration, Instant};

use http::Method;
use semmoe_gateway::Running;

use crate::support::{
    Client, Mock, PATIENCE, all_succeed, canned, metric, next_frame, plain_model, rest_of, settled, several, shown,
    start_bare, until_shown,
};

const GENERATE: &str = "/generate";

/// Shorter times than the defaults, with the caller's `busy_seconds`.
async fn start_with(busy_seconds: f64, models: &str) -> Running {
    let health = format!("interval_seconds = 0.05\ntimeout_seconds = 0.1\nbusy_seconds = {busy_seconds}");
    start_bare(&format!("[health]\n{health}\n{models}")).await
}

/// Fails as soon as the backend is marked down within this time.
async fn stays_healthy(gateway: &Running, time: Duration) {
    let down = gateway.wait_health("pod-a", |health| !health.is_healthy());
    if let Ok(health) = tokio::time::timeout(time, down).await {
        panic!("marked down: {health:?}");
    }
}

async fn marked_down_within(gateway: &Running, time: Duration) -> String {
    let down = gateway.wait_health("pod-a", |health| !health.is_healthy());
    tokio::time::timeout(time, down).await.expect("marked down in time");
    shown(gateway, "pod-a").await["cause"].as_str().unwrap().to_owned()
}

/// SGLang's `/health` takes 3 to 17 s under prefill: many times a probe's limit, and less than `busy_seconds`.
#[tokio::test]
async fn an_engine_that_is_busy_with_long_prompts_is_never_marked_down() {
    let mut mock = canned(2);
    mock.settings().health_time = Duration::from_millis(600);
    let gateway = start_with(1.5, &plain_model(&mock, 2)).await;
    mock.behave("late");
    let client = Client::data(&gateway);
    let calls: Vec<_> = (0..120).map(|_| client.begin(GENERATE, "{\"text\":\"long\"}")).collect();
    for _ in 0..120 {
        mock.next().await;
    }
    stays_healthy(&gateway, Duration::from_secs(3)).await;
    mock.release(120);
    all_succeed(calls).await;
    settled(&gateway).await;
}

/// The server's own event loop is starved too, so that no probe is answered; but tokens flow.
#[tokio::test]
async fn answers_that_flow_are_a_sign_of_life() {
    let mock = canned(2);
    let gateway = start_with(1.5, &plain_model(&mock, 2)).await;
    let client = Client::data(&gateway);
    mock.settings().mute = true;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        let mut answer = client.open(Method::POST, GENERATE, &[("x-mock", "stream")], "{}").await;
        for event in 1..=3 {
            mock.release(1);
            let frame = next_frame(&mut answer).await.unwrap();
            // On a busy machine the end may share a frame with the last event.
            assert!(frame.starts_with(&format!("data: {event}\n\n")), "{frame}");
            stays_healthy(&gateway, Duration::from_millis(100)).await;
        }
    }
    let cause = marked_down_within(&gateway, Duration::from_secs(20)).await;
    assert!(cause.contains("did not send"), "{cause}");
    mock.settings().mute = false;
    let up = gateway.wait_health("pod-a", |health| health.is_healthy());
    tokio::time::timeout(PATIENCE, up).await.unwrap();
}

/// Its server answers on its own, and reports a hung scheduler, as SGLang's does after 20 s.
#[tokio::test]
async fn a_hung_scheduler_is_found_and_its_requests_are_moved() {
    let (mut a, b) = (canned(2), canned(2));
    let gateway = start_with(0.5, &several(&[&a, &b])).await;
    a.behave("hang");
    let client = Client::data(&gateway);
    let calls: Vec<_> = (0..2).map(|_| client.begin(GENERATE, "{\"text\":\"x\"}")).collect();
    a.next().await;
    a.settings().health_time = Duration::from_secs(3600);
    let cause = marked_down_within(&gateway, Duration::from_secs(20)).await;
    assert!(cause.starts_with("its scheduler does not answer: "), "{cause}");
    all_succeed(calls).await;
    settled(&gateway).await;
}

#[tokio::test]
async fn a_server_that_is_gone_is_found_at_once() {
    let mut mock = canned(2);
    let gateway = start_with(3600.0, &plain_model(&mock, 2)).await;
    // Long before the patience with a busy engine would end.
    mock.kill();
    let cause = marked_down_within(&gateway, Duration::from_secs(2)).await;
    assert!(cause.contains("cannot connect"), "{cause}");
}

/// Versions and front ends without `/ping` are asked for health, with the patience that requires.
#[tokio::test]
async fn an_engine_without_the_quick_route_is_asked_for_health() {
    let mock = canned(2);
    mock.settings().has_ping = false;
    mock.settings().health_time = Duration::from_millis(300);
    let gateway = start_with(5.0, &plain_model(&mock, 2)).await;
    stays_healthy(&gateway, Duration::from_secs(1)).await;
    mock.settings().health = 503;
    let cause = marked_down_within(&gateway, Duration::from_secs(20)).await;
    assert!(cause.contains("/health answered 503"), "{cause}");
}

/// Periodic probes every `seconds`. Failures that must be counted never close a backend.
async fn start_with_interval(engine: &str, seconds: f64, mock: &Mock) -> Running {
    let models = plain_model(mock, 2).replace("sglang", engine);
    start_bare(&format!("[health]\ninterval_seconds = {seconds}\nunhealthy_after = 1000000\n{models}")).await
}

/// An API server of vLLM answers 503 only when the engine core behind it is dead; the worker when a rank is lost.
#[tokio::test]
async fn one_503_from_vllm_or_the_worker_is_enough() {
    for engine in ["vllm", "semmoe"] {
        let mock = canned(2);
        let gateway = start_with_interval(engine, 0.05, &mock).await;
        mock.settings().health = 503;
        marked_down_within(&gateway, Duration::from_secs(20)).await;
    }
}

/// The next periodic probe is an hour away. A worker that was only full stays.
#[tokio::test]
async fn a_request_that_gets_a_503_has_the_worker_probed_at_once() {
    let mock = canned(2);
    let gateway = start_with_interval("semmoe", 3600.0, &mock).await;
    mock.behave("503");
    let refused = async || Client::data(&gateway).post(GENERATE, r#"{"text":"hello"}"#).await.status;
    assert_eq!(refused().await, 503);
    stays_healthy(&gateway, Duration::from_millis(300)).await;

    mock.settings().health = 503;
    assert_eq!(refused().await, 503);
    marked_down_within(&gateway, Duration::from_secs(20)).await;
}

/// The prober's own patience never ends here; the short one detects silent streams.
async fn start_with_stall(stall_seconds: f64, models: &str) -> Running {
    let health = format!("identity_seconds = 3600.0\nbusy_seconds = 3600.0\nstall_seconds = {stall_seconds}");
    start_bare(&format!("[health]\n{health}\n{models}")).await
}

async fn silences(gateway: &Running, to: &str) -> f64 {
    metric(gateway, &format!("semmoe_backend_silences_total{{backend=\"pod-a\",to=\"{to}\"}}")).await
}

/// A killed SGLang scheduler, seen from outside: `/ping` is answered, streams stop, everything else hangs.
#[tokio::test]
async fn streams_that_stop_with_their_scheduler_send_requests_elsewhere() {
    let (a, b) = (canned(2), canned(2));
    let gateway = start_with_stall(0.5, &several(&[&a, &b])).await;
    let client = Client::data(&gateway);
    a.release(1);
    let mut stream = client.open(Method::POST, GENERATE, &[("x-mock", "stream")], "{\"stream\":true}").await;
    assert_eq!(stream.headers()["x-semmoe-backend"], "pod-a");
    assert!(next_frame(&mut stream).await.unwrap().starts_with("data: 1"));
    a.settings().hung = true;
    let shown = until_shown(&gateway, "pod-a", |shown| shown["healthy"] == false).await;
    assert!(shown["cause"].as_str().unwrap().starts_with("its streams are silent"), "{shown}");
    assert_eq!(silences(&gateway, "suspected").await, 1.0);
    for _ in 0..8 {
        let answer = client.post(GENERATE, "{\"text\":\"x\"}").await;
        assert_eq!((answer.status, &answer.headers["x-semmoe-backend"]), (200u16, &"pod-b".parse().unwrap()));
    }
    // The other backend dies too: a silent backend is better than none.
    drop(b);
    let answer = client.post(GENERATE, "{\"text\":\"x\"}").await;
    assert_eq!((answer.status, &answer.headers["x-semmoe-backend"]), (200u16, &"pod-a".parse().unwrap()));
    // It was another client's long prompt: the stream continues and loses nothing.
    a.release(2);
    let rest = rest_of(&mut stream).await;
    assert_eq!(rest, "data: 2\n\ndata: 3\n\ndata: [DONE]\n\n");
    until_shown(&gateway, "pod-a", |shown| shown["healthy"] == true).await;
    assert!(silences(&gateway, "recovered").await >= 1.0);
    settled(&gateway).await;
}

#[tokio::test]
async fn the_only_backend_is_used_though_its_streams_stopped_until_its_scheduler_answers() {
    let mock = canned(2);
    let gateway = start_with_stall(0.5, &plain_model(&mock, 2)).await;
    let client = Client::data(&gateway);
    mock.release(1);
    let stream = client.open(Method::POST, GENERATE, &[("x-mock", "stream")], "{\"stream\":true}").await;
    mock.settings().hung = true;
    until_shown(&gateway, "pod-a", |shown| shown["healthy"] == false).await;
    assert_eq!(Client::admin(&gateway).get("/readyz").await.status, 200);
    assert_eq!(client.post(GENERATE, "{\"text\":\"x\"}").await.status, 200);
    mock.settings().hung = false;
    until_shown(&gateway, "pod-a", |shown| shown["healthy"] == true).await;
    drop(stream);
    settled(&gateway).await;
}

#[tokio::test]
async fn a_long_prompt_of_ours_explains_silent_streams() {
    let mut mock = canned(2);
    let gateway = start_with_stall(0.3, &plain_model(&mock, 2)).await;
    let client = Client::data(&gateway);
    let long = format!("{{\"text\":\"{}\"}}", "word ".repeat(20_000));
    let call = client.begin_with(GENERATE, "hang", long);
    mock.next().await;
    mock.settings().hung = true;
    mock.release(1);
    let stream = client.open(Method::POST, GENERATE, &[("x-mock", "stream")], "{\"stream\":true}").await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(silences(&gateway, "suspected").await, 0.0);
    call.abort();
    until_shown(&gateway, "pod-a", |shown| shown["healthy"] == false).await;
    drop(stream);
    settled(&gateway).await;
}
