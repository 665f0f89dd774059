//! `GET /admin/overview`: what the page shows, in one answer of one moment.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;

use super::{backends, live, routing, tables};
use crate::error::RequestError;
use crate::reload::Last;
use crate::state::Core;

#[derive(Serialize, JsonSchema)]
pub(super) struct Overview {
    /// Version of the gateway.
    semmoe: &'static str,
    /// The gateway's clock, for ages.
    unix_seconds: f64,
    started_unix_seconds: u64,
    /// Of the configuration; null where there is none.
    file: Option<std::path::PathBuf>,
    /// Null before the first one.
    last_reload: Option<Last>,
    /// It finishes its requests and takes no new ones.
    draining: bool,
    backends: backends::Backends,
    tables: tables::InUse,
    live: live::Live,
    routing: routing::Routing,
}

pub(super) async fn show(State(core): State<Arc<Core>>) -> Result<Json<Overview>, RequestError> {
    live::answer(core, |core| Overview {
        semmoe: env!("CARGO_PKG_VERSION"),
        unix_seconds: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
        started_unix_seconds: core.started_unix_seconds,
        file: core.config().source.file.clone(),
        last_reload: core.reloads.last(),
        draining: core.is_draining(),
        backends: backends::collect(core),
        tables: tables::collect(core),
        live: live::collect(core),
        routing: routing::collect(core),
    })
    .await
}
