//! `GET /admin/config` and `POST /admin/reload`: show the running configuration and load the next one.

use std::path::PathBuf;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::backends::RequestError;
use crate::shell::control::Control;
use crate::shell::reload::{Last, ReloadError, Reloaded, reload};

#[derive(Serialize, JsonSchema)]
pub(super) struct Running {
    /// The configuration file; null if there is none.
    file: Option<PathBuf>,
    /// Generation of the snapshot, which table swaps also increment.
    generation: u64,
    started_unix_seconds: u64,
    /// The last reload; null before the first one.
    last_reload: Option<Last>,
    /// The file's content at the last successful read, without defaults; secrets appear as `(set)`.
    settings: Value,
}

pub(super) fn collect(control: &Control) -> Running {
    let snapshot = control.backends.snapshot();
    let source = &snapshot.config.source;
    Running {
        file: source.file.clone(),
        generation: snapshot.generation,
        started_unix_seconds: control.data.started_unix_seconds,
        last_reload: control.reloads.last(),
        settings: source.document.clone(),
    }
}

pub(super) async fn load(State(control): State<Arc<Control>>) -> Result<Json<Reloaded>, RequestError> {
    // Spawned as a task, so that a client that disconnects does not leave a reload half done.
    let done = tokio::spawn(async move { reload(&control).await }).await;
    match done {
        Ok(Ok(reloaded)) => Ok(Json(reloaded)),
        Ok(Err(ReloadError::Stopping)) => Err(RequestError::Closing),
        Ok(Err(error @ ReloadError::Config(_))) => Err(RequestError::ConfigInvalid { source: error.into() }),
        Ok(Err(ReloadError::Refused(error))) if !error.is_input() => {
            Err(RequestError::ConfigFailed { source: error.into() })
        }
        Ok(Err(error)) => Err(RequestError::ConfigRefused { source: error.into() }),
        Err(error) => Err(error.into()),
    }
}
