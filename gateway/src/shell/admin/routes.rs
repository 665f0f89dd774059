//! The admin plane's routes: one table that generates the router, the index and the OpenAPI document.

use std::sync::Arc;

use axum::extract::State;
use axum::routing::{MethodRouter, get, post};
use axum::{Json, Router};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;

use crate::shell::control::Control;

use super::{backends, config, live, openapi, overview, page, root, routing, status, switch, tables};

/// One route.
#[derive(Clone, Copy)]
pub(super) struct Route {
    /// `GET` or `POST`.
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    /// A one-line description of its response or effect.
    pub(super) what: &'static str,
    /// The request body that the route accepts.
    pub(super) takes: Takes,
    /// The body of a successful response.
    pub(super) gives: Gives,
    handler: fn() -> MethodRouter<Arc<Control>>,
}

/// The body of a successful response.
#[derive(Clone, Copy)]
pub(super) enum Gives {
    Text,
    Page,
    Json(fn(&mut SchemaGenerator) -> Schema),
}

/// The body of a request.
#[derive(Clone, Copy)]
pub(super) enum Takes {
    Nothing,
    Json(fn(&mut SchemaGenerator) -> Schema),
    /// JSON, or the file itself as the body if the query names a `backend`.
    JsonOrUpload(fn(&mut SchemaGenerator) -> Schema),
}

fn schema<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// Handles `GET` by collecting state and returning it as JSON.
fn shown<T: Serialize + 'static>(collect: fn(&Control) -> T) -> MethodRouter<Arc<Control>> {
    get(move |State(control): State<Arc<Control>>| async move { Json(collect(&control)) })
}

impl Route {
    /// Creates a route without a request body, with a text response.
    const fn get(path: &'static str, what: &'static str, handler: fn() -> MethodRouter<Arc<Control>>) -> Self {
        Self { method: "GET", path, what, takes: Takes::Nothing, gives: Gives::Text, handler }
    }

    const fn post(path: &'static str, what: &'static str, handler: fn() -> MethodRouter<Arc<Control>>) -> Self {
        Self { method: "POST", ..Self::get(path, what, handler) }
    }

    /// Makes the route return this type as JSON.
    const fn json<T: JsonSchema>(self) -> Self {
        Self { gives: Gives::Json(schema::<T>), ..self }
    }

    /// Makes the route return a page.
    const fn page(self) -> Self {
        Self { gives: Gives::Page, ..self }
    }

    /// Makes the route accept this type as JSON.
    const fn takes<T: JsonSchema>(self) -> Self {
        Self { takes: Takes::Json(schema::<T>), ..self }
    }

    /// Makes the route accept this type as JSON, or an upload.
    const fn takes_or_upload<T: JsonSchema>(self) -> Self {
        Self { takes: Takes::JsonOrUpload(schema::<T>), ..self }
    }
}

/// Routes on both the admin and the metrics listener.
pub(super) const STATUS: &[Route] = &[
    Route::get("/healthz", "200 while the process is serving", || get(status::alive)),
    Route::get("/readyz", "200 if every model has a healthy backend, else 503 with the causes", || get(status::ready)),
    Route::get("/metrics", "Prometheus text", || get(status::metrics)),
];

/// Routes on the admin listener only.
pub(super) const ADMIN: &[Route] = &[
    Route::get("/", "this list, or the page at /ui for browsers", || get(root)).json::<super::Index>(),
    Route::get(
        "/ui",
        "the admin page; using it requires a token, loading it does not",
        || get(page::show),
    )
    .page(),
    Route::get("/admin/overview", "the page's data: backends, tables, live figures, routing, last reload", || {
        get(overview::show)
    })
    .json::<overview::Overview>(),
    Route::get("/admin/openapi.json", "this list as an OpenAPI document, with request and response bodies", || {
        shown(|_| openapi::document())
    })
    .json::<openapi::AnyObject>(),
    Route::get("/admin/tables", "per backend, the tables in use, earlier ones, and the last errors", || {
        shown(tables::collect)
    })
    .json::<tables::InUse>(),
    Route::post(
        "/admin/tables",
        "load tables: JSON {backend, path} for a file below server.tables_root, or ?backend= and the file as the body",
        || post(tables::load),
    )
    .takes_or_upload::<tables::Command>()
    .json::<crate::backends::tables::Swapped>(),
    Route::post(
        "/admin/tables/rollback",
        "roll back to earlier tables: JSON {backend}, or {backend, generation} as listed by GET /admin/tables",
        || post(tables::rollback),
    )
    .takes::<tables::Rollback>()
    .json::<crate::backends::tables::Swapped>(),
    Route::get(
        "/admin/backends",
        "every backend with its health, breaker and drain, and its ranks' loads and prices",
        || shown(backends::collect),
    )
    .json::<backends::Backends>(),
    Route::post("/admin/backends/{name}/drain", "send new requests to other backends and let running ones finish", || {
        post(backends::drain)
    })
    .json::<backends::Drained>(),
    Route::post("/admin/backends/{name}/undrain", "accept new requests again", || post(backends::undrain))
        .json::<backends::Drained>(),
    Route::get("/admin/routing", "each model's policy, canary counts and shadow report", || {
        shown(routing::collect)
    })
    .json::<routing::Routing>(),
    Route::get("/admin/config", "the running configuration, its start time, and the result of the last reload", || {
        shown(config::collect)
    })
    .json::<config::Running>(),
    Route::post("/admin/reload", "reload the configuration file; if it is invalid, the old configuration stays in effect", || {
        post(config::load)
    })
    .json::<crate::shell::reload::Reloaded>(),
    Route::get("/admin/switch", "the layout, placement and epoch of every backend that can be switched", || {
        get(switch::list)
    })
    .json::<switch::Switches>(),
    Route::post(
        "/admin/switch",
        "switch a backend while it serves: JSON {backend, to} and optionally {if_epoch}; to is a layout, or {tables}: its experts move, \
         then the tables are swapped in",
        || post(switch::switch),
    )
    .takes::<switch::SwitchCommand>()
    .json::<crate::backends::tables::Switched>(),
    Route::get("/admin/live", "observed and predicted LAR of sampled requests, drift, rolling profiles", || {
        get(live::show)
    })
    .json::<live::Live>(),
    Route::post("/admin/live/profiles", "write the rolling profiles now", || post(live::write)).json::<live::Live>(),
];

/// Creates a router for these routes.
pub(super) fn router(routes: &[Route]) -> Router<Arc<Control>> {
    routes.iter().fold(Router::new(), |router, route| router.route(route.path, (route.handler)()))
}
