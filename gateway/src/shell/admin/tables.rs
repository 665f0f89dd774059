//! `GET` and `POST /admin/tables`, `POST /admin/tables/rollback`: the tables in use, hot reloads and rollbacks.
//!
//! Tables loaded here stay in use until others are loaded. After a restart the configured file applies again; with
//! `tables.watch`, so does any change to that file.

use std::path::PathBuf;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use http::{HeaderMap, Uri, header};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use semmoe_tables::Tables;

use super::guard::text;
use crate::backends::tables::{Source, Swapped, change, read, receive};
use crate::backends::{EarlierTables, Member, Model, Origin, RequestError};
use crate::shell::control::Control;

/// Maximum size of a JSON body, which contains only a backend's name and a path.
const MAX_COMMAND_BYTES: usize = 64 << 10;

#[derive(Serialize, JsonSchema)]
pub(super) struct InUse {
    generation: u64,
    /// Whether the configured files are polled for changes.
    watched: bool,
    tables: Vec<Entry>,
    /// Backends whose last table change failed.
    errors: Vec<Failed>,
}

#[derive(Serialize, JsonSchema)]
struct Entry {
    backend: String,
    model: String,
    #[serde(flatten)]
    file: TablesFile,
    dp_ranks: u16,
    /// Local activation rate that the solver measured on held-out requests; null if the file does not record it.
    promised_lar: Option<f64>,
    solver: String,
    source: String,
    /// The tables that a rollback can restore, newest first.
    earlier: Vec<TablesFile>,
}

#[derive(Serialize, JsonSchema)]
struct TablesFile {
    /// Generation of the swap that loaded the tables; identifies them in a rollback.
    generation: u64,
    /// The file; absent for an upload.
    path: Option<PathBuf>,
    digest: String,
    placement_digest: String,
    created: String,
}

impl TablesFile {
    fn of(tables: &Tables, origin: &Origin, generation: u64) -> Self {
        Self {
            generation,
            path: origin.path.clone(),
            digest: tables.digest().to_owned(),
            placement_digest: tables.placement_digest().to_owned(),
            created: tables.provenance().created.clone(),
        }
    }
}

#[derive(Serialize, JsonSchema)]
struct Failed {
    backend: String,
    unix_seconds: u64,
    /// The trigger of the change: `file`, `upload`, `rollback`, `switch`, `watch` or `configuration`.
    by: &'static str,
    cause: String,
}

/// A file below `server.tables_root`.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Command {
    backend: String,
    path: PathBuf,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Rollback {
    backend: String,
    /// Generation of the earlier tables; the newest if absent.
    #[serde(default)]
    generation: Option<u64>,
}

pub(super) fn collect(control: &Control) -> InUse {
    let snapshot = control.backends.snapshot();
    let failed = |(_, member): (&Arc<Model>, &Member)| {
        let trouble = member.backend.tables_trouble().or_else(|| member.unread.clone())?;
        let backend = member.backend.name.clone();
        Some(Failed { backend, unix_seconds: trouble.unix_seconds, by: trouble.by, cause: trouble.error.to_string() })
    };
    InUse {
        generation: snapshot.generation,
        watched: snapshot.config.tables.watch.is_some(),
        tables: snapshot.members().filter_map(|(model, member)| entry(model, member)).collect(),
        errors: snapshot.members().filter_map(failed).collect(),
    }
}

fn entry(model: &Model, member: &Member) -> Option<Entry> {
    let loaded = member.tables.as_ref()?;
    let tables = &loaded.tables;
    let earlier = |earlier: &EarlierTables| TablesFile::of(&earlier.tables, &earlier.origin, earlier.generation);
    Some(Entry {
        backend: member.backend.name.clone(),
        model: model.name.clone(),
        file: TablesFile::of(tables, &loaded.origin, loaded.generation),
        dp_ranks: tables.dp_ranks(),
        promised_lar: tables.promised_lar(),
        solver: tables.solver().to_owned(),
        source: tables.provenance().source.clone(),
        earlier: member.earlier.iter().map(earlier).collect(),
    })
}

pub(super) async fn load(State(control): State<Arc<Control>>, request: Request) -> Result<Json<Swapped>, RequestError> {
    let (head, body) = request.into_parts();
    // A query that names the backend marks an upload. Everything else is a command, whatever content type `curl -d`
    // sets.
    let (backend, source) = match backend_of(&head.uri).filter(|_| !is_json(&head.headers)) {
        None => {
            let Command { backend, path } =
                command(&control, body, "{\"backend\", \"path\"}, or a file as the body with ?backend=NAME").await?;
            (backend, Source::File(path))
        }
        Some(backend) => {
            // Reject an upload for an unknown backend before reading it.
            let known = control.backends.snapshot().find(&backend);
            known.ok_or_else(|| RequestError::UnknownBackend { name: backend.clone() })?;
            let copy = receive(&control.backends, &backend, body).await?;
            (backend, Source::Upload(copy))
        }
    };
    loaded(&control, backend, source).await
}

pub(super) async fn rollback(State(control): State<Arc<Control>>, body: Body) -> Result<Json<Swapped>, RequestError> {
    let Rollback { backend, generation } =
        command(&control, body, "{\"backend\"} and optionally {\"generation\"}").await?;
    loaded(&control, backend, Source::Earlier(generation)).await
}

async fn loaded(control: &Arc<Control>, backend: String, source: Source) -> Result<Json<Swapped>, RequestError> {
    let control = Arc::clone(control);
    to_its_end(async move { change(&control.backends, backend, source).await }).await
}

/// Runs a change in its own task, so that a client that disconnects does not interrupt it halfway.
pub(super) async fn to_its_end<T: Send + 'static>(
    change: impl Future<Output = Result<T, RequestError>> + Send + 'static,
) -> Result<Json<T>, RequestError> {
    let done = tokio::spawn(change).await;
    done.unwrap_or_else(|error| Err(error.into())).map(Json)
}

pub(super) async fn command<T: DeserializeOwned>(
    control: &Control,
    body: Body,
    expected: &str,
) -> Result<T, RequestError> {
    let bytes = read(body, MAX_COMMAND_BYTES, control.backends.config().timeouts.body).await?;
    serde_json::from_slice(&bytes)
        .map_err(|source| RequestError::Command { expected: expected.to_owned(), source: source.into() })
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = text(headers, &header::CONTENT_TYPE).split(';').next();
    kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

fn backend_of(uri: &Uri) -> Option<String> {
    #[derive(Deserialize)]
    struct Query {
        backend: String,
    }
    axum::extract::Query::<Query>::try_from_uri(uri).ok().map(|query| query.0.backend)
}
