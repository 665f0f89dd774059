//! Routes that describe the unit, and `/tokenize`.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use semmoe_engines::sglang::{Loads, RankLoads};
use semmoe_text::Route;
use serde_json::{Value, json};

use super::app::{App, WorkerInfo};
use super::error::ApiError;
use super::fields;
use super::listen::WholeBody;
use super::validated;
use crate::model::PAGE_TOKENS;

/// Time since 1970.
pub(super) fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// `GET /health`
pub(super) async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    match app.unit.lost() {
        Some(lost) => Err(ApiError::unavailable(lost.cause)),
        None if app.unit.is_draining() => Err(ApiError::unavailable("the unit is draining")),
        None => Ok(Json(json!({"status": "ok"}))),
    }
}

/// `GET /server_info`
pub(super) async fn server_info(State(app): State<Arc<App>>) -> Json<WorkerInfo> {
    Json(app.server_info())
}

/// `GET /model_info`
pub(super) async fn model_info(State(app): State<Arc<App>>) -> Json<Value> {
    let path = app.served.dir.display().to_string();
    Json(json!({
        "model_path": path,
        "tokenizer_path": path,
        "is_generation": true,
        "preferred_sampling_params": null,
        "max_model_len": app.context_tokens(),
    }))
}

/// `GET /v1/models`
pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model_entry(&app)]}))
}

/// `GET /v1/models/{id}`; the model name may contain slashes.
pub(super) async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    match id == app.served.name {
        true => Ok(Json(model_entry(&app))),
        false => Err(ApiError::no_model(&id, &app.served.name)),
    }
}

fn model_entry(app: &App) -> Value {
    json!({
        "id": app.served.name,
        "object": "model",
        "created": 0,
        "owned_by": "semmoe",
        "root": app.served.name,
        "max_model_len": app.context_tokens(),
    })
}

/// `GET /v1/loads`: each rank's load between two of its steps. Under attention tp, all ranks of a group count as one.
pub(super) async fn loads(State(app): State<Arc<App>>) -> Result<Json<Loads>, ApiError> {
    app.check_alive()?;
    let limits = app.unit.limits;
    let tokens = |pages: u64| pages * PAGE_TOKENS as u64;
    let stats = app.unit.stats().await;
    let loads = (0u32..).zip(app.unit.by_replica(stats)).map(|(dp_rank, stats)| RankLoads {
        dp_rank,
        num_running_reqs: Some(stats.running),
        num_waiting_reqs: Some(stats.waiting),
        num_waiting_uncached_tokens: Some(stats.waiting_tokens),
        num_used_tokens: Some(tokens(stats.kv.used)),
        num_total_tokens: Some(stats.total_tokens),
        max_total_num_tokens: Some(tokens(stats.kv.capacity)),
        max_running_requests: Some(limits.running as u64),
        token_usage: Some(tokens(stats.kv.used) as f64 / tokens(stats.kv.capacity).max(1) as f64),
        ..RankLoads::default()
    });
    Ok(Json(Loads {
        timestamp: Some(unix_time().as_secs_f64().into()),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        loads: loads.collect(),
    }))
}

/// `POST /tokenize`: converts `{"prompt": ...}` or `{"messages": [...]}` to token ids.
pub(super) async fn tokenize(State(app): State<Arc<App>>, WholeBody(body): WholeBody) -> Result<Json<Value>, ApiError> {
    validated::off_the_runtime(&app, HeaderMap::new(), body, |app, _, bytes| {
        let body = validated::parse(bytes)?;
        fields::check(&body, fields::TOKENIZE)?;
        let route = if body.get("messages").is_some() { Route::Chat } else { Route::Completions };
        let prompts = validated::prompts(app, route, &body)?;
        let counts: Vec<usize> = prompts.iter().map(Vec::len).collect();
        let context = app.context_tokens();
        Ok(Json(match &prompts[..] {
            [tokens] if !body["prompt"].is_array() => {
                json!({"tokens": tokens, "count": tokens.len(), "max_model_len": context})
            }
            lists => json!({"tokens": lists, "count": counts, "max_model_len": context}),
        }))
    })
    .await
}
