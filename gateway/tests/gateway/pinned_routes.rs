//! Pins depend on engine, version and route, and nothing is pinned to a rank that an engine does not have.

use semmoe_gateway::Running;
use semmoe_mock_engine::{SGLANG_0_5_23, VLLM_0_32};
use serde_json::{Value, json};

use crate::support::{
    Client, Fixture, Mock, PATIENCE, canned_as, in_flight, metric, metrics, ran, ranked, sent_pins, settled, sglang,
    shown, start, until_shown, vllm,
};

const TEXTS: [&str; 2] = ["river water boat fish", "king queen castle sword"];
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const GENERATE: &str = "/generate";

async fn gateway(fixture: &Fixture, engine: &str, mock: &Mock) -> Running {
    let tables = fixture.write("t", &TEXTS, 0);
    let toml = fixture.affinity(&mock.url(), &tables).replace("\"semmoe\"", &format!("\"{engine}\""));
    start(&format!("identity_seconds = 0.05\n{toml}")).await
}

fn body(path: &str, text: &str) -> String {
    let messages = json!([{ "role": "user", "content": text }]);
    let body = match path {
        CHAT => json!({ "model": "tiny", "messages": messages }),
        RESPONSES => json!({ "model": "tiny", "input": text }),
        GENERATE => json!({ "text": text }),
        _ => json!({ "model": "tiny", "prompt": text }),
    };
    body.to_string()
}

/// Changes to another version, which reads pins on these paths.
fn upgrade(mock: &Mock, version: &str, reads: &[&'static str]) {
    let mut settings = mock.settings();
    (settings.version, settings.pinned_routes) = (version.to_owned(), Some(reads.to_vec()));
}

/// A route's pins, as the admin plane shows them.
fn route(shown: &Value, path: &str) -> Value {
    let found = shown["pins"]["routes"].as_array().unwrap().iter().find(|route| route["route"] == path);
    found.unwrap_or_else(|| panic!("no {path} in {shown}")).clone()
}

async fn until_pinned(gateway: &Running, path: &str, pinned: bool) -> Value {
    let proved = |shown: &Value| {
        let route = route(shown, path);
        route["pinned"] == pinned && route["state"] == if pinned { "honoured" } else { "pin ignored" }
    };
    route(&until_shown(gateway, "pod-a", proved).await, path)
}

/// Sends both texts; returns policies, ranks named by the answers, and ranks that the engine ran them on.
async fn send(gateway: &Running, mock: &Mock, path: &str) -> Vec<(String, String, u16)> {
    let mut seen = Vec::new();
    for text in TEXTS.iter().cycle().take(6) {
        ran(mock);
        let answer = Client::data(gateway).post(path, body(path, text)).await;
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        let header = |name| answer.header(name).to_owned();
        seen.push((header("x-semmoe-policy"), header("x-semmoe-rank"), ran(mock)[0]));
    }
    seen
}

async fn check_pinned(gateway: &Running, mock: &Mock, path: &str) {
    // Prompts of responses are not read.
    let placed_by = if path == RESPONSES { "least_load" } else { "affinity" };
    for (policy, rank, ran) in send(gateway, mock, path).await {
        assert_eq!((policy.as_str(), rank), (placed_by, ran.to_string()), "{path}");
    }
}

/// A request that the engine places itself names no rank anywhere, and carries none.
async fn check_unpinned(gateway: &Running, mock: &mut Mock, path: &str) {
    let any = "semmoe_requests_total{backend=\"pod-a\",model=\"tiny\",rank=\"any\",policy=\"least_load\",code=\"200\"}";
    let (before, predicted) = (metric(gateway, any).await, predictions(gateway).await);
    sent_pins(mock);
    for (policy, rank, _) in send(gateway, mock, path).await {
        assert_eq!((policy.as_str(), rank.as_str()), ("least_load", ""), "{path}");
    }
    assert_eq!((metric(gateway, any).await - before, predictions(gateway).await), (6.0, predicted), "{path}");
    assert_eq!(sent_pins(mock), [None; 6], "{path}");
}

async fn predictions(gateway: &Running) -> String {
    metrics(gateway).await.lines().filter(|line| line.contains("semmoe_predicted_")).collect::<Vec<_>>().join("\n")
}

/// vLLM 0.30 and 0.32 read no pin on `/v1/responses`.
#[tokio::test]
async fn responses_of_vllm_carry_no_rank() {
    let fixture = Fixture::new(2);
    let mut mock = vllm(&fixture);
    let gateway = gateway(&fixture, "vllm", &mock).await;
    check_unpinned(&gateway, &mut mock, RESPONSES).await;
    check_pinned(&gateway, &mock, CHAT).await;
    let responses = until_pinned(&gateway, RESPONSES, false).await;
    assert!(responses["contradicted"].as_u64().unwrap() >= 3, "{responses}");
    let pins = shown(&gateway, "pod-a").await["pins"].clone();
    assert_eq!((&pins["state"], &pins["contradicted"]), (&json!("honoured"), &json!(0)), "{pins}");
    assert_eq!(metric(&gateway, "semmoe_backend_pins_ignored{backend=\"pod-a\"}").await, 0.0);
    assert_eq!(metric(&gateway, "semmoe_pin_ignored_total{backend=\"pod-a\"}").await, 0.0);
    settled(&gateway).await;
}

/// An unknown version is pinned where probes prove it; if the version changes in place, so do its pins.
#[tokio::test]
async fn unknown_versions_are_pinned_where_probes_prove_it() {
    let fixture = Fixture::new(2);
    let mut mock = vllm(&fixture);
    upgrade(&mock, "9.9.9", &[COMPLETIONS, RESPONSES]);
    let gateway = gateway(&fixture, "vllm", &mock).await;
    until_pinned(&gateway, RESPONSES, true).await;
    until_pinned(&gateway, CHAT, false).await;
    check_pinned(&gateway, &mock, RESPONSES).await;
    check_pinned(&gateway, &mock, COMPLETIONS).await;
    check_unpinned(&gateway, &mut mock, CHAT).await;
    assert_eq!(shown(&gateway, "pod-a").await["pins"]["state"], "pin ignored");
    for (version, reads, pinned) in [
        ("9.9.10", [CHAT, COMPLETIONS].as_slice(), [true, false]),
        ("9.9.11", &[CHAT, RESPONSES], [true, true]),
        ("9.9.12", &[RESPONSES], [false, true]),
    ] {
        upgrade(&mock, version, reads);
        until_shown(&gateway, "pod-a", |shown| shown["version"] == version).await;
        for (path, pinned) in [CHAT, RESPONSES].into_iter().zip(pinned) {
            until_pinned(&gateway, path, pinned).await;
            if pinned {
                check_pinned(&gateway, &mock, path).await;
            } else {
                check_unpinned(&gateway, &mut mock, path).await;
            }
        }
    }
    settled(&gateway).await;
}

/// SGLang 0.5.23 names no rank in answers on these routes; probes must have a form that it accepts, or nothing runs.
#[tokio::test]
async fn sglang_takes_the_probes_of_all_routes() {
    let fixture = Fixture::new(2);
    let mock = sglang(&fixture);
    let gateway = gateway(&fixture, "sglang", &mock).await;
    for path in [COMPLETIONS, RESPONSES] {
        let probed = |shown: &Value| route(shown, path)["detail"].is_string();
        let found = route(&until_shown(&gateway, "pod-a", probed).await, path);
        assert_eq!(found["detail"], "this engine version does not report which rank ran a request", "{found}");
    }
}

/// While such a request runs, it counts on no rank.
#[tokio::test]
async fn a_request_that_is_not_pinned_is_in_no_ranks_account() {
    let mut mock = canned_as(json!({ "model_path": "/models/tiny", "version": "0.5.19", "dp_size": 2 }));
    let gateway = start(&crate::support::plain_model(&mock, 2)).await;
    let client = Client::data(&gateway);
    let call = client.begin_with(RESPONSES, "late", r#"{"input":"a"}"#);
    assert_eq!(mock.next().await.header_pin(), None);
    assert_eq!(in_flight(&gateway).await, (0, 1.0));
    assert_eq!(metric(&gateway, "semmoe_rank_inflight{backend=\"pod-a\",rank=\"any\"}").await, 1.0);
    assert_eq!(shown(&gateway, "pod-a").await["in_flight_requests"], 1);
    mock.release(1);
    assert_eq!(call.await.unwrap().status, 200);
    settled(&gateway).await;
}

/// An engine that lost a rank, or reports more than it has, costs no client a request: its refusal reveals it.
#[tokio::test]
async fn a_rank_that_is_refused_costs_no_request() {
    let fixture = Fixture::new(2);
    for (engine, path, stream) in
        [("vllm", CHAT, false), ("vllm", COMPLETIONS, true), ("sglang", CHAT, false), ("sglang", GENERATE, true)]
    {
        let mut mock = if engine == "vllm" { vllm(&fixture) } else { sglang(&fixture) };
        let gateway = gateway(&fixture, engine, &mock).await;
        let began = std::time::Instant::now();
        while route(&shown(&gateway, "pod-a").await, path)["state"] != "honoured" {
            assert!(began.elapsed() < PATIENCE);
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        mock.settings().real_ranks = Some(1);
        sent_pins(&mut mock);
        for number in 0..40 {
            let mut body: Value = serde_json::from_str(&body(path, TEXTS[1])).unwrap();
            body["stream"] = json!(stream);
            let answer = Client::data(&gateway).post(path, body.to_string()).await;
            assert_eq!(
                (answer.status, answer.header("x-semmoe-rank")),
                (200, ""),
                "{engine} {path} {number}: {answer:?}"
            );
            assert_eq!(answer.header("x-semmoe-policy"), "least_load");
            assert!(!String::from_utf8_lossy(&answer.body).contains("out of range"), "{answer:?}");
        }
        // One was refused and sent again, and no other was pinned.
        assert_eq!(sent_pins(&mut mock).iter().filter(|pin| pin.is_some()).count(), 1, "{engine} {path}");
        assert_eq!(ran(&mock), [0; 40]);
        let pins = shown(&gateway, "pod-a").await["pins"].clone();
        assert_eq!(pins["state"], "not pinned", "{pins}");
        assert!(pins["detail"].as_str().unwrap().contains("pinned to rank 1 and reports 1"), "{pins}");
        assert!(metric(&gateway, "semmoe_pins_refused_total{backend=\"pod-a\"}").await >= 1.0);
        let again = "semmoe_retries_total{cause=\"no_such_rank\",outcome=\"again\"}";
        assert_eq!(metric(&gateway, again).await, 1.0);
        settled(&gateway).await;
    }
}

/// `ranks` of the configuration is trusted only as far as the engine confirms it.
#[tokio::test]
async fn configured_ranks_are_pinned_where_the_engine_confirms_them() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &TEXTS, 0);
    let mut info = fixture.info();
    info["version"] = json!("0.5.23");
    for (name, dialect, reported, real, state) in [
        ("one rank, and it says so", VLLM_0_32, 1, 1, "not pinned"),
        ("no metrics, and it refuses other ranks", VLLM_0_32, 0, 2, "unverified"),
        ("no metrics, and it takes any pin", VLLM_0_32, 0, 0, "unverified"),
        ("two routes that contradict each other", SGLANG_0_5_23, 1, 1, "not pinned"),
    ] {
        let mut mock = ranked(&fixture, dialect, |settings| {
            (settings.info, settings.ranks, settings.real_ranks) = (Some(info.clone()), reported, Some(real));
        });
        let engine = dialect.engine;
        let toml = fixture.affinity(&mock.url(), &tables).replace("\"semmoe\"", &format!("\"{engine}\""));
        let gateway = start(&toml.replace("tables = ", "ranks = 2\ntables = ")).await;
        for number in 0..40 {
            let answer = Client::data(&gateway).post(CHAT, body(CHAT, TEXTS[number % 2])).await;
            let rank = if real == 2 { (number % 2).to_string() } else { String::new() };
            assert_eq!((answer.status, answer.header("x-semmoe-rank")), (200, rank.as_str()), "{name}: {answer:?}");
        }
        let sent = sent_pins(&mut mock);
        assert!(sent.iter().all(|pin| pin.is_some() == (real == 2)), "{name}: {sent:?}");
        let pins = shown(&gateway, "pod-a").await["pins"].clone();
        assert_eq!(pins["state"], state, "{name}: {pins}");
    }
}
