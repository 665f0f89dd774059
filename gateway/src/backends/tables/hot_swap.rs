//! Moves a worker's experts to the placement of new tables, then swaps the tables in: no restart, no lost requests.
//!
//! The tables are read and checked first, so no experts move for unusable tables. While the experts move, the worker
//! holds its requests and the gateway continues to route new ones by the old tables. Those pins stay valid, because the
//! ranks do not change.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use semmoe_engines::Engine;
use semmoe_engines::http::{AnswerLimits, HttpError};
use semmoe_engines::switch::{self, SwitchRequest, SwitchStatus, SwitchTables, SwitchTarget};
use serde::Serialize;

use crate::backends::{Backend, Backends, RequestError, compat, health};

use super::LoadedTables;
use super::change::{blocking, note, open_requested, permit};

/// Time limit for a switch: ranks wait 30 s for steps to end, and large experts take long over slow links.
const SWITCH_LIMIT: Duration = Duration::from_secs(600);

/// The target of a switch.
pub(crate) enum Target {
    /// A layout by name; the tables stay in use.
    Layout(String),
    /// A tables file below `server.tables_root`; the worker must find it under the same path.
    Tables(PathBuf),
}

/// A completed switch.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Switched {
    backend: String,
    /// Number of switches of the unit since its start.
    epoch: u64,
    layout: String,
    placement_digest: String,
    /// How long the worker held requests.
    seconds: Option<f64>,
    /// Generation of the snapshot with the new tables, if there are new ones.
    generation: Option<u64>,
}

/// Returns a backend's switch status.
///
/// # Errors
/// The backend does not exist, its engine has no switch hook, or it does not answer.
pub(crate) async fn status(backends: &Backends, name: &str) -> Result<SwitchStatus, RequestError> {
    let backend = switchable(backends, name)?;
    let answer = switch::status(&backend.client, backend.config.first_url(), &backends.patient_limits()).await;
    answer.map_err(|error| refused(&backend.name, error))
}

/// Switches a backend, then swaps its tables.
///
/// # Errors
/// Before the worker has moved anything, the old state remains in effect; after that, the error is
/// [`RequestError::SwitchedWithoutTables`].
pub(crate) async fn switch(
    backends: &Arc<Backends>,
    name: &str,
    to: Target,
    if_epoch: Option<u64>,
) -> Result<Switched, RequestError> {
    let backend = switchable(backends, name)?;
    let _permit = permit(&backends.lanes.loads).await?;
    let (to, fresh) = match to {
        Target::Layout(layout) => (SwitchTarget::Layout(layout), None),
        Target::Tables(requested) => {
            let (fresh, path) = prepared(backends, &backend, requested).await?;
            (SwitchTarget::Tables(SwitchTables { tables: path }), Some(fresh))
        }
    };
    let limits = AnswerLimits { timeout: SWITCH_LIMIT, ..backends.patient_limits() };
    let request = SwitchRequest { to: Some(to), if_epoch, ..SwitchRequest::default() };
    let switched = switch::switch(&backend.client, backend.config.first_url(), &request, &limits).await;
    let status = switched.map_err(|error| refused(&backend.name, error))?;
    tracing::info!(backend = backend.name, layout = status.layout, epoch = status.epoch, "backend switched");
    let generation = match fresh {
        None => {
            // With another layout, the backend's rank count may differ.
            health::probe_again(backends, &backend, &backends.patient_limits()).await;
            None
        }
        Some(fresh) => Some(swap_in(backends, &backend, fresh).await.map_err(|error| {
            RequestError::SwitchedWithoutTables { backend: backend.name.clone(), source: Box::new(error) }
        })?),
    };
    Ok(Switched {
        backend: backend.name.clone(),
        epoch: status.epoch,
        layout: status.layout,
        placement_digest: status.placement_digest,
        seconds: status.last_seconds,
        generation,
    })
}

/// Returns the backend if it can be switched: only semmoe's worker has the hook.
fn switchable(backends: &Backends, name: &str) -> Result<Arc<Backend>, RequestError> {
    let backend = backends.backend(name).ok_or_else(|| RequestError::UnknownBackend { name: name.to_owned() })?;
    match backend.engine {
        Engine::Semmoe => Ok(backend),
        other => Err(RequestError::SwitchEngine { backend: name.to_owned(), engine: other.name() }),
    }
}

/// Loads tables that can be swapped in once the backend runs their placement.
async fn prepared(
    backends: &Arc<Backends>,
    backend: &Arc<Backend>,
    requested: PathBuf,
) -> Result<(LoadedTables, PathBuf), RequestError> {
    let (backends, backend) = (Arc::clone(backends), Arc::clone(backend));
    blocking(move || {
        let snapshot = backends.snapshot();
        let (fresh, path) = open_requested(&snapshot, &requested)?;
        let gone = || RequestError::UnknownBackend { name: backend.name.clone() };
        let at = snapshot.position(&backend).ok_or_else(gone)?;
        let (model, member) = snapshot.at(at);
        let known = member.known_ranks();
        let declared = member.backend.config.placement_digest.as_deref();
        let fits = model
            .check_tables(&fresh.tables, "the tables in use")
            .and_then(|()| compat::with_declared(&fresh.tables, declared))
            .and_then(|()| compat::expected_ranks(Some(&fresh.tables), known, member.fit.group_ranks));
        match fits {
            Ok(_) => Ok((fresh, path)),
            Err(source) => Err(RequestError::TablesRefused { backend: backend.name.clone(), source }),
        }
    })
    .await
}

/// Swaps in the tables of a backend that now runs their placement.
async fn swap_in(backends: &Arc<Backends>, backend: &Arc<Backend>, fresh: LoadedTables) -> Result<u64, RequestError> {
    let probe = health::full_probe(backends, backend, &backends.patient_limits())
        .await
        .map_err(|error| refused(&backend.name, error))?;
    // Only store the probe: the backend would not match the old tables. Requests continue meanwhile.
    backend.set_probe(probe.clone());
    let (backend, backends) = (Arc::clone(backend), Arc::clone(backends));
    blocking(move || {
        let _timed = backends.current.change();
        let swapped = backends.swap_tables(&backend.name, fresh);
        note(&backends, &backend.name, "switch", swapped.as_ref());
        if swapped.is_err()
            && let Err(closed) = backends.admit(&backend, &probe)
        {
            backends.mark_unhealthy(&backend, closed.to_string());
        }
        backends.current.sweep();
        swapped.map(|swapped| swapped.generation)
    })
    .await
}

fn refused(backend: &str, source: HttpError) -> RequestError {
    tracing::debug!(backend, error = %source, "the switch failed");
    let backend = backend.to_owned();
    match source.status() {
        Some(400..500) => RequestError::SwitchRefused { backend, source },
        _ => RequestError::SwitchFailed { backend, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_fails_to_switch_is_no_fault_of_the_client() {
        let url = || "http://127.0.0.1:1".to_owned();
        let failed = refused("b", HttpError::Connect { url: url(), source: "refused".into() });
        assert_eq!(failed.status(), http::StatusCode::BAD_GATEWAY);
        let status = |status| HttpError::Status { url: url(), status, excerpt: String::new() };
        assert_eq!(refused("b", status(409)).status(), http::StatusCode::CONFLICT);
        assert_eq!(refused("b", status(500)).status(), http::StatusCode::BAD_GATEWAY);
    }
}
