//! One change of a backend's tables: load, check, and swap atomically. On a failure the old tables stay in use, and the
//! reason is reported.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use semmoe_tables::{FormatError, Tables};
use serde::Serialize;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::backends::compat::{self, Incompatible};
use crate::backends::{Backends, Member, Model, RequestError, Snapshot, health, verdict};

use super::file::{self, Copy};
use super::{LoadedTables, Origin, TablesFileError, Trouble, spool};

/// Maximum wait for other loads to finish.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// The tables to load.
pub(crate) enum Source {
    /// A file below `server.tables_root`.
    File(PathBuf),
    Upload(Copy),
    /// Previously used tables: those of this generation, or the newest.
    Earlier(Option<u64>),
    /// The backend's configured file. If its content is already in use, nothing changes.
    Watched(PathBuf),
}

impl Source {
    fn name(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Upload(_) => "upload",
            Self::Earlier(_) => "rollback",
            Self::Watched(_) => "watch",
        }
    }
}

/// The tables in use after a change.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct Swapped {
    pub(crate) backend: String,
    pub(crate) generation: u64,
    pub(crate) digest: String,
    pub(crate) placement_digest: String,
    /// Whether the change replaced the tables; false if they were already in use.
    #[serde(skip)]
    pub(crate) changed: bool,
}

/// Changes a backend's tables. Failures are counted, logged and stored for `GET /admin/tables`.
pub(crate) async fn change(backends: &Arc<Backends>, backend: String, source: Source) -> Result<Swapped, RequestError> {
    let (name, by) = (backend.clone(), source.name());
    // Probe first: the checks must use the backend's current state.
    if let Some(backend) = backends.backend(&backend) {
        health::probe_again(backends, &backend, &backends.patient_limits()).await;
    }
    let done = match permit(&backends.lanes.loads).await {
        Err(busy) => Err(busy),
        Ok(_permit) => {
            let backends = Arc::clone(backends);
            blocking(move || {
                let _timed = backends.current.change();
                let done = swap(&backends, &backend, source);
                backends.current.sweep();
                done
            })
            .await
        }
    };
    note(backends, &name, by, done.as_ref());
    done
}

/// Reads, validates, compares and swaps tables. Blocking.
fn swap(backends: &Backends, backend: &str, source: Source) -> Result<Swapped, RequestError> {
    let snapshot = backends.snapshot();
    let Some((_, member)) = snapshot.members().find(|(_, member)| member.backend.name == backend) else {
        return Err(RequestError::UnknownBackend { name: backend.to_owned() });
    };
    let invalid = |error| refusal(TablesFileError::Format(error));
    let fresh = match source {
        Source::Upload(copy) => LoadedTables::new(Arc::new(copy.tables().map_err(invalid)?), Origin::default()),
        Source::File(requested) => open_requested(&snapshot, &requested)?.0,
        Source::Earlier(generation) => earlier(member, generation)?,
        Source::Watched(path) => {
            let (tables, stamp) = file::open(&path, &spool(&snapshot.config)).map_err(refusal)?;
            if let Some(same) = member.tables.as_ref().filter(|loaded| loaded.tables.digest() == tables.digest()) {
                return Ok(Swapped::to(backend, &tables, same.generation, false));
            }
            LoadedTables::new(Arc::new(tables), Origin { path: Some(path), stamp: Some(stamp) })
        }
    };
    // The swap is short, and no request waits for it.
    backends.swap_tables(backend, fresh)
}

impl Backends {
    /// Checks tables against the current state and swaps them in.
    pub(crate) fn swap_tables(&self, backend: &str, fresh: LoadedTables) -> Result<Swapped, RequestError> {
        loop {
            // Do all the work before locking, and repeat it if its inputs changed meanwhile.
            let seen = self.snapshot();
            let gone = || RequestError::UnknownBackend { name: backend.to_owned() };
            let at = seen.find(backend).ok_or_else(gone)?;
            let (model, member) = seen.at(at);
            let probe = member.backend.last_probe();
            check_fit(model, member, &fresh)
                .map_err(|source| RequestError::TablesRefused { backend: backend.to_owned(), source })?;
            let changing = self.changing();
            if !Arc::ptr_eq(&seen, &self.snapshot()) || member.backend.last_probe() != probe {
                continue;
            }
            let tables = Arc::clone(&fresh.tables);
            let next = Arc::new(seen.with_tables(at, fresh, &self.metrics));
            let swapped = Swapped::to(backend, &tables, next.generation, true);
            // Requests take no lock and see either snapshot; only probes and other changes wait for this one. Clear the
            // trouble first: a reader that sees the new tables must not see trouble with the old ones.
            member.backend.set_tables_trouble(None);
            let took = self.swap(&changing, Arc::clone(&next));
            let (model, Member { fit, .. }) = next.at(at);
            model.reset_prices();
            if *fit != member.fit {
                self.note_fit(&member.backend, fit);
                self.refresh(&member.backend);
            }
            drop(changing);
            self.metrics.tables.swapped(took);
            member.backend.live.follow(next.generation);
            self.metrics.live.drift(&member.backend.name, false);
            return Ok(swapped);
        }
    }
}

/// Opens tables from a file below `server.tables_root`; also returns its absolute path. Blocking.
pub(super) fn open_requested(snapshot: &Snapshot, requested: &Path) -> Result<(LoadedTables, PathBuf), RequestError> {
    let root = snapshot.config.server.tables_root.as_deref().ok_or_else(|| RequestError::TablesPath {
        source: "server.tables_root is not set, so only uploads are accepted".into(),
    })?;
    let (tables, path) = file::open_below(root, requested, &spool(&snapshot.config)).map_err(refusal)?;
    let origin = Origin { path: Some(path.clone()), stamp: None };
    Ok((LoadedTables::new(Arc::new(tables), origin), path))
}

impl Swapped {
    pub(crate) fn to(backend: &str, tables: &Tables, generation: u64, changed: bool) -> Self {
        let (digest, placement_digest) = (tables.digest().to_owned(), tables.placement_digest().to_owned());
        Self { backend: backend.to_owned(), generation, digest, placement_digest, changed }
    }
}

fn earlier(member: &Member, generation: Option<u64>) -> Result<LoadedTables, RequestError> {
    let found = match generation {
        None => member.earlier.first(),
        Some(wanted) => member.earlier.iter().find(|earlier| earlier.generation == wanted),
    };
    let found = found.ok_or_else(|| {
        let known = crate::backends::error::listed(member.earlier.iter().map(|earlier| earlier.generation.to_string()));
        RequestError::NoEarlierTables { backend: member.backend.name.clone(), wanted: generation, known }
    })?;
    Ok(LoadedTables::new(Arc::clone(&found.tables), found.origin.clone()))
}

/// Checks tables against the model, its other tables, and the backend's last report.
fn check_fit(model: &Model, member: &Member, fresh: &LoadedTables) -> Result<(), Incompatible> {
    let tables = fresh.tables.as_ref();
    model.check_tables(tables, "the tables in use")?;
    compat::with_declared(tables, member.backend.config.placement_digest.as_deref())?;
    let configured = member.backend.config.ranks;
    let known = member.known_ranks();
    match member.backend.last_probe() {
        // If the engine does not report its ranks, the known number still applies.
        Some(probe) => {
            let known = known.filter(|_| probe.dp_size.is_none());
            verdict::with_backend(&probe, Some(tables), None, &member.backend.config, known).map(|_| ())
        }
        None => compat::expected_ranks(Some(tables), configured.or(known), member.fit.group_ranks).map(|_| ()),
    }
}

/// Counts, logs and stores the outcome of a change.
pub(super) fn note(backends: &Backends, backend: &str, by: &'static str, done: Result<&Swapped, &RequestError>) {
    backends.metrics.tables.reload(match done {
        Ok(Swapped { changed: true, .. }) => "ok",
        Ok(_) => "unchanged",
        Err(RequestError::TablesRefused { .. }) => "refused",
        Err(RequestError::TablesInvalid { .. }) => "invalid",
        Err(RequestError::TablesPath { .. }) => "denied",
        Err(_) => "failed",
    });
    let trouble = done.err().map(|error| Trouble::now(by, error.clone()));
    let news = backends.backend(backend).is_none_or(|backend| backend.set_tables_trouble(trouble));
    match done {
        Ok(Swapped { changed: true, generation, digest, .. }) => {
            tracing::info!(backend, by, generation, digest, "tables swapped");
        }
        Ok(_) => tracing::info!(backend, by, "the file's tables are already in use"),
        // The watcher retries if a retry may help.
        Err(error) if news => tracing::warn!(backend, by, %error, "tables not swapped"),
        Err(_) => {}
    }
}

/// Returns the error for a file that could not be loaded as tables.
pub(super) fn refusal(error: TablesFileError) -> RequestError {
    match &error {
        TablesFileError::Outside { .. } => RequestError::TablesPath { source: error.into() },
        // Storing or mapping the copy failed.
        TablesFileError::Spool { .. } | TablesFileError::Format(FormatError::Io { .. }) => {
            RequestError::TablesStorage { source: error.into() }
        }
        _ => RequestError::TablesInvalid { source: error.into() },
    }
}

/// Waits for other changes to finish, up to a limit.
pub(super) async fn permit(lane: &Semaphore) -> Result<SemaphorePermit<'_>, RequestError> {
    // The semaphores are never closed.
    match tokio::time::timeout(MAX_WAIT, lane.acquire()).await {
        Ok(Ok(permit)) => Ok(permit),
        _ => Err(RequestError::TablesBusy { seconds: MAX_WAIT.as_secs() }),
    }
}

/// Runs blocking work off the network threads.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
) -> Result<T, RequestError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(error.into()))
}
