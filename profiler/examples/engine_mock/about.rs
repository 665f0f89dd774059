//! The mock's report about itself, field by field as real engines give it (`profiler/tests/conformity.rs` compares).

use std::fmt::Write as _;
use std::sync::Mutex;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{Dialect, Engine};

/// Counters of one rank; they only rise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Served {
    pub requests: u64,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    /// Requests with a prompt of one token.
    pub one_token_prompts: u64,
}

impl Served {
    pub fn count(served: &Mutex<Vec<Served>>, rank: u16, prompt_tokens: usize, output_tokens: usize) {
        let rank = &mut served.lock().unwrap()[usize::from(rank)];
        rank.requests += 1;
        rank.prompt_tokens += prompt_tokens as u64;
        rank.output_tokens += output_tokens as u64;
        rank.one_token_prompts += u64::from(prompt_tokens == 1);
    }
}

/// The answer to a `GET`.
pub fn answer(engine: &Engine, path: &str) -> Response {
    let vllm = engine.dialect == Dialect::Vllm;
    match path {
        "/health" => StatusCode::OK.into_response(),
        "/server_info" if !vllm && engine.dialect != Dialect::Sglang0_5_10 => Json(server_info(engine)).into_response(),
        "/get_server_info" if !vllm => Json(server_info(engine)).into_response(),
        "/v1/loads" if !vllm => Json(loads(engine)).into_response(),
        "/version" if vllm => Json(json!({ "version": engine.version() })).into_response(),
        "/metrics" if vllm => {
            ([("content-type", "text/plain; version=1.0.0; charset=utf-8")], metrics(engine)).into_response()
        }
        "/metrics" => ([("content-type", "text/plain; version=0.0.4; charset=utf-8")], String::new()).into_response(),
        "/v1/models" => Json(models(engine)).into_response(),
        _ => not_found(),
    }
}

pub fn not_found() -> Response {
    (StatusCode::NOT_FOUND, Json(json!({ "detail": "Not Found" }))).into_response()
}

fn server_info(engine: &Engine) -> Value {
    let ranks = engine.ranks.count;
    let mut info = json!({
        "model_path": engine.model_path, "tokenizer_path": engine.model_path, "served_model_name": engine.model.model,
        "tp_size": ranks, "dp_size": ranks, "ep_size": ranks, "enable_dp_attention": ranks > 1,
        "moe_a2a_backend": "none", "disable_radix_cache": false, "enable_eplb": false,
        "init_expert_location": engine.init_expert_location, "enable_return_routed_experts": engine.gives_routes,
        "internal_states": [{}], "version": engine.version(),
    });
    // From 0.5.22 on, whichever flag says how many ranks there are.
    if engine.dialect == Dialect::Sglang0_5_23 {
        info["dp_size"] = json!(1);
        info["attn_dp_size"] = json!(ranks);
    }
    info
}

fn loads(engine: &Engine) -> Value {
    let of_rank = |(running, rank): (&u64, u16)| {
        json!({
            "timestamp": 1_795_374_367.8, "dp_rank": rank, "num_running_reqs": running, "num_waiting_reqs": 0,
            "num_waiting_uncached_tokens": 0, "num_used_tokens": 0, "num_total_tokens": 0, "max_total_num_tokens": 20_000,
            "max_running_requests": 4096, "token_usage": 0.0, "gen_throughput": 0.0, "cache_hit_rate": 0.0, "utilization": 0.0,
        })
    };
    let loads: Vec<Value> = engine.ranks.loads().iter().zip(0..).map(of_rank).collect();
    json!({ "timestamp": "2026-01-01T00:00:00", "version": engine.version(), "loads": loads })
}

fn models(engine: &Engine) -> Value {
    let name = &engine.model.model;
    let vllm = engine.dialect == Dialect::Vllm;
    // SGLang's root is a name as well.
    let root = if vllm { &engine.model_path } else { name };
    let by = if vllm { "vllm" } else { "sglang" };
    json!({ "object": "list", "data": [{
        "id": name, "object": "model", "created": 1_767_225_600, "owned_by": by, "root": root, "parent": null,
        "max_model_len": engine.context,
    }] })
}

/// vLLM's. Counters exist from the start; gauges of requests only for engines that have served, as several API servers
/// write to files that Prometheus' library adds up.
fn metrics(engine: &Engine) -> String {
    let name = &engine.model.model;
    let running = engine.ranks.loads();
    let mut text = String::new();
    for (rank, served) in engine.ranks.served.lock().unwrap().iter().enumerate() {
        let labels = format!("engine=\"{rank}\",model_name=\"{name}\"");
        let _ = writeln!(text, "vllm:prompt_tokens_total{{{labels}}} {}.0", served.prompt_tokens);
        let _ = writeln!(text, "vllm:generation_tokens_total{{{labels}}} {}.0", served.output_tokens);
        for reason in ["stop", "length", "abort", "error", "repetition"] {
            let count = if reason == "length" { served.requests } else { 0 };
            let labels = format!("engine=\"{rank}\",finished_reason=\"{reason}\",model_name=\"{name}\"");
            let _ = writeln!(text, "vllm:request_success_total{{{labels}}} {count}.0");
        }
        for (bound, count) in [("1.0", served.one_token_prompts), ("+Inf", served.requests)] {
            let labels = format!("engine=\"{rank}\",le=\"{bound}\",model_name=\"{name}\"");
            let _ = writeln!(text, "vllm:request_prompt_tokens_bucket{{{labels}}} {count}.0");
        }
        if served.requests > 0 || running[rank] > 0 {
            let _ = writeln!(text, "vllm:num_requests_running{{{labels}}} {}.0", running[rank]);
            let _ = writeln!(text, "vllm:num_requests_waiting{{{labels}}} 0.0");
        }
    }
    text
}
