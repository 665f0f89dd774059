//! The admin plane and the metrics listener.
//!
//! | route | what |
//! |---|---|
//! | `GET /healthz` | 200 while the process serves |
//! | `GET /readyz` | 200 if every model has a healthy backend, else 503 with the causes |
//! | `GET /metrics` | Prometheus text |
//! | `GET /admin/tables` | the tables in use, per backend |
//! | `POST /admin/tables` | load a file below `server.tables_root`, or an upload, and swap it in |
//! | `GET /admin/backends` | every backend with its health and its ranks' loads and prices |
//! | `GET /admin/routing` | every model's policy, its canary's counts and its shadow's report |
//! | `GET /admin/live` | what sampled requests show: observed and predicted LAR, drift, rolling profiles |
//! | `POST /admin/live/profiles` | write the rolling profiles now |
//! | `GET /` | this list |
//!
//! The metrics listener has the first three only.

mod backends;
mod guard;
mod live;
mod routing;
mod status;
mod tables;

use std::sync::Arc;

use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use serde_json::{Value, json};

use crate::error::RequestError;
use crate::state::Core;

pub(crate) use guard::Guard;

/// The metrics listener.
pub(crate) fn metrics_router(core: Arc<Core>) -> Router {
    status::router().fallback(no_route).with_state(core)
}

/// The admin listener; every request passes the guard.
pub(crate) fn router(core: Arc<Core>, guard: Guard) -> Router {
    status::router()
        .route("/", get(index))
        .route("/admin/tables", get(tables::list).post(tables::load))
        .route("/admin/backends", get(backends::list))
        .route("/admin/routing", get(routing::list))
        .route("/admin/live", get(live::show))
        .route("/admin/live/profiles", post(live::write))
        .fallback(no_route)
        .layer(middleware::from_fn_with_state(Arc::new(guard), guard::check))
        .with_state(core)
}

async fn index() -> Json<Value> {
    Json(json!({
        "semmoe": env!("CARGO_PKG_VERSION"),
        "routes": {
            "GET /healthz": "200 while the process serves",
            "GET /readyz": "200 if every model has a healthy backend",
            "GET /metrics": "Prometheus text",
            "GET /admin/tables": "the tables in use, per backend",
            "POST /admin/tables": "JSON {backend, path}, or ?backend= and the file as the body",
            "GET /admin/backends": "health, loads and prices",
            "GET /admin/routing": "policies, canaries, and what a shadow's policy would have gained",
            "GET /admin/live": "observed and predicted LAR of sampled requests, drift, rolling profiles",
            "POST /admin/live/profiles": "writes the rolling profiles now",
        },
    }))
}

async fn no_route(request: axum::extract::Request) -> RequestError {
    RequestError::NoRoute { method: request.method().to_string(), path: request.uri().path().to_owned() }
}
