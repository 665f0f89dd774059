//! `GET` and `POST /admin/switch`: report the state of backends with a switch hook, and switch a backend's layout or
//! placement while it serves.

use std::path::PathBuf;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use futures_util::future::join_all;
use schemars::JsonSchema;
use semmoe_engines::Engine;
use serde::{Deserialize, Serialize};

use crate::backends::RequestError;
use crate::backends::tables::{self, Switched, Target};
use crate::config::SwitchMode;
use crate::shell::control::Control;
use crate::shell::switching::Report;

use super::tables::{command, to_its_end};

#[derive(Serialize, JsonSchema)]
pub(super) struct Switches {
    /// `switch.mode`: `off`, `advise` or `drive`.
    mode: SwitchMode,
    /// The units that the switch policy watches: backends, and pools of backends.
    units: Vec<Report>,
    /// Backends with a switch hook.
    backends: Vec<Entry>,
}

/// A backend that can be switched.
#[derive(Serialize, JsonSchema)]
struct Entry {
    backend: String,
    /// The worker's response to `GET /switch`: state, epoch, layout, placement_digest.
    status: Option<serde_json::Value>,
    /// Why the worker did not respond.
    error: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SwitchCommand {
    backend: String,
    to: To,
    /// The request is refused unless the backend is at this epoch.
    #[serde(default)]
    if_epoch: Option<u64>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "`to` is neither a layout name nor {\"tables\": PATH}")]
enum To {
    /// A layout by name.
    Layout(String),
    Tables(ToTables),
}

/// A file below `server.tables_root`; the worker must find it under the same path.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ToTables {
    tables: PathBuf,
}

pub(super) async fn list(State(control): State<Arc<Control>>) -> Json<Switches> {
    let snapshot = control.backends.snapshot();
    let backends = snapshot.members().map(|(_, member)| &member.backend);
    let entries = backends.filter(|backend| backend.engine == Engine::Semmoe).map(async |backend| {
        let found = tables::status(&control.backends, &backend.name).await;
        let error = found.as_ref().err().map(ToString::to_string);
        Entry {
            backend: backend.name.clone(),
            status: found.ok().and_then(|found| serde_json::to_value(found).ok()),
            error,
        }
    });
    let backends = join_all(entries).await;
    Json(Switches { mode: snapshot.config.switch.mode, units: control.switches.all(), backends })
}

pub(super) async fn switch(State(control): State<Arc<Control>>, body: Body) -> Result<Json<Switched>, RequestError> {
    let expected = "{\"backend\", \"to\": LAYOUT or {\"tables\": PATH}} and optionally {\"if_epoch\"}";
    let SwitchCommand { backend, to, if_epoch } = command(&control, body, expected).await?;
    let to = match to {
        To::Layout(layout) => Target::Layout(layout),
        To::Tables(ToTables { tables }) => Target::Tables(tables),
    };
    to_its_end(async move { tables::switch(&control.backends, &backend, to, if_epoch).await }).await
}
