//! Which rank a request goes to.

use semmoe_tables::{Tables, export};
use serde_json::{Value, json};

use crate::support::{Affine, Client, Fixture, Fleet, affine, alone, canned_as, metric, settled, start, until_shown};

const TEXTS: [&str; 4] =
    ["river water boat fish", "king queen castle sword", "bread butter cheese milk", "snow winter ice cold"];

#[tokio::test]
async fn affinity_takes_the_rank_that_the_tables_name() {
    let Affine { mut mock, gateway, client, fixture: _fixture, .. } = affine(4, &TEXTS, "").await;
    for _ in 0..3 {
        for (text, rank) in TEXTS.iter().zip(0u16..) {
            let chat = json!({ "model": "tiny", "messages": [{ "role": "user", "content": text }] });
            for (path, body) in [
                ("/v1/completions", json!({ "prompt": text })),
                ("/v1/completions", json!({ "prompt": [text, text] })),
                ("/v1/chat/completions", chat),
                ("/generate", json!({ "text": text })),
                ("/generate", json!({ "input_ids": crate::support::tokenizer().encode(text).unwrap() })),
            ] {
                let answer = client.post(path, body.to_string()).await;
                assert_eq!(answer.header("x-semmoe-rank"), rank.to_string(), "{path}: {text}");
                assert_eq!(answer.header("x-semmoe-policy"), "affinity");
                let seen = mock.next().await;
                let pinned = seen.header_pin().map_or_else(|| seen.json()["routed_dp_rank"].clone(), Value::from);
                assert_eq!(pinned, rank, "{path}");
            }
        }
    }
    assert_eq!(metric(&gateway, "semmoe_predicted_lar_count{policy=\"affinity\"}").await, 60.0);
    let mean = metric(&gateway, "semmoe_predicted_lar_sum{policy=\"affinity\"}").await / 60.0;
    assert!((0.3..=0.91).contains(&mean), "{mean}");
    assert_eq!(metric(&gateway, "semmoe_gateway_overhead_seconds_count").await, 60.0);
    settled(&gateway).await;
}

/// For example 256 experts and 32 redundant slots on 72 ranks or on 144.
#[tokio::test]
async fn ranks_may_divide_experts_and_redundant_slots_in_place_of_experts() {
    for (experts, ranks) in [(32, 5), (256, 72), (256, 144)] {
        let mut fixture = Fixture::new(ranks);
        fixture.model.num_experts = experts;
        let tables = fixture.write("t", &TEXTS, 0);
        let map = fixture.folder.path().join("e.json");
        std::fs::write(&map, export::sglang(&Tables::open(&tables).unwrap()).unwrap()).unwrap();
        let sglang = json!({ "version": "0.5.23", "dp_size": ranks, "ep_size": ranks, "init_expert_location": map });
        for (engine, info) in [("semmoe", fixture.info()), ("sglang", sglang)] {
            let mock = canned_as(info);
            let toml = fixture.affinity(&mock.url(), &tables).replace("\"semmoe\"", &format!("{engine:?}"));
            let gateway = start(&toml).await;
            let found = until_shown(&gateway, "pod-a", |found| found["healthy"] == true).await;
            assert_eq!((&found["by_load"], found["placement_by"].as_str()), (&Value::Null, Some("engine")), "{found}");
            for (text, rank) in TEXTS.iter().zip(0u16..) {
                let answer = Client::data(&gateway).post("/generate", json!({ "text": text }).to_string()).await;
                assert_eq!(answer.header("x-semmoe-rank"), rank.to_string(), "{engine} {ranks}: {text}");
            }
        }
    }
}

/// Long prompts are scored on other threads, with equal results.
#[tokio::test]
async fn long_prompts_go_the_same_way() {
    let Affine { mut mock, gateway, fixture: _fixture, .. } = affine(4, &TEXTS, "").await;
    for (text, rank) in TEXTS.iter().zip(0u16..) {
        let body = json!({ "text": format!("{text} ").repeat(2000) }).to_string();
        Client::data(&gateway).post("/generate", body).await;
        assert_eq!(mock.next().await.json()["routed_dp_rank"], rank);
    }
}

#[tokio::test]
async fn round_robin_is_even() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(4, "").await;
    let mut counts = [0; 4];
    for _ in 0..40 {
        client.post("/v1/completions", r#"{"prompt":"a"}"#).await;
        counts[usize::from(mock.next().await.header_pin().unwrap())] += 1;
    }
    assert_eq!(counts, [10; 4]);
    let line = "semmoe_requests_total{backend=\"pod-a\",model=\"tiny\",rank=\"3\",policy=\"round_robin\",code=\"200\"}";
    assert_eq!(metric(&gateway, line).await, 10.0);
}

/// Many concurrent requests: every rank receives its share, and nothing is left behind.
#[tokio::test]
async fn concurrent_requests_are_spread_and_counted() {
    let fixture = Fixture::new(4);
    let mut mock = canned_as(fixture.info());
    let tables = fixture.write("t", &TEXTS, 0);
    let gateway = start(&fixture.balanced(&mock.url(), &tables)).await;
    let client = Client::data(&gateway);
    // All prefer rank 0, so the cap must send most of them elsewhere.
    let calls = (0..200).map(|_| {
        let client = client.clone();
        tokio::spawn(
            async move { client.post("/v1/completions", json!({ "prompt": TEXTS[0] }).to_string()).await.status },
        )
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap(), 200);
    }
    let mut counts = [0; 4];
    for _ in 0..200 {
        counts[usize::from(mock.next().await.header_pin().unwrap())] += 1;
    }
    assert!(counts.iter().all(|count| (30..=90).contains(count)), "{counts:?}");
    settled(&gateway).await;
}
