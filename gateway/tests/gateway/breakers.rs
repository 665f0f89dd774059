//! Circuit breakers and `retry-after`: a backend that keeps failing is spared for a while, and none because of a single
//! request's error.

use http::Method;
use http_body_util::BodyExt;
use serde_json::Value;

use crate::support::{
    Client, Fleet, Mock, PATIENCE, canned, fleet, metric, settled, several, shown, start, until_shown,
};

const CHAT: &str = "/v1/chat/completions";

/// Opens on the second consecutive failure.
const QUICK: &str = "[breaker]\nfailures = 2\nopen_seconds = 0.05\nlongest_seconds = 3600\ntrials = 1\npasses = 2\n";
const QUICK_AND_LONG: &str = "[breaker]\nfailures = 2\nerrors = 2\nopen_seconds = 3600\nlongest_seconds = 3600\n";

fn drained(mock: &mut Mock) -> usize {
    std::iter::from_fn(|| mock.seen.try_recv().ok()).count()
}

#[tokio::test]
async fn failures_in_a_row_open_a_breaker_and_trials_close_it() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet(QUICK_AND_LONG).await;
    a.behave("plain 503");
    for _ in 0..8 {
        assert_eq!(client.post(CHAT, "{}").await.header("x-semmoe-backend"), "pod-b");
    }
    assert_eq!((drained(&mut a), drained(&mut b)), (2, 8));
    let pod = shown(&gateway, "pod-a").await;
    assert_eq!((&pod["breaker"]["state"], &pod["breaker"]["openings"]), (&"open".into(), &1.into()), "{pod}");
    assert!(pod["breaker"]["open_seconds"].as_f64().unwrap() > 3000.0);
    assert!(pod["ranks"].as_array().unwrap().iter().all(|rank| rank["available"] == false));
    assert_eq!(metric(&gateway, "semmoe_breaker_state{backend=\"pod-a\"}").await, 2.0);
    assert_eq!(metric(&gateway, "semmoe_breaker_changes_total{backend=\"pod-a\",to=\"open\"}").await, 1.0);
    assert_eq!(pod["healthy"], true, "its probes succeed");
    settled(&gateway).await;
}

#[tokio::test]
async fn a_half_open_breaker_lets_trials_through_and_closes_when_they_pass() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet(QUICK).await;
    a.behave("plain 503");
    for _ in 0..4 {
        client.post(CHAT, "{}").await;
    }
    a.behave("late");
    until_shown(&gateway, "pod-a", |pod| pod["breaker"]["state"] == "half open").await;
    drained(&mut a);
    drained(&mut b);
    // One trial at a time: it hangs, and the others go elsewhere.
    let trial = tokio::spawn({
        let client = client.clone();
        async move { while client.post(CHAT, "{}").await.header("x-semmoe-backend") != "pod-a" {} }
    });
    a.next().await;
    for _ in 0..4 {
        assert_eq!(client.post(CHAT, "{}").await.header("x-semmoe-backend"), "pod-b");
    }
    assert_eq!(drained(&mut a), 0);
    a.release(1);
    trial.await.unwrap();
    a.behave("");
    while client.post(CHAT, "{}").await.header("x-semmoe-backend") != "pod-a" {}
    until_shown(&gateway, "pod-a", |pod| pod["breaker"]["state"] == "closed").await;
    settled(&gateway).await;
}

/// A client that leaves during a trial proves nothing and frees the slot for the next one.
#[tokio::test]
async fn a_failed_trial_opens_again_and_an_abandoned_one_does_not() {
    let Fleet { mocks: [mut a, _b], gateway, client } = fleet(QUICK).await;
    a.behave("plain 502");
    for _ in 0..4 {
        client.post(CHAT, "{}").await;
    }
    until_shown(&gateway, "pod-a", |pod| pod["breaker"]["state"] == "half open").await;
    drained(&mut a);
    a.behave("hang");
    let ask = async || loop {
        client.post(CHAT, "{}").await;
    };
    tokio::select! {
        () = ask() => {}
        _ = a.next() => {}
    }
    a.next_gone().await;
    settled(&gateway).await;
    assert_eq!(shown(&gateway, "pod-a").await["breaker"]["state"], "half open");
    a.behave("plain 502");
    while a.seen.try_recv().is_err() {
        client.post(CHAT, "{}").await;
    }
    until_shown(&gateway, "pod-a", |pod| pod["breaker"]["openings"] == 2).await;
    settled(&gateway).await;
}

/// A refusal of a request says nothing about the engine, however often it is repeated.
#[tokio::test]
async fn errors_of_requests_open_nothing() {
    let Fleet { mocks: [_a, _b], gateway, client } = fleet(QUICK_AND_LONG).await;
    for behaviour in ["500", "plain 500", "400", "422", "429", "503", "502", "plain 504"] {
        for _ in 0..6 {
            client.mock(CHAT, behaviour, "{}").await;
        }
        for pod in ["pod-a", "pod-b"] {
            let pod = shown(&gateway, pod).await;
            assert_eq!(pod["breaker"]["state"], "closed", "{behaviour}: {pod}");
            assert_eq!(pod["breaker"]["failures"], 0, "{behaviour}: {pod}");
        }
    }
    settled(&gateway).await;
}

/// A backend that answers everything with an error but passes its probes gets ten requests and then only trials.
#[tokio::test]
async fn a_backend_that_answers_nothing_well_loses_its_share() {
    for (behaviour, equal) in [("500", false), ("500", true), ("plain 500", false), ("503", false)] {
        let (mut a, b) = (canned(2), canned(2));
        let rules = "[breaker]\nopen_seconds = 3600\nlongest_seconds = 3600\n[retry]\nstatuses = [429]\n";
        let gateway = start(&format!("{rules}{}", several(&[&a, &b]))).await;
        a.behave(behaviour);
        let client = Client::data(&gateway);
        for number in 0..200 {
            let number = if equal { 0 } else { number };
            client.post(CHAT, format!("{{\"n\":{number}}}")).await;
        }
        // Both of its ranks may get a request before another backend shows that it can be answered.
        assert_eq!(drained(&mut a), 10 + usize::from(equal), "{behaviour} {equal}");
        let pod = shown(&gateway, "pod-a").await;
        assert_eq!((&pod["breaker"]["state"], &pod["healthy"]), (&"open".into(), &true.into()), "{behaviour}: {pod}");
        settled(&gateway).await;
    }
}

#[tokio::test]
async fn errors_open_it_again_until_the_model_runs() {
    let (mut a, b) = (canned(2), canned(2));
    let rules = "[breaker]\nerrors = 2\nopen_seconds = 0.05\nlongest_seconds = 0.1\ntrials = 1\npasses = 2\n";
    let gateway = start(&format!("{rules}{}", several(&[&a, &b]))).await;
    let client = Client::data(&gateway);
    a.behave("500");
    let mut number = 0;
    let mut ask = async || {
        number += 1;
        client.post(CHAT, format!("{{\"n\":{number}}}")).await
    };
    let mut until = async |wanted: &dyn Fn(&Value) -> bool| {
        let wait = async {
            while !wanted(&shown(&gateway, "pod-a").await["breaker"]) {
                ask().await;
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("the breaker is as wanted")
    };
    until(&|breaker| breaker["openings"].as_u64() >= Some(4)).await;
    assert!(drained(&mut a) <= 6, "two errors, and then one for each opening");
    a.behave("");
    until(&|breaker| breaker["state"] == "closed").await;
    settled(&gateway).await;
}

/// One bad request opens no breaker, however often it is sent while others' requests succeed, on the other backend or
/// on both.
#[tokio::test]
async fn one_poison_request_opens_nothing() {
    for others in [0, 1, 2, 3] {
        let Fleet { mocks: [a, b], gateway, .. } = fleet("[retry]\nstatuses = [500]\n").await;
        let plain = start(&several(&[&a, &b])).await;
        for gateway in [&gateway, &plain] {
            let client = Client::data(gateway);
            for number in 0..100 {
                assert_eq!(client.mock(CHAT, "500", "{\"poison\":1}").await.status, 500);
                for other in 0..others {
                    assert_eq!(client.post(CHAT, format!("{{\"n\":\"{number}.{other}\"}}")).await.status, 200);
                }
            }
            for pod in ["pod-a", "pod-b"] {
                let pod = shown(gateway, pod).await;
                assert_eq!(pod["breaker"]["state"], "closed", "{pod}");
                assert!(pod["breaker"]["errors"].as_u64().unwrap() <= 1, "{pod}");
            }
            settled(gateway).await;
        }
    }
}

/// An error that all backends give is no backend's fault.
#[tokio::test]
async fn errors_of_all_backends_open_nothing() {
    let Fleet { mocks: [a, b], gateway, client } = fleet(QUICK_AND_LONG).await;
    a.behave("500");
    b.behave("500");
    for number in 0..100 {
        assert_eq!(client.post(CHAT, format!("{{\"n\":{number}}}")).await.status, 500);
    }
    for pod in ["pod-a", "pod-b"] {
        assert_eq!(shown(&gateway, pod).await["breaker"]["state"], "closed");
    }
    settled(&gateway).await;
}

#[tokio::test]
async fn the_last_backend_of_a_model_is_spared() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet(QUICK_AND_LONG).await;
    a.behave("plain 503");
    b.behave("plain 503");
    for _ in 0..10 {
        assert_eq!(client.post(CHAT, "{}").await.status, 503);
    }
    let spared =
        async |pod| metric(&gateway, &format!("semmoe_breaker_changes_total{{backend=\"{pod}\",to=\"spared\"}}")).await;
    assert!(spared("pod-a").await + spared("pod-b").await >= 1.0);
    let seen = (drained(&mut a), drained(&mut b));
    assert!(seen.0.max(seen.1) == 10, "each request reached one that is not open: {seen:?}");
    // The backend with the open breaker serves again when the other one dies.
    let open = if shown(&gateway, "pod-a").await["breaker"]["state"] == "open" { "pod-a" } else { "pod-b" };
    let (open_mock, other) = if open == "pod-a" { (&mut a, &mut b) } else { (&mut b, &mut a) };
    assert_eq!(shown(&gateway, open).await["breaker"]["state"], "open");
    open_mock.behave("");
    other.kill();
    until_shown(&gateway, open, |pod| pod["breaker"]["state"] == "closed").await;
    let answer = client.post(CHAT, "{}").await;
    assert_eq!((answer.status, answer.header("x-semmoe-backend")), (200, open));
    settled(&gateway).await;
}

/// A stream that breaks off midway is a failure too, although its head was good.
#[tokio::test]
async fn broken_streams_open_a_breaker() {
    for (broken, whole) in [("die-inside", "stream"), ("die-json", "")] {
        let Fleet { mocks: [a, b], gateway, client } = fleet(QUICK_AND_LONG).await;
        a.release(100);
        b.release(100);
        a.behave(broken);
        b.behave(whole);
        for _ in 0..8 {
            let _ = client.open(Method::POST, CHAT, &[], "{}").await.into_body().collect().await;
        }
        until_shown(&gateway, "pod-a", |pod| pod["breaker"]["state"] == "open").await;
        assert_eq!(shown(&gateway, "pod-b").await["breaker"]["failures"], 0);
        settled(&gateway).await;
    }
}

#[tokio::test]
async fn an_engine_that_asks_for_rest_gets_it_while_others_can_serve() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet("").await;
    a.behave("overloaded");
    for _ in 0..8 {
        assert_eq!(client.post(CHAT, "{}").await.header("x-semmoe-backend"), "pod-b");
    }
    assert_eq!((drained(&mut a), drained(&mut b)), (1, 8));
    Client::admin(&gateway).post("/admin/backends/pod-b/drain", "").await;
    let answer = client.post(CHAT, "{}").await;
    assert_eq!((answer.status, answer.header("x-semmoe-backend"), answer.header("retry-after")), (503, "pod-a", "30"));
    settled(&gateway).await;
}

/// A retry finds only half-open backends without a free trial: it goes to one of them rather than fail.
#[tokio::test]
async fn a_backend_on_trial_is_better_than_none() {
    let Fleet { mocks: [mut a, mut b], gateway, client } = fleet(QUICK).await;
    a.behave("plain 503");
    for _ in 0..4 {
        client.post(CHAT, "{}").await;
    }
    until_shown(&gateway, "pod-a", |pod| pod["breaker"]["state"] == "half open").await;
    drained(&mut a);
    drained(&mut b);
    a.behave("late");
    let ask = || client.begin(CHAT, "{}");
    // The one trial that is allowed; the others go elsewhere.
    let mut calls: Vec<_> = (0..4).map(|_| ask()).collect();
    a.next().await;
    for _ in 0..3 {
        b.next().await;
    }
    b.behave("503");
    calls.push(ask());
    b.next().await;
    a.next().await;
    a.release(9);
    for call in calls {
        let answer = tokio::time::timeout(PATIENCE, call).await.expect("an answer in time");
        assert_eq!(answer.unwrap().status, 200);
    }
    settled(&gateway).await;
}
