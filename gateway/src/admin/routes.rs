//! The routes of the admin plane: one table, from which the router and the index are made.

use std::sync::Arc;

use axum::Router;
use axum::routing::{MethodRouter, get, post};

use crate::state::Core;

use super::{backends, index, live, routing, status, tables};

/// One route.
pub(super) struct Route {
    /// `GET` or `POST`.
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    /// What it answers or does, in one line.
    pub(super) what: &'static str,
    handler: fn() -> MethodRouter<Arc<Core>>,
}

impl Route {
    const fn get(path: &'static str, what: &'static str, handler: fn() -> MethodRouter<Arc<Core>>) -> Self {
        Self { method: "GET", path, what, handler }
    }

    const fn post(path: &'static str, what: &'static str, handler: fn() -> MethodRouter<Arc<Core>>) -> Self {
        Self { method: "POST", path, what, handler }
    }
}

/// Also on the metrics listener.
pub(super) const STATUS: &[Route] = &[
    Route::get("/healthz", "200 while the process serves", || get(status::alive)),
    Route::get("/readyz", "200 if every model has a healthy backend, else 503 with the causes", || get(status::ready)),
    Route::get("/metrics", "Prometheus text", || get(status::metrics)),
];

/// On the admin listener alone.
pub(super) const ADMIN: &[Route] = &[
    Route::get("/", "this list", || get(index)),
    Route::get("/admin/tables", "the tables in use, per backend", || get(tables::list)),
    Route::post(
        "/admin/tables",
        "load tables: JSON {backend, path} for a file below server.tables_root, or ?backend= and the file as the body",
        || post(tables::load),
    ),
    Route::post(
        "/admin/tables/rollback",
        "go back to earlier tables: JSON {backend}, or {backend, generation} as GET /admin/tables lists them",
        || post(tables::rollback),
    ),
    Route::get(
        "/admin/backends",
        "every backend with its health, breaker and drain, and its ranks' loads and prices",
        || get(backends::list),
    ),
    Route::post("/admin/backends/{name}/drain", "new requests go elsewhere, running ones finish", || {
        post(backends::drain)
    }),
    Route::post("/admin/backends/{name}/undrain", "new requests come again", || post(backends::undrain)),
    Route::get("/admin/routing", "every model's policy, its canary's counts and its shadow's report", || {
        get(routing::list)
    }),
    Route::get("/admin/live", "observed and predicted LAR of sampled requests, drift, rolling profiles", || {
        get(live::show)
    }),
    Route::post("/admin/live/profiles", "write the rolling profiles now", || post(live::write)),
];

/// A router of these routes.
pub(super) fn router(routes: &[Route]) -> Router<Arc<Core>> {
    routes.iter().fold(Router::new(), |router, route| router.route(route.path, (route.handler)()))
}
