//! `GET /admin/overview`: all data that the page shows, collected at one moment.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;

use super::{backends, live, routing, tables};
use crate::backends::RequestError;
use crate::shell::control::Control;
use crate::shell::reload::Last;

#[derive(Serialize, JsonSchema)]
pub(super) struct Overview {
    /// Version of the gateway.
    semmoe: &'static str,
    /// The gateway's clock, for computing ages.
    unix_seconds: f64,
    started_unix_seconds: u64,
    /// The configuration file; null if there is none.
    file: Option<std::path::PathBuf>,
    /// The last reload; null before the first one.
    last_reload: Option<Last>,
    /// The gateway finishes its requests and accepts no new ones.
    draining: bool,
    backends: backends::Backends,
    tables: tables::InUse,
    live: live::Live,
    routing: routing::Routing,
}

pub(super) async fn show(State(control): State<Arc<Control>>) -> Result<Json<Overview>, RequestError> {
    live::answer(control, |control| Overview {
        semmoe: env!("CARGO_PKG_VERSION"),
        unix_seconds: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
        started_unix_seconds: control.data.started_unix_seconds,
        file: control.backends.config().source.file.clone(),
        last_reload: control.reloads.last(),
        draining: control.data.is_draining(),
        backends: backends::collect(control),
        tables: tables::collect(control),
        live: live::collect(control),
        routing: routing::collect(control),
    })
    .await
}
