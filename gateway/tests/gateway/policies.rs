//! Policies beyond `affinity`: their inputs, their reports, and how a policy is tried before it is trusted.

use http::Method;
use serde_json::{Value, json};

use crate::support::{Client, Fixture, MODEL_DIR, Mock, canned, canned_as, metric, next_frame, settled, start};

const COMPLETIONS: &str = "/v1/completions";
const TEXTS: [&str; 2] = ["river water boat fish", "king queen castle sword"];

/// A model without tables over one backend.
fn model(mock: &Mock, engine: &str, policy: &str) -> String {
    format!(
        "[routing.settings]\nload_margin = 10.0\n[routing.prefix]\nblock_tokens = 16\n\
         [[models]]\nname = \"tiny\"\ntokenizer = \"{MODEL_DIR}/tokenizer.json\"\npolicy = \"{policy}\"\n\
         [[models.backends]]\nname = \"pod-a\"\nengine = \"{engine}\"\nurl = \"{}\"\nranks = 4\n",
        mock.url()
    )
}

/// The model of a fixture, with further keys.
fn with_tables(fixture: &Fixture, mock: &Mock, keys: &str) -> String {
    mock.settings().info = Some(fixture.info());
    let tables = fixture.write("t", &TEXTS, 0);
    fixture.affinity(&mock.url(), &tables).replace("name = \"tiny\"\n", &format!("name = \"tiny\"\n{keys}\n"))
}

async fn rank_of(client: &Client, text: &str) -> String {
    let answer = client.post("/v1/completions", json!({ "prompt": text }).to_string()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.header("x-semmoe-rank").to_owned()
}

#[tokio::test]
async fn prefix_returns_to_the_rank_that_has_the_prompt() {
    let mock = canned(4);
    let gateway = start(&model(&mock, "sglang", "prefix")).await;
    let client = Client::data(&gateway);
    let (a, b) = ("river water boat fish ".repeat(40), "king queen castle sword ".repeat(40));
    let (home_a, home_b) = (rank_of(&client, &a).await, rank_of(&client, &b).await);
    assert_ne!(home_a, home_b, "what was never seen goes to the lighter rank");
    for turn in 0..4 {
        let longer = |text: &str| format!("{text} and then {}", "more ".repeat(turn));
        assert_eq!(rank_of(&client, &longer(&a)).await, home_a);
        assert_eq!(rank_of(&client, &longer(&b)).await, home_b);
    }
    let shown = Client::admin(&gateway).get("/admin/routing").await.json();
    let table = &shown["models"][0]["prefix_table"];
    assert_eq!((&table["block_tokens"], &table["blocks_per_rank"]), (&json!(16), &json!(8192)));
    settled(&gateway).await;
}

/// With hybrid experts a group of the tables is a node of several ranks: its prompts stay on the node, spread by load.
#[tokio::test]
async fn prompts_go_to_the_node_of_their_experts() {
    let (fixture, mock) = (Fixture::new(2), canned(4));
    let text = with_tables(&fixture, &mock, "");
    let mut info = fixture.info();
    for (field, value) in [("dp_size", json!(4)), ("ep_size", json!(2)), ("experts", json!("hybrid:2x2:1"))] {
        info[field] = value;
    }
    mock.settings().info = Some(info);
    let gateway = start(&text).await;
    let client = Client::data(&gateway);
    for (node, text) in TEXTS[..2].iter().enumerate() {
        let mut ranks = Vec::new();
        for _ in 0..6 {
            ranks.push(rank_of(&client, text).await);
        }
        ranks.sort();
        ranks.dedup();
        assert_eq!(ranks, [(2 * node).to_string(), (2 * node + 1).to_string()], "{text}");
    }
    settled(&gateway).await;
}

/// A session's prompt may be shorter than a block of the prefix table.
#[tokio::test]
async fn a_session_keeps_its_rank_from_the_first_request_on() {
    let mock = canned(4);
    let gateway = start(&model(&mock, "sglang", "prefix")).await;
    let client = Client::data(&gateway);
    let body = json!({ "prompt": TEXTS[0] }).to_string();
    let ranks = async |headers: &[(&str, &str)]| {
        let mut ranks = Vec::new();
        for _ in 0..6 {
            let answer = client.call(Method::POST, COMPLETIONS, headers, body.clone()).await;
            ranks.push(answer.header("x-semmoe-rank").to_owned());
        }
        ranks.sort();
        ranks.dedup();
        ranks.len()
    };
    assert_eq!(ranks(&[]).await, 4);
    assert_eq!(ranks(&[("x-session-id", "alice")]).await, 1);
    settled(&gateway).await;
}

/// A prompt leaves the rank that caches it if too many sequences run there, and avoids long answers if its own may be
/// long.
#[tokio::test]
async fn sequences_and_answers_count() {
    let mock = canned(4);
    let gateway = start(&model(&mock, "sglang", "prefix")).await;
    let client = Client::data(&gateway);
    let stays = async |(route, prompt): (&str, &str), text: &str, held: Value, extra: Value| {
        let text = format!("{text} ").repeat(40);
        let home = rank_of(&client, &text).await;
        let body = |mut body: Value| {
            body[prompt] = json!(text);
            body.to_string()
        };
        let stream = client.open(Method::POST, route, &[("x-mock", "stream")], body(held)).await;
        assert_eq!(stream.headers()["x-semmoe-rank"], home.as_str());
        let answer = client.post(route, body(extra)).await;
        drop(stream);
        settled(&gateway).await;
        answer.header("x-semmoe-rank") == home
    };
    let (openai, sglang) = ((COMPLETIONS, "prompt"), ("/generate", "text"));
    assert!(stays(openai, "river water boat fish", json!({}), json!({})).await);
    assert!(!stays(openai, "king queen castle sword", json!({ "n": 9 }), json!({})).await);
    assert!(stays(sglang, "paper pen ink", json!({}), json!({})).await);
    assert!(!stays(sglang, "stone sand hill", json!({ "sampling_params": { "n": 9 } }), json!({})).await);
    assert!(stays(sglang, "wind rain snow", json!({ "sampling_params": [{ "n": 9 }] }), json!({})).await);
    let answer = client.mock(COMPLETIONS, "generated 1000000", json!({ "prompt": "a" }).to_string()).await;
    assert_eq!(answer.status, 200);
    assert!(!stays(openai, "a tree in the garden", json!({}), json!({})).await);
    for limit in ["max_tokens", "max_completion_tokens"] {
        assert!(stays(openai, &format!("bread and {limit}"), json!({}), json!({ limit: 1 })).await, "{limit}");
    }
    let limited = json!({ "sampling_params": { "max_new_tokens": 1 } });
    assert!(stays(sglang, "bread and butter", json!({}), limited).await);
}

/// An engine that reports no prefix caching: a prompt has no preferred rank there.
#[tokio::test]
async fn an_engine_without_a_prefix_cache_has_no_homes() {
    let mock = canned_as(json!({ "version": "0.1.0", "dp_size": 4, "disable_radix_cache": true }));
    let gateway = start(&model(&mock, "semmoe", "prefix")).await;
    let client = Client::data(&gateway);
    let text = "river water boat fish ".repeat(40);
    let mut seen = Vec::new();
    for _ in 0..4 {
        seen.push(rank_of(&client, &text).await);
    }
    seen.sort();
    assert_eq!(seen, ["0", "1", "2", "3"]);
}

#[tokio::test]
async fn sticky_keeps_the_requests_of_a_session_together() {
    let mock = canned(4);
    let toml = model(&mock, "sglang", "sticky").replace("tokenizer", "#");
    let gateway = start(&format!("[routing]\nsticky_header = \"X-Session\"\n{toml}")).await;
    let client = Client::data(&gateway);
    let named = async |header: &str, session: &str| {
        let headers: &[(&str, &str)] = if session.is_empty() { &[] } else { &[(header, session)] };
        let answer = client.call(Method::POST, "/v1/completions", headers, "{}").await;
        assert_eq!((answer.status, answer.header("x-semmoe-policy")), (200, "sticky"));
        answer.header("x-semmoe-rank").to_owned()
    };
    let rank = async |session: &str| named("x-session", session).await;
    let sessions: Vec<String> = (0..12).map(|session| format!("user-{session}")).collect();
    let mut homes = Vec::new();
    for session in &sessions {
        homes.push(rank(session).await);
    }
    for (session, home) in sessions.iter().zip(&homes) {
        for header in ["X-Session", "X-Session-ID", "conversation_id"] {
            assert_eq!(named(header, session).await, *home, "{header}: {session}");
        }
    }
    homes.sort();
    homes.dedup();
    assert!(homes.len() > 1, "all sessions on one rank");
    let mut without = Vec::new();
    for _ in 0..4 {
        without.push(rank("").await);
    }
    without.sort();
    without.dedup();
    assert_eq!(without.len(), 4, "without the header the ranks are taken in turn while idle");
}

#[tokio::test]
async fn a_shadow_reports_and_changes_nothing() {
    let mock = canned(4);
    let fixture = Fixture::new(4);
    let toml = with_tables(&fixture, &mock, "policy = \"shadow\"\nbaseline = \"round_robin\"");
    let gateway = start(&toml).await;
    let client = Client::data(&gateway);
    let mut ranks = Vec::new();
    for at in 0..24 {
        let answer = client.post("/v1/completions", json!({ "prompt": TEXTS[at % 2] }).to_string()).await;
        assert_eq!(answer.header("x-semmoe-policy"), "round_robin");
        ranks.push(answer.header("x-semmoe-rank").parse::<usize>().unwrap());
    }
    assert_eq!(ranks, (0..24).map(|at| at % 4).collect::<Vec<_>>());
    settled(&gateway).await;

    let shown = Client::admin(&gateway).get("/admin/routing").await.json();
    let shadow = &shown["models"][0]["shadow"];
    assert_eq!((&shadow["acting"], &shadow["watched"]), (&json!("round_robin"), &json!("affinity")));
    let report = &shadow["report"];
    assert_eq!((&report["requests"], &report["same_rank"]), (&json!(24), &json!(12)));
    let share = |side: &str| report[side]["local_share"].as_f64().unwrap();
    // Half of the requests reach their preferred rank in turn; affinity sends all of them there.
    let (does, would) = (share("acting"), share("watched"));
    assert!(would > does + 0.1, "{report}");
    assert!((shadow["local_share_gain"].as_f64().unwrap() - (would - does)).abs() < 1e-12);

    let line = |name: &str, policy: &str| format!("semmoe_shadow_{name}{{model=\"tiny\",policy=\"{policy}\"}}");
    assert_eq!(metric(&gateway, &line("requests", "affinity")).await, 24.0);
    assert!((metric(&gateway, &line("local_share", "affinity")).await - would).abs() < 1e-9);
    assert!((metric(&gateway, &line("local_share", "round_robin")).await - does).abs() < 1e-9);
    assert!(metric(&gateway, &line("tokens_max_over_mean", "round_robin")).await < 1.2);
    assert_eq!(metric(&gateway, "semmoe_predicted_lar_count{policy=\"round_robin\"}").await, 24.0);
    assert_eq!(metric(&gateway, "semmoe_predicted_lar_count{policy=\"affinity\"}").await, 0.0);
}

#[tokio::test]
async fn a_canary_sends_its_part_and_both_sides_are_counted() {
    let mock = canned(4);
    let fixture = Fixture::new(4);
    let gateway = start(&with_tables(&fixture, &mock, "canary = 10\nbaseline = \"round_robin\"")).await;
    let client = Client::data(&gateway);
    let mut tried = 0;
    for at in 0..200 {
        let answer = client.post("/v1/completions", json!({ "prompt": TEXTS[at % 2] }).to_string()).await;
        match answer.header("x-semmoe-policy") {
            "affinity" => {
                tried += 1;
                assert_eq!(answer.header("x-semmoe-rank"), (at % 2).to_string());
            }
            other => assert_eq!(other, "round_robin"),
        }
    }
    assert_eq!(tried, 20);
    for (arm, policy, expected) in [("canary", "affinity", 20.0), ("baseline", "round_robin", 180.0)] {
        let line = format!("semmoe_canary_requests_total{{model=\"tiny\",arm=\"{arm}\"}}");
        assert_eq!(metric(&gateway, &line).await, expected, "{arm}");
        let line = format!("semmoe_predicted_lar_count{{policy=\"{policy}\"}}");
        assert_eq!(metric(&gateway, &line).await, expected, "{policy}");
    }
    let shown = Client::admin(&gateway).get("/admin/routing").await.json();
    let expected = json!({ "percent": 10, "baseline": "round_robin", "requests": 20, "baseline_requests": 180 });
    assert_eq!(shown["models"][0]["canary"], expected);
    settled(&gateway).await;
}

/// A prompt whose score arrives just too late is read twice, and is still one request.
#[tokio::test]
async fn a_canary_counts_a_late_score_once() {
    let mock = canned(4);
    let fixture = Fixture::new(4);
    let toml = with_tables(&fixture, &mock, "canary = 50\nbaseline = \"round_robin\"");
    let gateway = start(&format!("[routing]\noffload_bytes = 1\nscore_limit_seconds = 0.001\n{toml}")).await;
    let client = Client::data(&gateway);
    // Of all lengths, so that some are done within the limit.
    for words in 1..=400 {
        let prompt = TEXTS[0].repeat(words);
        assert_eq!(client.post("/v1/completions", json!({ "prompt": prompt }).to_string()).await.status, 200);
    }
    let mut counted = 0.0;
    for arm in ["canary", "baseline"] {
        counted += metric(&gateway, &format!("semmoe_canary_requests_total{{model=\"tiny\",arm=\"{arm}\"}}")).await;
    }
    assert_eq!(counted, 400.0);
    settled(&gateway).await;
}

/// The tokens of a streaming request are backlog until the first chunk of its answer.
#[tokio::test]
async fn a_prompt_is_backlog_until_the_answer_begins() {
    let mock = canned(4);
    let gateway = start(&model(&mock, "sglang", "prefix")).await;
    let pending = async || {
        let shown = Client::admin(&gateway).get("/admin/backends").await.json();
        let ranks = shown["backends"][0]["ranks"].as_array().unwrap().clone();
        ranks.iter().map(|rank| rank["pending_tokens"].as_u64().unwrap()).sum::<u64>()
    };
    let client = Client::data(&gateway);
    let body = |stream: bool| json!({ "prompt": "river water boat fish ".repeat(9), "stream": stream }).to_string();
    let mut answer = client.open(Method::POST, "/v1/completions", &[("x-mock", "stream")], body(true)).await;
    assert!(pending().await > 30);
    mock.release(1);
    next_frame(&mut answer).await.unwrap();
    assert_eq!(pending().await, 0);
    // Nothing would show when this one is computed.
    let whole = client.open(Method::POST, "/v1/completions", &[("x-mock", "stream")], body(false)).await;
    assert_eq!(pending().await, 0);
    drop((answer, whole));
    settled(&gateway).await;
}
