//! Live local activation rate: a share of the requests asks the engine which experts their tokens were routed to.
//!
//! | part | what |
//! |---|---|
//! | `sample` | a request that asks, and what happens when an engine refuses |
//! | `cutter`, `edit` | the routed experts cut out of the answer, frame by frame |
//! | `observe`, `local` | an answer checked; which of its activations were local |
//! | `drift` | the alarm |
//! | `rolling`, `files` | the rolling profile |
//! | `traces` | whole requests, only if configured |
//! | `seen`, `kept` | a request until its answer is evaluated; entries per model, with their times |
//! | `task` | the worker thread behind the data plane: everything but the cutting |
//!
//! Only counts are kept, and requests only if `trace_dir` is set. See `docs/profile-and-solve.md`.

pub(crate) mod backend;
mod cutter;
mod drift;
mod edit;
mod files;
mod kept;
mod local;
mod observe;
mod rolling;
mod sample;
mod seen;
mod task;
mod traces;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use crate::observe::metrics::LiveMetrics;
use backend::BackendLive;
use rolling::Rolling;
use seen::Observation;
use semmoe_engines::SharedError;
use traces::Traces;

pub(crate) use backend::Figures;
pub(crate) use edit::Edit;
pub(crate) use kept::now as unix_seconds;
pub(crate) use sample::Sample;
pub(crate) use seen::Seen;
pub(crate) use task::{Task, write_profiles};

/// Answers that wait for evaluation; each may be as long as the configuration allows.
const WAITING: usize = 16;

/// Shared by the data plane, the task and the admin plane.
pub(crate) struct Live {
    /// Full if too many are waiting.
    queue: mpsc::Sender<Observation>,
    /// The receiving end, until the task takes it.
    waiting: Mutex<Option<mpsc::Receiver<Observation>>>,
    profiles: Mutex<BTreeMap<String, ModelProfile>>,
    traces: Mutex<Traces>,
    metrics: LiveMetrics,
}

/// The rolling profile of one model, and its file.
pub(crate) struct ModelProfile {
    pub(crate) rolling: Rolling,
    pub(crate) file: PathBuf,
    /// Unix time in seconds and the result of the last write.
    pub(crate) written: Option<(u64, Result<(), SharedError>)>,
}

impl Live {
    pub(crate) fn new(metrics: LiveMetrics) -> Self {
        let (queue, waiting) = mpsc::channel(WAITING);
        let waiting = Mutex::new(Some(waiting));
        Self { queue, waiting, profiles: Mutex::default(), traces: Mutex::default(), metrics }
    }

    /// Records that an engine does not send routed experts: it is not sampled again until the next probe.
    fn note_refusal(&self, backend: &BackendLive, what: &'static str) {
        if backend.refuse() {
            self.metrics.refused(&backend.name, true);
            tracing::warn!(
                backend = backend.name,
                "the engine {what}, so it is no longer asked: was it started with --enable-return-routed-experts?"
            );
        }
    }

    /// Records that an answer of vLLM contains routed experts: it runs with its flag, even if an earlier answer lacked
    /// them.
    pub(crate) fn note_unasked(&self, backend: &BackendLive) {
        if backend.note_unasked() {
            self.metrics.refused(&backend.name, false);
        }
    }

    /// Counts a due request that could not be sampled.
    pub(crate) fn note_unfit(&self, backend: &BackendLive) {
        backend.note_unfit();
        self.metrics.sampled(&backend.name, "unfit");
    }

    pub(crate) fn profiles(&self) -> MutexGuard<'_, BTreeMap<String, ModelProfile>> {
        self.profiles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn traces(&self) -> MutexGuard<'_, Traces> {
        self.traces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
