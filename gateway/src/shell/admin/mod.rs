//! The admin plane and the metrics listener. The table in `routes` lists every route.

mod backends;
mod config;
mod guard;
mod live;
mod openapi;
mod overview;
mod page;
mod routes;
mod routing;
mod status;
mod switch;
mod tables;

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use axum::{Json, Router, middleware};
use http::{HeaderMap, header};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::backends::RequestError;
use crate::data::method_and_path;
use crate::shell::control::Control;

pub(crate) use guard::Guard;
use routes::{ADMIN, STATUS};

/// Creates the router of the metrics listener.
pub(crate) fn metrics_router(control: Arc<Control>) -> Router {
    routes::router(STATUS).fallback(no_route).with_state(control)
}

/// Creates the router of the admin listener, on which every request passes the guard.
pub(crate) fn router(control: Arc<Control>, guard: Guard) -> Router {
    routes::router(STATUS)
        .merge(routes::router(ADMIN))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::new(guard), guard::check))
        .with_state(control)
}

#[derive(Serialize, JsonSchema)]
struct Index {
    /// Version of the gateway.
    semmoe: &'static str,
    /// The routes with their descriptions.
    routes: Map<String, Value>,
}

/// Returns the list of routes to programs, and the page to browsers.
async fn root(headers: HeaderMap) -> Response {
    if page::is_wanted(&headers) {
        return page::show().await;
    }
    let routes = STATUS.iter().chain(ADMIN);
    let routes = routes.map(|route| (format!("{} {}", route.method, route.path), route.what.into())).collect();
    ([(header::VARY, "Accept")], Json(Index { semmoe: env!("CARGO_PKG_VERSION"), routes })).into_response()
}

async fn wrong_method(request: axum::extract::Request) -> RequestError {
    let (method, path) = method_and_path(&request);
    RequestError::Method { method, path }
}

async fn no_route(request: axum::extract::Request) -> RequestError {
    let (method, path) = method_and_path(&request);
    RequestError::NoRoute { method, path }
}
