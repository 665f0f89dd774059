//! Who may join a unit, and who may change how it works.

use std::time::Duration;

use crate::support::{Unit, config, greedy, loopback, refused_unit};
use http::HeaderValue;
use http_body_util::BodyExt as _;
use semmoe_worker::{Secret, run};
use serde_json::{Value, json};

fn secret(text: &str) -> Option<Secret> {
    Some(Secret::new(text.as_bytes()).unwrap())
}

/// The outcome of a rendezvous with enough time for rank 1: a machine may be busy, and rank 0 waits until its time is
/// up.
fn within(meeting: impl Fn(Duration) -> Vec<(String, u8)>) -> Vec<(String, u8)> {
    let quick = meeting(Duration::from_secs(2));
    match quick[1].0.contains("could not be reached") {
        true => meeting(Duration::from_secs(60)),
        false => quick,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_with_one_secret_make_a_unit() {
    let unit = Unit::start_with(4, |config| config.secret = secret("one secret of many"));
    assert_eq!(unit.ok("/generate", &greedy(&json!([557, 1712, 298]), 2)).await["meta_info"]["completion_tokens"], 2);
    unit.end();
}

#[test]
fn a_rank_with_another_secret_or_none_is_turned_away() {
    let (ours, theirs) = ("one secret of many", "another secret here");
    let cases = [
        (secret(ours), secret(theirs), "rank 0 is not trusted: its secret differs from this rank's", true),
        (
            secret(ours),
            None,
            "rank 0 is not trusted: it requires a secret, but this rank was started without one",
            false,
        ),
        (
            None,
            secret(ours),
            "rank 0 is not trusted: it was started without a secret, but this rank requires one",
            false,
        ),
    ];
    let check = |(first, second, expected, proved): &(Option<Secret>, Option<Secret>, &str, bool)| {
        let outcome = within(|limit| {
            let outcome = refused_unit(2, |config| {
                config.rendezvous_timeout = limit;
                config.secret = if config.rank == 0 { first.clone() } else { second.clone() };
            });
            let seconds = limit.as_secs();
            assert!(outcome[0].0.starts_with(&format!("rank 1 did not register within {seconds} s")), "{outcome:?}");
            outcome
        });
        assert_eq!(outcome[1], ((*expected).to_owned(), 2));
        assert_eq!(
            outcome[0].0.contains("1 connections were rejected because they did not have"),
            *proved,
            "{outcome:?}"
        );
        assert!(!format!("{outcome:?}").contains(ours));
    };
    std::thread::scope(|scope| cases.iter().for_each(|case| drop(scope.spawn(|| check(case)))));
}

#[test]
fn every_rank_hears_why_a_unit_does_not_come_together() {
    let outcome = refused_unit(4, |config| {
        if config.rank == 2 {
            config.world = 8;
        }
    });
    for (message, code) in outcome {
        assert_eq!((&message[..], code), ("rank 2 was started for a world of 8, rank 0 4", 2));
    }
}

#[test]
fn beyond_loopback_nobody_joins_without_a_secret() {
    for rank in [0, 1] {
        for address in ["0.0.0.0:0", "192.0.2.1:7000", "[::]:0"] {
            let outcome = run(config(rank, 2, address.parse().unwrap())).unwrap_err();
            assert!(outcome.to_string().contains("is not a loopback address"), "{outcome}");
            assert_eq!(outcome.exit_code(), 2);
        }
        let mut beside = config(rank, 2, loopback());
        beside.data_address = Some("192.0.2.1".parse().unwrap());
        let outcome = run(beside).unwrap_err();
        assert!(outcome.to_string().starts_with("the data address 192.0.2.1 is not a loopback address"), "{outcome}");
    }
    let mut with_secret = config(0, 1, loopback());
    with_secret.secret = secret("one secret of many");
    assert!(!format!("{with_secret:?}").contains("one secret"));
}

async fn post(unit: &Unit, path: &str, headers: &[(&'static str, &str)]) -> (u16, Value) {
    let mut request = unit.post(path, b"");
    for (name, value) in headers {
        request.headers_mut().insert(*name, HeaderValue::from_str(value).unwrap());
    }
    let response = unit.client.send(request).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

#[tokio::test(flavor = "multi_thread")]
async fn admin_routes_ask_for_the_token_and_drain_refuses_new_work() {
    let unit = Unit::start_with(2, |config| config.admin_token = secret("an admin token of ours"));
    let prompt: Vec<u32> = (10..200).collect();
    unit.ok("/generate", &greedy(&json!(prompt), 1)).await;
    for path in ["/drain", "/flush_cache"] {
        assert_eq!(post(&unit, path, &[]).await.0, 401);
        assert_eq!(post(&unit, path, &[("authorization", "Bearer another token here")]).await.0, 401);
    }
    assert!(unit.metrics().await.sum("semmoe_kv_pages", &[("state", "cached")]) > 0);
    let token = [("authorization", "Bearer an admin token of ours")];
    assert_eq!(post(&unit, "/flush_cache", &token).await, (200, json!({"status": "ok", "cached_pages": 0})));
    assert_eq!(unit.ok("/generate", &greedy(&json!(prompt), 1)).await["meta_info"]["cached_tokens"], 0);

    assert_eq!(post(&unit, "/drain", &token).await, (200, json!({"status": "draining", "in_flight": 0})));
    let (status, _, answer) = unit.ask("/generate", &greedy(&json!(prompt), 1)).await;
    assert!(status == 503 && answer["error"]["message"] == "the server is shutting down", "{answer}");
    assert!(unit.client.get_text(&unit.url, "/health", &Default::default()).await.is_err());
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_token_only_this_machine_may() {
    let unit = Unit::start(1);
    assert_eq!(post(&unit, "/flush_cache", &[]).await.0, 200);
    assert_eq!(post(&unit, "/flush_cache", &[("host", "evil.example")]).await.0, 403);
    assert_eq!(post(&unit, "/flush_cache", &[("origin", "https://evil.example")]).await.0, 403);
    unit.stop(0);
}
