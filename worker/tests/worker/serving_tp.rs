//! A unit with attention tp as clients see it: one rank, answers like any other unit's, and nothing left behind.

use crate::common;
use crate::support;
use std::path::PathBuf;

use crate::support::{LAYERS, TOP_K, Unit, golden, greedy};
use futures_util::future::join_all;
use http_body_util::BodyExt as _;
use semmoe_tables::Attention;
use semmoe_worker::WorkerConfig;
use serde_json::{Value, json};

/// A unit of `world` ranks, whose rows tables may shuffle.
struct Split {
    unit: Unit,
    _folder: tempfile::TempDir,
}

fn start(world: u16, shuffle: bool, adjust: impl Fn(&mut WorkerConfig)) -> Split {
    let folder = tempfile::tempdir().unwrap();
    let tables = tp_tables(&folder, world);
    let unit = Unit::start_with(world, |config| {
        (config.attention, config.shuffle, config.tables) = (Attention::Tp, shuffle, Some(tables.clone()));
        adjust(config);
    });
    Split { unit, _folder: folder }
}

fn tp_tables(folder: &tempfile::TempDir, world: u16) -> PathBuf {
    let config = common::config();
    let placement = common::shuffled_of(&config, world, 3);
    let path = folder.path().join("tp.tables.safetensors");
    common::tp_tables(&config, &placement, 1).write(&path).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_together_get_the_golden_tokens_and_the_unit_is_one_rank_to_clients() {
    for (world, shuffle) in [(1, true), (2, false), (4, true)] {
        let Split { unit, _folder } = start(world, shuffle, |_| {});
        let info = unit.get("/server_info").await;
        let sizes = ["dp_size", "tp_size", "ep_size"].map(|size| info[size].as_u64().unwrap());
        assert_eq!(sizes, [1, u64::from(world), u64::from(world)]);
        assert_eq!(
            (&info["attention"], &info["shuffle"]),
            (&json!("tp"), &json!(if shuffle { "tables" } else { "off" }))
        );
        assert_eq!(info["enable_dp_attention"], false);

        let prompts = golden();
        let asked = prompts.iter().map(|prompt| {
            let mut body = greedy(&prompt["input_ids"], 16);
            body["return_routed_experts"] = json!(true);
            body["return_logprob"] = json!(true);
            body["top_logprobs_num"] = json!(2);
            (prompt, body)
        });
        let asked: Vec<_> = asked.collect();
        let answers = join_all(asked.iter().map(|(_, body)| unit.ok("/generate", body))).await;
        for ((prompt, _), answer) in asked.iter().zip(&answers) {
            assert_eq!(answer["output_ids"], prompt["greedy_16"], "{world} ranks");
            assert_eq!(answer["meta_info"]["dp_rank"], 0);
            let positions = prompt["input_ids"].as_array().unwrap().len() + 15;
            let routes = answer["meta_info"]["routed_experts"].as_str().unwrap();
            assert_eq!(routes.len(), (positions * LAYERS * TOP_K * 4).div_ceil(3) * 4);
            let logprobs = answer["meta_info"]["output_top_logprobs"].as_array().unwrap();
            assert_eq!(logprobs.len(), 16);
            assert_eq!(logprobs[0][0][1], answer["output_ids"][0], "the likeliest token is the greedy one");
        }

        let metrics = unit.metrics().await;
        let sum = |family: &str, labels: &[(&str, &str)]| metrics.sum(family, labels);
        let prompt_tokens: usize = prompts.iter().map(|p| p["input_ids"].as_array().unwrap().len()).sum();
        let tokens = sum("semmoe_tokens_total", &[]);
        assert_eq!(sum("semmoe_tokens_total", &[("phase", "prefill")]), prompt_tokens as u64);
        assert_eq!(tokens, (prompt_tokens + prompts.len() * 15) as u64);
        assert_eq!(sum("semmoe_activations_total", &[]), tokens * (LAYERS * TOP_K) as u64);
        assert_eq!(sum("semmoe_attention_rows_total", &[]), tokens * LAYERS as u64);
        assert_eq!(sum("semmoe_attention_rows_total", &[("by", "tables")]) > 0, shuffle);
        assert_eq!(sum("semmoe_attention_bytes_total", &[("collective", "srs")]) > 0, world > 1);
        let loads = unit.get("/v1/loads").await;
        assert_eq!(loads["loads"].as_array().unwrap().len(), 1, "{loads}");
        assert_eq!(loads["loads"][0]["num_used_tokens"], 0);

        let mut pinned = greedy(&json!([5, 6, 7]), 2);
        pinned["routed_dp_rank"] = json!(0);
        unit.ok("/generate", &pinned).await;
        pinned["routed_dp_rank"] = json!(1);
        let (status, _, answer) = unit.ask("/generate", &pinned).await;
        assert_eq!(status, 400);
        assert!(answer.to_string().contains("must be below 1, found 1"), "{answer}");
        assert!(tokio::task::spawn_blocking(move || unit.stop(0)).await.unwrap().iter().all(Result::is_ok));
    }
}

/// Requests of every kind at once: sampled and greedy, with stop texts, with shared prefixes.
fn mixed(count: u64) -> Vec<Value> {
    let prompts = golden();
    let body = |i: u64| {
        let ids = &prompts[i as usize % prompts.len()]["input_ids"];
        let mut body = greedy(ids, 5 + (i as u32 * 7) % 20);
        if !i.is_multiple_of(3) {
            body["sampling_params"]["temperature"] = json!(1.2);
            body["sampling_params"]["top_p"] = json!(0.9);
            body["sampling_params"]["sampling_seed"] = json!(i);
        }
        if i % 4 == 1 {
            body["sampling_params"]["stop"] = json!(["e", "the"]);
        }
        if i % 5 == 2 {
            body["input_ids"] = json!((0..150u32).map(|j| j % 90 + 10).chain([i as u32 + 9]).collect::<Vec<_>>());
        }
        body
    };
    (0..count).map(body).collect()
}

fn outcome(answer: &Value) -> [Value; 3] {
    [answer["output_ids"].clone(), answer["text"].clone(), answer["meta_info"]["finish_reason"].clone()]
}

#[tokio::test(flavor = "multi_thread")]
async fn sampled_stopped_and_cancelled_requests_are_the_same_shuffled_plain_and_alone() {
    let bodies = mixed(24);
    // Little room: requests wait for pages, prompts are chunked, prefixes are evicted.
    let narrow = |config: &mut WorkerConfig| {
        (config.limits.running, config.limits.step_tokens) = (6, 40);
        config.limits.kv = semmoe_worker::KvBudget::Tokens(1024);
    };
    let Split { unit: plain, _folder } = start(2, false, |config| config.limits.prefix_reuse = false);
    let mut expected = Vec::new();
    for body in &bodies {
        expected.push(outcome(&plain.ok("/generate", body).await));
    }
    plain.stop(1);
    for world in [2, 4] {
        let Split { unit, _folder } = start(world, true, narrow);
        // Some clients leave in the middle, unnoticed by the others.
        let leave = |i: usize| {
            let mut body = bodies[i].clone();
            body["stream"] = json!(true);
            body["sampling_params"]["max_new_tokens"] = json!(900);
            let (request, client) = (unit.post("/generate", body.to_string().as_bytes()), unit.client.clone());
            async move {
                let mut response = client.send(request).await.unwrap();
                assert!(response.body_mut().frame().await.unwrap().is_ok());
            }
        };
        let leaving = join_all([0, 3, 4].map(leave));
        let answers = join_all(bodies.iter().map(|body| unit.ok("/generate", body)));
        let (_, answers) = tokio::join!(leaving, answers);
        for (body, (answer, expected)) in bodies.iter().zip(answers.iter().zip(&expected)) {
            // Partial sums of two ranks and of four differ in their last bits, which sampling may expose.
            if world == 2 || body["sampling_params"]["temperature"] == 0 {
                assert_eq!(&outcome(answer), expected, "{body}");
            }
        }
        unit.quiet().await;
        let cached = |metrics: &support::Metrics| metrics.sum("semmoe_kv_pages", &[("state", "cached"), ("rank", "0")]);
        let metrics = unit.metrics().await;
        assert!(metrics.sum("semmoe_cached_prompt_tokens_total", &[]) > 0, "prefixes were found again");
        assert_eq!(metrics.sum("semmoe_kv_pages", &[("state", "used")]), 0);
        let everywhere =
            (0..world).map(|rank| metrics.sum("semmoe_kv_pages", &[("state", "cached"), ("rank", &rank.to_string())]));
        assert!(
            everywhere.collect::<Vec<_>>().iter().all(|pages| *pages == cached(&metrics)),
            "all ranks keep the same"
        );
        assert!(cached(&metrics) > 0);
        let flushed = unit.ok("/flush_cache", &json!({})).await;
        assert_eq!(flushed["cached_pages"], 0);
        let again = unit.ok("/generate", &bodies[2]).await;
        assert_eq!(again["meta_info"]["cached_tokens"], 0, "flushed on all ranks");
        assert!(tokio::task::spawn_blocking(move || unit.stop(1)).await.unwrap().iter().all(Result::is_ok));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_outlast_the_grace_are_ended_on_all_ranks() {
    let Split { unit, _folder } = start(2, true, |config| config.grace = std::time::Duration::ZERO);
    let mut body = greedy(&json!([557, 1712, 298]), 1900);
    body["stream"] = json!(true);
    let response = unit.client.send(unit.post("/generate", body.to_string().as_bytes())).await.unwrap();
    let reading = tokio::spawn(response.into_body().collect());
    let outcomes = tokio::task::spawn_blocking(move || unit.stop(1)).await.unwrap();
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    let text = reading.await.unwrap().unwrap().to_bytes();
    let events = support::events(std::str::from_utf8(&text).unwrap());
    let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "abort");
}
