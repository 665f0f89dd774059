//! The routes of the admin plane: one table that generates the router, the index and the OpenAPI document.

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
    /// Its answer or effect, in one line.
    pub(super) what: &'static str,
    /// The request body that it accepts.
    pub(super) takes: Takes,
    /// A successful answer.
    pub(super) gives: Gives,
    handler: fn() -> MethodRouter<Arc<Control>>,
}

/// The body of a successful answer.
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
    /// JSON, or the file itself as the body when the query names a `backend`.
    JsonOrUpload(fn(&mut SchemaGenerator) -> Schema),
}

fn schema<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// `GET` of the collected state, as JSON.
fn shown<T: Serialize + 'static>(collect: fn(&Control) -> T) -> MethodRouter<Arc<Control>> {
    get(move |State(control): State<Arc<Control>>| async move { Json(collect(&control)) })
}

impl Route {
    /// A route without a request body whose answer is text.
    const fn get(path: &'static str, what: &'static str, handler: fn() -> MethodRouter<Arc<Control>>) -> Self {
        Self { method: "GET", path, what, takes: Takes::Nothing, gives: Gives::Text, handler }
    }

    const fn post(path: &'static str, what: &'static str, handler: fn() -> MethodRouter<Arc<Control>>) -> Self {
        Self { method: "POST", ..Self::get(path, what, handler) }
    }

    /// Answers with this type as JSON.
    const fn json<T: JsonSchema>(self) -> Self {
        Self { gives: Gives::Json(schema::<T>), ..self }
    }

    /// Answers with a page.
    const fn page(self) -> Self {
        Self { gives: Gives::Page, ..self }
    }

    /// Accepts this type as JSON.
    const fn takes<T: JsonSchema>(self) -> Self {
        Self { takes: Takes::Json(schema::<T>), ..self }
    }

    /// Accepts this type as JSON, or an upload.
    const fn takes_or_upload<T: JsonSchema>(self) -> Self {
        Self { takes: Takes::JsonOrUpload(schema::<T>), ..self }
    }
}

/// Routes on both the admin and the metrics listener.
pub(super) const STATUS: &[Route] = &[
    Route::get("/healthz", "200 while the process serves", || get(status::alive)),
    Route::get("/readyz", "200 if every model has a healthy backend, else 503 with the causes", || get(status::ready)),
    Route::get("/metrics", "Prometheus text", || get(status::metrics)),
];

/// Routes on the admin listener only.
pub(super) const ADMIN: &[Route] = &[
    Route::get("/", "this list; to browsers the page of /ui", || get(root)).json::<super::Index>(),
    Route::get(
        "/ui",
        "the admin page; loading it needs no token, using it does",
        || get(page::show),
    )
    .page(),
    Route::get("/admin/overview", "what the page shows: backends, tables, live figures, routing, last reload", || {
        get(overview::show)
    })
    .json::<overview::Overview>(),
    Route::get("/admin/openapi.json", "this list as an OpenAPI document, with bodies and answers", || {
        shown(|_| openapi::document())
    })
    .json::<openapi::AnyObject>(),
    Route::get("/admin/tables", "the tables in use, per backend, earlier ones, and the last errors", || {
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
        "go back to earlier tables: JSON {backend}, or {backend, generation} as GET /admin/tables lists them",
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
    Route::post("/admin/backends/{name}/drain", "new requests go elsewhere, running ones finish", || {
        post(backends::drain)
    })
    .json::<backends::Drained>(),
    Route::post("/admin/backends/{name}/undrain", "new requests are accepted again", || post(backends::undrain))
        .json::<backends::Drained>(),
    Route::get("/admin/routing", "each model's policy, canary counts and shadow report", || {
        shown(routing::collect)
    })
    .json::<routing::Routing>(),
    Route::get("/admin/config", "which configuration runs, since when, and the result of the last reload", || {
        shown(config::collect)
    })
    .json::<config::Running>(),
    Route::post("/admin/reload", "reload the configuration file; the old configuration stays if it is invalid", || {
        post(config::load)
    })
    .json::<crate::shell::reload::Reloaded>(),
    Route::get("/admin/switch", "the layout, placement and epoch of every backend that can be switched", || {
        get(switch::list)
    })
    .json::<switch::Switches>(),
    Route::post(
        "/admin/switch",
        "switch a backend while it serves: JSON {backend, to} and perhaps {if_epoch}; to is a layout, or {tables}: its experts move, \
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

/// A router of these routes.
pub(super) fn router(routes: &[Route]) -> Router<Arc<Control>> {
    routes.iter().fold(Router::new(), |router, route| router.route(route.path, (route.handler)()))
}
