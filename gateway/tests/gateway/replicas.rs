//! Two gateways in front of shared engines, without communication between them: ranks stay even enough, and nothing is
//! lost.

use std::collections::BTreeMap;

use http::Method;
use semmoe_gateway::Running;
use serde_json::json;

use crate::support::files::model;
use crate::support::{Client, Fixture, Mock, canned, canned_as, in_flight, rest_of, settled, start};

/// Requests per rank that one mock saw since the last call, by pin.
fn by_rank(mock: &mut Mock) -> BTreeMap<u64, u64> {
    let mut ranks = BTreeMap::new();
    while let Ok(request) = mock.seen.try_recv() {
        let pin = request.header_pin().map_or_else(|| request.json()["routed_dp_rank"].as_u64().unwrap(), u64::from);
        *ranks.entry(pin).or_default() += 1;
    }
    ranks
}

async fn send_all(gateway: &Running, body: impl Fn(usize) -> String, requests: usize) {
    let sends = (0..4).map(|client| {
        let http = Client::data(gateway);
        let bodies: Vec<String> = (client..requests).step_by(4).map(&body).collect();
        tokio::spawn(async move {
            for body in bodies {
                let answer = http.post("/generate", body).await;
                assert_eq!(answer.status, 200, "{answer:?}");
            }
        })
    });
    for send in sends.collect::<Vec<_>>() {
        send.await.unwrap();
    }
}

#[tokio::test]
async fn every_policy_keeps_ranks_even() {
    let texts = ["river water boat fish", "king queen castle sword", "sun moon star sky", "bread milk salt oil"];
    let fixture = Fixture::new(4);
    let mut mock = canned_as(fixture.info());
    let tables = fixture.write("t", &texts, 0);
    let affinity = fixture.balanced(&mock.url(), &tables);
    for policy in ["affinity", "round_robin", "least_load", "power_of_two"] {
        let toml = affinity.replace("name = \"tiny\"\n", &format!("name = \"tiny\"\npolicy = \"{policy}\"\n"));
        let gateways = [start(&toml).await, start(&toml).await];
        // Three in four prefer one rank.
        let body =
            |number: usize| json!({ "text": texts[if number % 4 == 3 { number / 4 % 4 } else { 0 }] }).to_string();
        tokio::join!(send_all(&gateways[0], body, 200), send_all(&gateways[1], body, 200));
        let ranks = by_rank(&mut mock);
        assert_eq!(ranks.values().sum::<u64>(), 400, "{policy}: {ranks:?}");
        let most = ranks.values().max().unwrap();
        assert!(ranks.len() == 4 && *most <= 150, "{policy}: {ranks:?}");
        for gateway in &gateways {
            settled(gateway).await;
        }
    }
}

/// Each gateway counts only its own requests; together they are still even. When one stops, the other continues.
#[tokio::test]
async fn running_requests_are_even_and_outlive_the_other_gateway() {
    let mut mock = canned(4);
    let toml = model("tiny", "", &[("pod-a", &mock.url(), 4)]).replace("round_robin", "least_load");
    let (first, second) = (start(&toml).await, start(&toml).await);
    let mut streams = Vec::new();
    for number in 0..40 {
        let client = Client::data(if number % 2 == 0 { &first } else { &second });
        streams.push(client.open(Method::POST, "/generate", &[("x-mock", "stream")], r#"{"text":"x"}"#).await);
    }
    assert_eq!((in_flight(&first).await, in_flight(&second).await), ((20, 20.0), (20, 20.0)));
    let ranks = by_rank(&mut mock);
    assert!(ranks.len() == 4 && ranks.values().all(|requests| (9..=11).contains(requests)), "{ranks:?}");
    mock.release(3 * streams.len());
    let ended = tokio::spawn(first.shutdown(crate::support::PATIENCE));
    for mut stream in streams {
        let last = rest_of(&mut stream).await;
        assert!(last.ends_with("data: [DONE]\n\n"), "{last:?}");
    }
    ended.await.unwrap();
    settled(&second).await;
    let answer = Client::data(&second).post("/generate", r#"{"text":"x"}"#).await;
    assert_eq!(answer.status, 200);
}
