//! Live local activation rate: for a share of the requests the engine is asked which experts its tokens took.
//!
//! | part | what |
//! |---|---|
//! | `sample` | which requests ask, and what happens when an engine refuses |
//! | `cutter`, `edit` | the routed experts cut out of the answer, frame by frame |
//! | `observe`, `local` | an answer checked; which of its activations were local |
//! | `drift` | the alarm |
//! | `rolling`, `files` | the rolling profile |
//! | `traces` | whole requests, only where that is asked for |
//! | `task` | the thread of work behind the data plane: all but the cutting happens there |
//!
//! Counts alone are kept, and never a request unless `trace_dir` asks for it. See `docs/profile-and-solve.md`.

pub(crate) mod backend;
mod cutter;
mod drift;
mod edit;
mod files;
mod local;
mod observe;
mod rolling;
mod sample;
mod task;
mod traces;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use semmoe_engines::{Dialect, Route};
use semmoe_tables::RankId;
use tokio::sync::mpsc;

use crate::backend::Backend;
use crate::snapshot::Model;
use crate::tables::LoadedTables;
use rolling::Rolling;
use traces::Traces;

pub(crate) use backend::Figures;
pub(crate) use edit::Edit;
pub(crate) use sample::{Sample, note_unasked, send};
pub(crate) use task::{Task, write_profiles};

/// Answers that wait to be looked at; each may be as long as the configuration allows.
const WAITING: usize = 16;

/// Shared by the data plane, the task and the admin plane.
pub(crate) struct Live {
    /// Full where too many wait already.
    queue: mpsc::Sender<Observation>,
    /// Until the task takes it.
    waiting: Mutex<Option<mpsc::Receiver<Observation>>>,
    profiles: Mutex<BTreeMap<String, ModelProfile>>,
    traces: Mutex<Traces>,
}

/// The rolling profile of one model, and its file.
pub(crate) struct ModelProfile {
    pub(crate) rolling: Rolling,
    pub(crate) file: PathBuf,
    /// Unix time in seconds and what came of the last write.
    pub(crate) written: Option<(u64, Result<(), String>)>,
}

/// The entry of a model, made where there is none.
fn found_or<'a, T, E>(
    all: &'a mut BTreeMap<String, T>,
    model: &str,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<&'a mut T, E> {
    match all.entry(model.to_owned()) {
        Entry::Occupied(found) => Ok(found.into_mut()),
        Entry::Vacant(place) => Ok(place.insert(make()?)),
    }
}

/// A sampled request, as it was placed.
struct Seen {
    backend: Arc<Backend>,
    model: Arc<Model>,
    /// Those that it was placed by.
    tables: Arc<LoadedTables>,
    dialect: Dialect,
    route: Route,
    /// The rank it was pinned to.
    rank: Option<RankId>,
    /// The client's.
    body: Bytes,
}

/// A sampled request and its answer.
struct Observation {
    seen: Seen,
    answer: Bytes,
}

impl Live {
    pub(crate) fn new() -> Self {
        let (queue, waiting) = mpsc::channel(WAITING);
        Self { queue, waiting: Mutex::new(Some(waiting)), profiles: Mutex::default(), traces: Mutex::default() }
    }

    pub(crate) fn profiles(&self) -> MutexGuard<'_, BTreeMap<String, ModelProfile>> {
        self.profiles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn traces(&self) -> MutexGuard<'_, Traces> {
        self.traces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn now() -> u64 {
    unix_seconds(SystemTime::now())
}

fn rfc3339(seconds: u64) -> String {
    let time = UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string()
}
