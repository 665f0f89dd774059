//! The paged cache as clients see it: prefixes are computed once, results stay equal, and pages are freed.

use crate::support::{Metrics, Unit, greedy};
use futures_util::future::join_all;
use semmoe_worker::KvBudget;
use serde_json::{Value, json};

/// Tokens of a page.
const PAGE: usize = 64;

fn prompt(length: usize, tail: u32) -> Vec<u32> {
    let common = (0..length as u32).map(|i| (i * 37) % 9000 + 10);
    common.chain((0..20).map(|i| tail * 100 + i + 5)).collect()
}

fn asking(tokens: &[u32], new: u32) -> Value {
    let mut body = greedy(&json!(tokens), new);
    body["return_routed_experts"] = json!(true);
    body["routed_dp_rank"] = json!(0);
    body
}

fn pages(metrics: &Metrics, state: &str) -> u64 {
    metrics.sum("semmoe_kv_pages", &[("state", state)])
}

/// Everything that must not depend on the cache.
fn result(answer: &Value) -> [Value; 2] {
    [answer["output_ids"].clone(), answer["meta_info"]["routed_experts"].clone()]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_is_computed_once_and_changes_no_result() {
    let fresh = Unit::start_with(2, |config| config.limits.prefix_reuse = false);
    let reusing = Unit::start(2);
    let mut cached = 0;
    for (length, tail) in [(200, 1), (200, 2), (130, 3), (200, 1), (44, 1), (0, 7)] {
        let body = asking(&prompt(length, tail), 8);
        let (expected, found) = (fresh.ok("/generate", &body).await, reusing.ok("/generate", &body).await);
        assert_eq!(result(&found), result(&expected), "{length} {tail}");
        assert_eq!(expected["meta_info"]["cached_tokens"], 0);
        cached += found["meta_info"]["cached_tokens"].as_u64().unwrap();
    }
    // 3 pages of the second prompt, 2 of the third, and of the fourth the 3 of its whole prompt; the others are shorter
    // than a page.
    assert_eq!(cached, 8 * PAGE as u64);
    let (with, without) = (reusing.metrics().await, fresh.metrics().await);
    assert_eq!(with.sum("semmoe_cached_prompt_tokens_total", &[]), cached);
    let prefilled = |metrics: &Metrics| metrics.sum("semmoe_tokens_total", &[("phase", "prefill")]);
    assert_eq!(prefilled(&with) + cached, prefilled(&without));
    assert_eq!((pages(&with, "used"), pages(&without, "used"), pages(&without, "cached")), (0, 0, 0));
    assert!(pages(&with, "cached") >= 4);

    // The experts from a position within the reused part on; the OpenAI routes report it in the usage.
    let mut body = asking(&prompt(200, 1), 8);
    body["routed_experts_start_len"] = json!(70);
    let (expected, found) = (fresh.ok("/generate", &body).await, reusing.ok("/generate", &body).await);
    assert_eq!(found["meta_info"]["cached_tokens"], 3 * PAGE);
    assert_eq!(result(&found), result(&expected));
    let body = json!({"prompt": prompt(200, 9), "max_tokens": 1, "routed_dp_rank": 0});
    let usage = &reusing.ok("/v1/completions", &body).await["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 3 * PAGE);
    fresh.stop(0);
    reusing.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_than_fits_waits_its_turn_and_what_never_fits_is_refused() {
    let roomy = Unit::start(1);
    let tight = Unit::start_with(1, |config| config.limits.kv = KvBudget::Tokens(5 * PAGE));
    assert_eq!(tight.get("/v1/models").await["data"][0]["max_model_len"], 5 * PAGE);
    let long = greedy(&json!(prompt(290, 1)), 20);
    let (status, _, answer) = tight.ask("/generate", &long).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("exceed") && message.contains("320 tokens"), "{answer}");

    // Each needs three or four of the five pages, so they run one after another; some share a prefix, and pages are
    // evicted.
    let bodies: Vec<Value> = (0..12).map(|i| asking(&prompt([150, 90, 170][i % 3], i as u32 % 4), 40)).collect();
    let together = join_all(bodies.iter().map(|body| tight.ok("/generate", body))).await;
    for (body, answer) in bodies.iter().zip(&together) {
        assert_eq!(result(answer), result(&roomy.ok("/generate", body).await));
    }
    let metrics = tight.metrics().await;
    assert_eq!(pages(&metrics, "used"), 0);
    assert_eq!(pages(&metrics, "cached") + pages(&metrics, "free"), 5);
    assert!(metrics.sum("semmoe_kv_evicted_pages_total", &[]) > 0);
    roomy.stop(0);
    tight.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_agree_on_the_smallest_cache_and_may_differ_in_threads() {
    let unit = Unit::start_with(2, |config| {
        config.limits.kv = KvBudget::Tokens(if config.rank == 1 { 600 } else { 2000 });
        config.threads = 1 + 2 * usize::from(config.rank);
    });
    let loads = unit.get("/v1/loads").await;
    let mut outputs = Vec::new();
    for rank in 0..2 {
        assert_eq!(loads["loads"][rank]["max_total_num_tokens"], 10 * PAGE);
        // Large computations are split among threads: a long prompt, and the whole vocabulary.
        let mut body = asking(&prompt(500, 1), 3);
        body["routed_dp_rank"] = json!(rank);
        outputs.push(result(&unit.ok("/generate", &body).await));
    }
    assert_eq!(outputs[0], outputs[1]);
    unit.stop(0);
}
