//! The engine's metadata, field by field as real engines report it.

use std::fmt::Write as _;

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use semmoe_engines::Engine as Kind;
use serde_json::{Value, json};

use crate::dialect::Extras;
use crate::engine::{Engine, Settings, Texts};

/// `None` for request routes. `key` is the request's API key.
pub(crate) async fn answer(engine: &Engine, path: &str, key: Option<&String>) -> Option<Response> {
    while path != "/ping" && engine.settings().hung && is_report(engine, path) {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let settings = engine.settings().clone();
    let status = || StatusCode::from_u16(settings.health).unwrap().into_response();
    let text = |version: &str, text: String| {
        ([("content-type", format!("text/plain; version={version}; charset=utf-8"))], text).into_response()
    };
    let (vllm, unread) = (engine.dialect.is_vllm(), matches!(engine.texts, Texts::Unread));
    Some(match path {
        "/ping" if !settings.has_ping => not_found(),
        "/ping" | "/health" if settings.mute => std::future::pending().await,
        "/ping" => status(),
        "/health" => {
            tokio::time::sleep(settings.health_time).await;
            status()
        }
        "/v1/models" if settings.models_authorization.as_ref().is_some_and(|wanted| key != Some(wanted)) => {
            StatusCode::UNAUTHORIZED.into_response()
        }
        "/v1/models" => match &settings.lists {
            Some(name) => models(engine, &settings, name),
            None if settings.context > 0 => models(engine, &settings, &engine.model.model),
            None => status(),
        },
        "/version" if vllm || unread => Json(json!({ "version": settings.version })).into_response(),
        "/v1/loads" | "/metrics" if unread => not_found(),
        "/v1/loads" if engine.dialect.has_loads => loads(engine, &settings),
        "/metrics" if vllm => text("1.0.0", metrics(engine, &settings)),
        "/metrics" => text("0.0.4", String::new()),
        _ if engine.dialect.info.contains(&path) => Json(info(engine, &settings)).into_response(),
        _ => return None,
    })
}

fn is_report(engine: &Engine, path: &str) -> bool {
    path == "/health" || engine.dialect.info.contains(&path)
}

pub(crate) fn not_found() -> Response {
    (StatusCode::NOT_FOUND, Json(json!({ "detail": "Not Found" }))).into_response()
}

pub(crate) fn info(engine: &Engine, settings: &Settings) -> Value {
    let (model, ranks) = (&engine.model, settings.ranks);
    if let Some(info) = &settings.info {
        return info.clone();
    }
    let mut info = json!({
        "model_path": settings.model_path, "tokenizer_path": settings.model_path, "served_model_name": model.model,
        "tp_size": ranks, "dp_size": ranks, "ep_size": ranks, "enable_dp_attention": ranks > 1,
        "moe_a2a_backend": "none", "disable_radix_cache": false, "enable_eplb": false,
        "init_expert_location": settings.init_expert_location, "enable_return_routed_experts": settings.gives_routes,
        "internal_states": [{}], "version": settings.version,
    });
    if engine.dialect.engine == Kind::Semmoe {
        let shape = json!({
            "num_experts": model.num_experts, "top_k": model.top_k, "vocab_size": model.vocab_size,
            "num_hidden_layers": model.num_hidden_layers, "layer_ids": model.layer_ids,
        });
        info.as_object_mut().unwrap().extend(shape.as_object().unwrap().clone());
    } else if engine.dialect.extras == Extras::Sglext {
        // From 0.5.22 on, whichever flag sets the number of ranks.
        info["dp_size"] = json!(1);
        info["attn_dp_size"] = json!(ranks);
    }
    info
}

impl Engine {
    /// Reports this member in its server information from now on.
    pub fn report(&self, member: &str, value: Value) {
        let settings = self.settings().clone();
        let mut info = info(self, &settings);
        info[member] = value;
        self.settings().info = Some(info);
    }
}

fn loads(engine: &Engine, settings: &Settings) -> Response {
    engine.loads_were_asked_for();
    let running = engine.loads().clone();
    let of_rank = |rank: u16| {
        json!({
            "timestamp": 1_795_374_367.8, "dp_rank": rank, "num_running_reqs": running[usize::from(rank)].running,
            "num_waiting_reqs": 0, "num_waiting_uncached_tokens": 0, "num_used_tokens": 0, "num_total_tokens": 0,
            "max_total_num_tokens": 20_000, "max_running_requests": 4096, "token_usage": 0.0, "gen_throughput": 0.0,
            "cache_hit_rate": 0.0, "utilization": 0.0,
        })
    };
    let loads: Vec<Value> = (0..settings.ranks_in_loads.unwrap_or(settings.ranks)).map(of_rank).collect();
    let loads = json!({ "timestamp": "2026-01-01T00:00:00", "version": settings.version, "loads": loads });
    Json(loads).into_response()
}

fn models(engine: &Engine, settings: &Settings, name: &str) -> Response {
    let vllm = engine.dialect.is_vllm();
    // SGLang also serves the model under its root.
    let root = if vllm { &settings.model_path } else { name };
    let by = if vllm { "vllm" } else { "sglang" };
    let context = (settings.context > 0).then_some(settings.context);
    let models = json!({ "object": "list", "data": [{
        "id": name, "object": "model", "created": 1_767_225_600, "owned_by": by, "root": root, "parent": null,
        "max_model_len": context,
    }] });
    Json(models).into_response()
}

/// vLLM's metrics. Counters exist from the start; gauges of requests only for engines that have served, because several
/// API servers write files that Prometheus' library merges.
fn metrics(engine: &Engine, settings: &Settings) -> String {
    let name = &engine.model.model;
    engine.loads_were_asked_for();
    let mut text = String::new();
    for (rank, load) in (settings.first_rank..).zip(engine.loads().iter()) {
        let mut say = |name_of: &str, label: &str, count: u64| {
            let _ = writeln!(text, "vllm:{name_of}{{engine=\"{rank}\",{label}model_name=\"{name}\"}} {count}.0");
        };
        say("prompt_tokens_total", "", load.prompt_tokens);
        say("generation_tokens_total", "", load.output_tokens);
        for reason in ["stop", "length", "abort", "error", "repetition"] {
            let count = if reason == "length" { load.requests } else { 0 };
            say("request_success_total", &format!("finished_reason=\"{reason}\","), count);
        }
        let buckets = [("prompt_tokens", load.one_token_prompts), ("params_max_tokens", load.one_token_answers)];
        for (of, one) in buckets {
            for (bound, count) in [("1.0", one), ("+Inf", load.requests)] {
                say(&format!("request_{of}_bucket"), &format!("le=\"{bound}\","), count);
            }
        }
        if load.requests > 0 || load.running > 0 {
            say("num_requests_running", "", load.running);
            say("num_requests_waiting", "", 0);
        }
    }
    text
}
