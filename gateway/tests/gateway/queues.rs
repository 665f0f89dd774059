//! Requests that wait for a rank or a backend: bounds, order, leaving, and the client's errors.

use crate::support::files::{File, reload};
use crate::support::{
    Answer, Client, Fleet, Mock, all_succeed, alone, canned, eventually, metric, plain_model, settled, several, start,
};
use semmoe_gateway::Running;

const CHAT: &str = "/v1/chat/completions";
const DEPTH: &str = "semmoe_queue_depth{model=\"tiny\"}";

async fn until_depth(gateway: &Running, wanted: f64) {
    eventually("the line has the wanted length", async || metric(gateway, DEPTH).await == wanted).await;
}

fn ask(gateway: &Running, behaviour: &'static str) -> tokio::task::JoinHandle<Answer> {
    Client::data(gateway).begin_with(CHAT, behaviour, "{}")
}

async fn shed(gateway: &Running, reason: &str) -> f64 {
    metric(gateway, &format!("semmoe_shed_total{{model=\"tiny\",reason=\"{reason}\"}}")).await
}

#[tokio::test]
async fn what_finds_no_room_waits_and_what_finds_no_place_in_the_line_is_refused() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(1, "[queue]\nmax_in_flight = 2\nmax_queued = 2\n").await;
    let running = [ask(&gateway, "late"), ask(&gateway, "late")];
    for _ in &running {
        mock.next().await;
    }
    let waiting = [ask(&gateway, "late"), ask(&gateway, "late")];
    until_depth(&gateway, 2.0).await;
    let refused = client.post(CHAT, "{}").await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, "1"));
    assert_eq!(refused.message(), "model 'tiny' is busy: 2 requests are already waiting");
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    assert_eq!(shed(&gateway, "queue_full").await, 1.0);
    assert!(mock.seen.try_recv().is_err(), "a rank has more than its limit");
    for _ in 0..4 {
        mock.release(1);
    }
    for call in running.into_iter().chain(waiting) {
        assert_eq!(call.await.unwrap().status, 200);
    }
    assert_eq!(metric(&gateway, "semmoe_queue_seconds_count{model=\"tiny\"}").await, 2.0);
    settled(&gateway).await;
    until_depth(&gateway, 0.0).await;
}

/// The body's priority counts; without one, or with one that is out of range, a request waits its turn.
#[tokio::test]
async fn priorities_have_a_head_start() {
    let rules = "[queue]\nmax_in_flight = 1\npriority_seconds = 3600.0\n";
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, rules).await;
    let bodies = ["{}", r#"{"user": "b"}"#, r#"{"priority": 256}"#, r#"{"priority": 1}"#, r#"{"priority": 2}"#];
    let mut calls = Vec::new();
    for (at, body) in bodies.into_iter().enumerate() {
        calls.push(Client::data(&gateway).begin_with(CHAT, "late", body));
        match at {
            0 => assert_eq!(mock.next().await.body, body),
            _ => until_depth(&gateway, at as f64).await,
        }
    }
    for body in [bodies[4], bodies[3], bodies[1], bodies[2]] {
        mock.release(1);
        assert_eq!(mock.next().await.body, body);
    }
    mock.release(1);
    all_succeed(calls).await;
    settled(&gateway).await;
}

#[tokio::test]
async fn a_client_that_leaves_the_line_is_forgotten() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, "[queue]\nmax_in_flight = 1\n").await;
    let first = ask(&gateway, "late");
    mock.next().await;
    let leaver = ask(&gateway, "late");
    until_depth(&gateway, 1.0).await;
    let last = ask(&gateway, "late");
    until_depth(&gateway, 2.0).await;
    leaver.abort();
    until_depth(&gateway, 1.0).await;
    mock.release(2);
    assert_eq!((first.await.unwrap().status, last.await.unwrap().status), (200, 200));
    mock.next().await;
    assert!(mock.seen.try_recv().is_err(), "who left was asked for");
    settled(&gateway).await;
    let line =
        "semmoe_requests_total{backend=\"none\",model=\"tiny\",rank=\"none\",policy=\"round_robin\",code=\"499\"}";
    assert_eq!(metric(&gateway, line).await, 1.0);
}

#[tokio::test]
async fn waits_end() {
    let mut mock = canned(1);
    let rules = "[queue]\nmax_in_flight = 1\nmax_wait_seconds = 0.05\nwait_for_backend_seconds = 0.05\n";
    let gateway = start(&format!("{rules}{}", plain_model(&mock, 1))).await;
    let first = ask(&gateway, "late");
    mock.next().await;
    let refused = Client::data(&gateway).post(CHAT, "{}").await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, "1"));
    assert_eq!(refused.message(), "model 'tiny' is busy: no rank had room within 0.05 s");
    mock.release(1);
    assert_eq!(first.await.unwrap().status, 200);
    mock.kill();
    gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    let refused = Client::data(&gateway).post(CHAT, "{}").await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, "1"));
    assert!(refused.message().contains("backend 'pod-a': cannot connect"), "{}", refused.message());
    assert_eq!((shed(&gateway, "queue_timeout").await, shed(&gateway, "no_backend").await), (1.0, 1.0));
    settled(&gateway).await;
}

/// Requests that arrive while an engine restarts quickly do not notice it.
#[tokio::test]
async fn requests_wait_shortly_for_a_backend() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, "[queue]\nwait_for_backend_seconds = 60\n").await;
    mock.kill();
    gateway.wait_health("pod-a", |health| !health.is_healthy()).await.unwrap();
    let calls: Vec<_> = (0..5).map(|_| ask(&gateway, "200")).collect();
    until_depth(&gateway, 5.0).await;
    mock.listen();
    all_succeed(calls).await;
    settled(&gateway).await;
    until_depth(&gateway, 0.0).await;
}

/// A retry joins the queue if the others are full, and does not exceed their limit.
#[tokio::test]
async fn a_retry_waits_for_room() {
    let (mut a, mut b) = (canned(1), canned(1));
    let models = several(&[&a, &b]).replace("ranks = 2", "ranks = 1");
    let gateway = start(&format!("[queue]\nmax_in_flight = 1\n{models}")).await;
    a.behave("late");
    b.behave("late");
    let client = Client::data(&gateway);
    let calls = [client.begin(CHAT, "{}"), client.begin(CHAT, "{}")];
    a.next().await;
    b.next().await;
    a.kill();
    until_depth(&gateway, 1.0).await;
    assert!(b.seen.try_recv().is_err());
    b.release(2);
    let mut attempts: Vec<String> = Vec::new();
    for call in calls {
        let answer = call.await.unwrap();
        assert_eq!((answer.status, answer.header("x-semmoe-backend")), (200, "pod-b"));
        attempts.push(answer.header("x-semmoe-attempts").to_owned());
    }
    attempts.sort();
    assert_eq!(attempts, ["", "2"]);
    settled(&gateway).await;
    until_depth(&gateway, 0.0).await;
}

/// If engines choose the ranks, the limit applies to all of them together.
#[tokio::test]
async fn the_limit_holds_where_engines_choose() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(2, "[queue]\nmax_in_flight = 1\n").await;
    let calls = [(); 3].map(|()| client.begin_with("/v1/embeddings", "late", "{}"));
    until_depth(&gateway, 1.0).await;
    for _ in 0..2 {
        assert_eq!(mock.next().await.header_pin(), None);
    }
    assert!(mock.seen.try_recv().is_err());
    mock.release(3);
    all_succeed(calls).await;
    settled(&gateway).await;
}

#[tokio::test]
async fn nobody_waits_in_a_line_of_no_length() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(1, "[queue]\nmax_in_flight = 1\nmax_queued = 0\n").await;
    let first = ask(&gateway, "late");
    mock.next().await;
    assert_eq!(client.post(CHAT, "{}").await.status, 429);
    mock.release(1);
    assert_eq!(first.await.unwrap().status, 200);
    settled(&gateway).await;
}

/// Requests waiting for room see the backends of a reload, and those waiting for a backend see the first one found.
#[tokio::test]
async fn requests_that_wait_see_new_backends() {
    let (mut a, mut b) = (canned(1), canned(1));
    let rules = "[queue]\nmax_in_flight = 1\n";
    let both = several_of_one(&[&a, &b]);
    let file = File::new("", &format!("{rules}{}", several_of_one(&[&a])));
    let gateway = file.start().await;
    let running = ask(&gateway, "late");
    a.next().await;
    let waiting = [ask(&gateway, "late"), ask(&gateway, "late")];
    until_depth(&gateway, 2.0).await;
    file.write("", &format!("{rules}{both}"));
    assert_eq!(reload(&gateway).await.status, 200);
    b.next().await;
    until_depth(&gateway, 1.0).await;
    assert!(a.seen.try_recv().is_err() && b.seen.try_recv().is_err(), "a rank has more than its limit");
    b.release(1);
    b.next().await;
    b.release(1);
    a.release(1);
    for call in waiting {
        let answer = call.await.unwrap();
        assert_eq!((answer.status, answer.header("x-semmoe-backend")), (200, "pod-b"));
    }
    assert_eq!(running.await.unwrap().status, 200);
    settled(&gateway).await;
    until_depth(&gateway, 0.0).await;
}

/// Backends with a single rank.
fn several_of_one(mocks: &[&Mock]) -> String {
    several(mocks).replace("ranks = 2", "ranks = 1")
}
