//! Engines of several dialects behind the gateway: how requests are pinned, and whether the pins are trusted.

use semmoe_gateway::{Gateway, Running};
use semmoe_mock_engine::VLLM_0_32;
use serde_json::{Value, json};

use crate::support::{Client, Fixture, Mock, config, metric, ran, ranked, sglang, shown, start, vllm};

const TEXTS: [&str; 4] =
    ["river water boat fish", "king queen castle sword", "bread butter cheese milk", "snow winter ice cold"];
const COMPLETIONS: &str = "/v1/completions";

/// A gateway with affinity over one backend.
async fn affinity(fixture: &Fixture, engine: &str, mock: &Mock) -> Running {
    let tables = fixture.write("t", &TEXTS[..usize::from(fixture.ranks)], 0);
    let toml = fixture.affinity(&mock.url(), &tables).replace("\"semmoe\"", &format!("\"{engine}\""));
    start(&toml).await
}

async fn pins(gateway: &Running) -> Value {
    Client::admin(gateway).get("/admin/backends").await.json()["backends"][0]["pins"].clone()
}

/// Sends the first text until the pins are declared ignored; returns how many requests that took.
async fn until_ignored(gateway: &Running, path: &str) -> usize {
    let body = json!({ "text": TEXTS[0], "prompt": TEXTS[0] }).to_string();
    for sent in 1..=100 {
        assert_eq!(Client::data(gateway).post(path, body.clone()).await.status, 200);
        if pins(gateway).await["state"] == "pin ignored" {
            return sent;
        }
    }
    panic!("not found within 100 requests: {}", pins(gateway).await)
}

async fn check_fallback(gateway: &Running, mock: &Mock, path: &str) {
    let body = json!({ "text": TEXTS[0], "prompt": TEXTS[0] }).to_string();
    ran(mock);
    let answer = Client::data(gateway).post(path, body).await;
    assert_eq!((answer.header("x-semmoe-policy"), answer.header("x-semmoe-rank")), ("least_load", ""));
    assert!(metric(gateway, "semmoe_pin_ignored_total{backend=\"pod-a\"}").await >= 3.0);
    assert_eq!(metric(gateway, "semmoe_backend_pins_ignored{backend=\"pod-a\"}").await, 1.0);
    let line =
        "semmoe_requests_total{backend=\"pod-a\",model=\"tiny\",rank=\"any\",policy=\"least_load\",code=\"200\"}";
    assert!(metric(gateway, line).await >= 1.0);
}

#[tokio::test]
async fn an_engine_that_ignores_pins_is_found_by_its_answers_and_comes_back() {
    let fixture = Fixture::new(2);
    let mock = sglang(&fixture);
    let gateway = affinity(&fixture, "sglang", &mock).await;
    let body = json!({ "text": TEXTS[1] }).to_string();
    assert_eq!(pins(&gateway).await["state"], "honoured", "verified before the first request");
    for _ in 0..8 {
        let answer = Client::data(&gateway).post("/generate", body.clone()).await;
        assert_eq!((answer.header("x-semmoe-policy"), answer.header("x-semmoe-rank")), ("affinity", "1"));
    }
    let verified = pins(&gateway).await;
    // On a busy machine probes may follow the last answer.
    let evidence = [&json!("answers"), &json!("probes")];
    assert!(evidence.contains(&&verified["evidence"]) && verified["contradicted"] == 0, "{verified}");
    assert_eq!(ran(&mock), [1; 8]);

    mock.settings().ignores_pins = true;
    let sent = until_ignored(&gateway, "/generate").await;
    assert!(sent <= 20, "{sent}");
    let detail = pins(&gateway).await["detail"].as_str().unwrap().to_owned();
    // Probes run alongside requests, and may have found it last, on either rank.
    let named = [
        "a response to a request pinned to rank 0 named rank 1",
        "ran elsewhere; one pinned to rank 0 ran on rank 1",
        "ran elsewhere; one pinned to rank 1 ran on rank 0",
    ];
    assert!(named.iter().any(|named| detail.ends_with(named)), "{detail}");
    check_fallback(&gateway, &mock, "/generate").await;

    mock.settings().ignores_pins = false;
    for _ in 0..32 {
        Client::data(&gateway).post("/generate", body.clone()).await;
    }
    let answer = Client::data(&gateway).post("/generate", body).await;
    assert_eq!((answer.header("x-semmoe-policy"), answer.header("x-semmoe-rank")), ("affinity", "1"));
    // Probes reach this conclusion on the other routes.
    let began = std::time::Instant::now();
    while metric(&gateway, "semmoe_backend_pins_ignored{backend=\"pod-a\"}").await > 0.0 {
        assert!(began.elapsed() < crate::support::PATIENCE, "{}", pins(&gateway).await);
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// Answers of the OpenAI routes name no rank, but probes reveal it: for SGLang by their answers, for vLLM by its
/// counters.
#[tokio::test]
async fn engines_that_ignore_pins_are_found_by_probes_before_the_first_request() {
    let fixture = Fixture::new(4);
    for (engine, mock, evidence) in [("sglang", sglang(&fixture), "probes"), ("vllm", vllm(&fixture), "counters")] {
        mock.settings().ignores_pins = true;
        let gateway = affinity(&fixture, engine, &mock).await;
        let found = pins(&gateway).await;
        assert_eq!((&found["state"], &found["evidence"]), (&json!("pin ignored"), &json!(evidence)), "{found}");
        check_fallback(&gateway, &mock, COMPLETIONS).await;
    }
}

/// Rounds triggered by requests detect pins that are ignored from a later moment on.
#[tokio::test]
async fn engines_that_begin_to_ignore_pins_are_found_on_chats_alone() {
    let fixture = Fixture::new(4);
    for (engine, mock) in [("sglang", sglang(&fixture)), ("vllm", vllm(&fixture))] {
        let gateway = affinity(&fixture, engine, &mock).await;
        for text in TEXTS.iter().cycle().take(24) {
            let answer = Client::data(&gateway).post(COMPLETIONS, json!({ "prompt": text }).to_string()).await;
            assert_eq!(answer.header("x-semmoe-policy"), "affinity");
        }
        assert_eq!(ran(&mock), [0, 1, 2, 3].repeat(6));
        let honoured = pins(&gateway).await;
        assert_eq!((&honoured["state"], &honoured["contradicted"]), (&json!("honoured"), &json!(0)), "{honoured}");
        mock.settings().ignores_pins = true;
        for _ in 0..100 {
            Client::data(&gateway).post(COMPLETIONS, json!({ "prompt": TEXTS[0] }).to_string()).await;
        }
        let patience = std::time::Instant::now();
        while pins(&gateway).await["state"] != "pin ignored" {
            assert!(patience.elapsed() < crate::support::PATIENCE, "{}", pins(&gateway).await);
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }
}

/// A vLLM that serves ranks 4 to 7, under either numbering: the right rank, and never an error.
#[tokio::test]
async fn node_local_and_global_ranks_are_distinguished() {
    let fixture = Fixture::new(4);
    for first_in_pins in [0, 4] {
        let mock = vllm(&fixture);
        (mock.settings().first_rank, mock.settings().first_pin) = (4, first_in_pins);
        let gateway = affinity(&fixture, "vllm", &mock).await;
        ran(&mock);
        for (text, rank) in TEXTS.iter().zip(0..) {
            let answer = Client::data(&gateway).post(COMPLETIONS, json!({ "prompt": text }).to_string()).await;
            assert_eq!((answer.status, answer.header("x-semmoe-rank")), (200, rank.to_string().as_str()));
            assert_eq!(ran(&mock), [rank]);
        }
        let shown = Client::admin(&gateway).get("/admin/backends").await.json();
        assert_eq!(shown["backends"][0]["version"], "0.32.0");
        assert_eq!(shown["backends"][0]["placement_by"], "tables");
    }
}

#[tokio::test]
async fn several_urls_are_ranks() {
    let fixture = Fixture::new(2);
    for engine in ["openai", "vllm"] {
        let mocks = [0, 1]
            .map(|first| ranked(&fixture, VLLM_0_32, |settings| (settings.ranks, settings.first_rank) = (1, first)));
        let tables = fixture.write("t", &TEXTS[..2], 0);
        let one = format!("url = \"{}\"", mocks[0].url());
        let both = format!("urls = [\"{}\", \"{}\"]", mocks[0].url(), mocks[1].url());
        let toml = fixture.affinity(&mocks[0].url(), &tables).replace(&one, &both);
        let gateway = start(&toml.replace("\"semmoe\"", &format!("\"{engine}\""))).await;
        for (text, rank) in TEXTS[..2].iter().zip(0usize..) {
            let answer = Client::data(&gateway).post(COMPLETIONS, json!({ "prompt": text }).to_string()).await;
            assert_eq!((answer.status, answer.header("x-semmoe-rank")), (200, rank.to_string().as_str()));
            assert_eq!((ran(&mocks[rank]).len(), ran(&mocks[1 - rank]).len()), (1, 0));
        }
        assert_eq!(pins(&gateway).await["state"], "by url");
    }
}

/// The older field on the OpenAI routes, no pin if the version reads none, and never an `x-semmoe-rank` for it.
#[tokio::test]
async fn older_sglang_gets_what_it_reads() {
    for (version, path, body, header) in [
        ("0.5.9", "/v1/chat/completions", r#"{"data_parallel_rank":0,"a":1}"#, None),
        ("0.5.9", "/generate", r#"{"data_parallel_rank":0,"a":1}"#, None),
        ("0.5.10", "/v1/chat/completions", r#"{"a":1}"#, Some(0)),
        ("0.5.10", "/v1/responses", r#"{"a":1}"#, None),
        ("0.5.7", "/v1/chat/completions", r#"{"a":1}"#, None),
        ("0.5.23", "/v1/responses", r#"{"a":1}"#, Some(0)),
    ] {
        let info = json!({ "model_path": "/models/tiny", "version": version, "dp_size": 2 });
        let mut mock = crate::support::canned_as(info);
        let gateway = start(&crate::support::plain_model(&mock, 2)).await;
        let headers = [("x-override-routed-dp-rank", "1")];
        let sent = r#"{"routed_dp_rank":1,"a":1,"data_parallel_rank":1}"#;
        let answer = Client::data(&gateway).call(http::Method::POST, path, &headers, sent).await;
        let seen = mock.next().await;
        assert_eq!((&seen.body[..], seen.header_pin()), (body.as_bytes(), header), "{version} {path}");
        assert!(!seen.headers.contains_key("x-override-routed-dp-rank"));
        let pinned = header.is_some() || body.contains("rank");
        assert_eq!(answer.header("x-semmoe-rank"), if pinned { "0" } else { "" }, "{version} {path}");
    }
}

#[tokio::test]
async fn placements_that_show_or_are_declared_are_compared() {
    let fixture = Fixture::new(2);
    let tables = fixture.write("t", &[], 0);
    let digest = fixture.placement_digest();
    let other = "0".repeat(64);
    // The fixture's placement is contiguous; this one swaps the halves of layer 3.
    let mut rows: Vec<Vec<i32>> = vec![(0..32).collect(); 7];
    rows[3].rotate_left(16);
    let swapped = json!({ "physical_to_logical_map": rows }).to_string();
    for (location, eplb, declared, says) in [
        ("trivial", false, None, ("engine", "")),
        (swapped.as_str(), false, None, ("engine", "group 0 of layer 3 has experts [16, 17, ")),
        (
            "/maps/e.json",
            false,
            None,
            ("unknown", "placement unproven: init_expert_location names '/maps/e.json', which"),
        ),
        ("/maps/e.json", false, Some(&digest), ("configuration", "")),
        (
            "/maps/e.json",
            false,
            Some(&other),
            ("configuration", "but `placement_digest` says that the backend runs 0000"),
        ),
        ("trivial", true, None, ("engine", "EPLB enabled (enable_eplb), which moves experts away")),
    ] {
        let info = json!({
            "model_path": "/models/x", "version": "0.5.23", "dp_size": 2, "ep_size": 2,
            "enable_eplb": eplb, "init_expert_location": location,
        });
        let mock = sglang(&fixture);
        mock.settings().info = Some(info);
        let mut toml = fixture.affinity(&mock.url(), &tables).replace("\"semmoe\"", "\"sglang\"");
        if let Some(declared) = declared {
            toml.push_str(&format!("placement_digest = \"{declared}\"\n"));
        }
        let gateway = Gateway::start(config(&toml)).await.unwrap();
        let shown = shown(&gateway, "pod-a").await;
        let ((source, says), detail) = (says, shown["by_load"]["detail"].as_str().unwrap_or_default());
        assert_eq!(shown["placement_by"], source);
        assert!(detail.contains(says) && detail.is_empty() == says.is_empty(), "expected '{says}' in '{detail}'");
    }
}
