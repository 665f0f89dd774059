//! `GET` and `POST /admin/tables`: what is in use, and the hot reload.
//!
//! A file or upload is read and validated in full off the network threads, compared with the model, with the other
//! tables in use and with what the backend told, and only then swapped in, at once. Whatever goes wrong, the old tables
//! stay. An upload lives in memory: after a restart the configured file counts again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use bytes::Bytes;
use http::{HeaderMap, Uri, header};
use http_body_util::{BodyExt, Limited};
use semmoe_tables::{FormatError, Tables};
use serde::{Deserialize, Serialize};

use crate::error::RequestError;
use crate::state::Core;

/// Longest JSON body: a backend's name and a path.
const LONGEST_COMMAND_BYTES: usize = 64 << 10;

#[derive(Serialize)]
pub(super) struct InUse {
    generation: u64,
    tables: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    backend: String,
    model: String,
    /// Absent for an upload.
    path: Option<PathBuf>,
    digest: String,
    placement_digest: String,
    /// Generation of the swap that brought them.
    generation: u64,
    dp_ranks: u16,
    solver: String,
    source: String,
    created: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Command {
    backend: String,
    path: PathBuf,
}

#[derive(Serialize)]
pub(super) struct Loaded {
    backend: String,
    generation: u64,
    digest: String,
    placement_digest: String,
}

pub(super) async fn list(State(core): State<Arc<Core>>) -> Json<InUse> {
    let snapshot = core.snapshot();
    let entry = |(model, member): (&Arc<crate::snapshot::Model>, &crate::snapshot::Member)| {
        let loaded = member.tables.as_ref()?;
        let tables = &loaded.tables;
        Some(Entry {
            backend: member.backend.name.clone(),
            model: model.name.clone(),
            path: loaded.path.clone(),
            digest: tables.digest().to_owned(),
            placement_digest: tables.placement_digest().to_owned(),
            generation: loaded.generation,
            dp_ranks: tables.dp_ranks(),
            solver: tables.solver().to_owned(),
            source: tables.provenance().source.clone(),
            created: tables.provenance().created.clone(),
        })
    };
    Json(InUse { generation: snapshot.generation, tables: snapshot.members().filter_map(entry).collect() })
}

pub(super) async fn load(State(core): State<Arc<Core>>, request: Request) -> Result<Json<Loaded>, RequestError> {
    let (head, body) = request.into_parts();
    let loaded = reload(&core, &head.uri, &head.headers, body).await;
    let outcome = match &loaded {
        Ok(_) => "ok",
        Err(RequestError::TablesRefused { .. }) => "refused",
        Err(_) => "invalid",
    };
    core.metrics.table_reload(outcome);
    match &loaded {
        Ok(Json(loaded)) => {
            tracing::info!(
                backend = loaded.backend,
                generation = loaded.generation,
                digest = loaded.digest,
                "tables swapped"
            );
        }
        Err(error) => tracing::warn!(%error, "tables not swapped"),
    }
    loaded
}

async fn reload(core: &Arc<Core>, uri: &Uri, headers: &HeaderMap, body: Body) -> Result<Json<Loaded>, RequestError> {
    // A query that names the backend goes with an upload; everything else is a command, whatever `curl -d` calls it.
    let (backend, source) = match backend_of(uri).filter(|_| !is_json(headers)) {
        None => {
            let bytes = read(body, LONGEST_COMMAND_BYTES).await?;
            let command: Command = serde_json::from_slice(&bytes).map_err(|error| RequestError::Field {
                cause: format!(
                    "{error}: expected JSON {{\"backend\", \"path\"}}, or a file as the body with ?backend=NAME"
                ),
            })?;
            (command.backend, Source::File(command.path))
        }
        Some(backend) => {
            // An upload for nobody need not be read.
            core.snapshot().find(&backend).ok_or_else(|| RequestError::UnknownBackend { name: backend.clone() })?;
            (backend, Source::Upload(read(body, core.config().limits.table_bytes).await?))
        }
    };
    let core = Arc::clone(core);
    let work = tokio::task::spawn_blocking(move || swap(&core, backend, source));
    work.await.unwrap_or_else(|error| Err(RequestError::TablesInvalid { cause: error.to_string() }))
}

enum Source {
    File(PathBuf),
    Upload(Bytes),
}

/// Reads, validates, compares, swaps. Blocking.
fn swap(core: &Core, backend: String, source: Source) -> Result<Json<Loaded>, RequestError> {
    let at = core.snapshot().find(&backend).ok_or_else(|| RequestError::UnknownBackend { name: backend.clone() })?;
    let invalid = |error: FormatError| RequestError::TablesInvalid { cause: error.to_string() };
    let (tables, path) = match source {
        Source::Upload(bytes) => (Tables::from_bytes(bytes.into()).map_err(invalid)?, None),
        Source::File(path) => {
            let path = below_root(core.config().server.tables_root.as_deref(), &path)?;
            (Tables::open(&path).map_err(invalid)?, Some(path))
        }
    };
    let (digest, placement_digest) = (tables.digest().to_owned(), tables.placement_digest().to_owned());
    let generation = core
        .swap_tables(at, tables, path)
        .map_err(|cause| RequestError::TablesRefused { backend: backend.clone(), cause })?;
    Ok(Json(Loaded { backend, generation, digest, placement_digest }))
}

/// The file that `path` names below the configured root, links followed.
fn below_root(root: Option<&Path>, path: &Path) -> Result<PathBuf, RequestError> {
    let denied = |cause: String| RequestError::TablesPath { cause };
    let root = root.ok_or_else(|| denied("server.tables_root is not set, so only uploads are taken".to_owned()))?;
    let root = root.canonicalize().map_err(|error| denied(format!("tables_root {}: {error}", root.display())))?;
    let file = root.join(path);
    let file = file
        .canonicalize()
        .map_err(|error| RequestError::TablesInvalid { cause: format!("cannot open {}: {error}", file.display()) })?;
    if file.starts_with(&root) {
        Ok(file)
    } else {
        Err(denied(format!("{} is not below the tables root {}", path.display(), root.display())))
    }
}

async fn read(body: Body, limit_bytes: usize) -> Result<Bytes, RequestError> {
    match Limited::new(body, limit_bytes).collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(RequestError::BodyTooLong { limit_bytes }),
        Err(error) => Err(RequestError::BodyRead { cause: error.to_string() }),
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

fn backend_of(uri: &Uri) -> Option<String> {
    #[derive(Deserialize)]
    struct Query {
        backend: String,
    }
    axum::extract::Query::<Query>::try_from_uri(uri).ok().map(|query| query.0.backend)
}
