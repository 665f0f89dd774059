//! The admin plane and the metrics listener. Every route stands in the table of `routes`.

mod backends;
mod guard;
mod live;
mod routes;
mod routing;
mod status;
mod tables;

use std::sync::Arc;

use axum::{Json, Router, middleware};
use serde_json::{Map, Value, json};

use crate::error::RequestError;
use crate::state::Core;

pub(crate) use guard::Guard;
use routes::{ADMIN, STATUS};

/// The metrics listener.
pub(crate) fn metrics_router(core: Arc<Core>) -> Router {
    routes::router(STATUS).fallback(no_route).with_state(core)
}

/// The admin listener; every request passes the guard.
pub(crate) fn router(core: Arc<Core>, guard: Guard) -> Router {
    routes::router(STATUS)
        .merge(routes::router(ADMIN))
        .fallback(no_route)
        .layer(middleware::from_fn_with_state(Arc::new(guard), guard::check))
        .with_state(core)
}

async fn index() -> Json<Value> {
    let routes = STATUS.iter().chain(ADMIN);
    let routes: Map<String, Value> =
        routes.map(|route| (format!("{} {}", route.method, route.path), route.what.into())).collect();
    Json(json!({ "semmoe": env!("CARGO_PKG_VERSION"), "routes": routes }))
}

async fn no_route(request: axum::extract::Request) -> RequestError {
    RequestError::NoRoute { method: request.method().to_string(), path: request.uri().path().to_owned() }
}
