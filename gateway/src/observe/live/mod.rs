//! The live local activation rate: for a fraction of the requests, the gateway asks the engine which experts processed
//! their tokens.
//!
//! | part | purpose |
//! |---|---|
//! | `sample` | sampled requests, and the handling of engines that refuse them |
//! | `cutter`, `edit` | removal of the routed experts from the response, frame by frame |
//! | `observe`, `local` | validation of a response; its local activations |
//! | `drift` | the alarm |
//! | `rolling`, `files` | the rolling profile |
//! | `traces` | whole requests, only if configured |
//! | `seen`, `kept` | sampled requests until their responses are evaluated; per-model entries with timestamps |
//! | `task` | background evaluation, separate from the data plane |
//!
//! Only counts are retained; requests are saved only if `trace_dir` is set. See `docs/profile-and-solve.md`.

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

/// Maximum number of responses waiting for evaluation; each may be as long as the configuration allows.
const WAITING: usize = 16;

/// State shared by the data plane, the task and the admin plane.
pub(crate) struct Live {
    /// Responses waiting for evaluation; when the queue is full, further ones are dropped.
    queue: mpsc::Sender<Observation>,
    /// The receiving end of the queue, until the task takes it.
    waiting: Mutex<Option<mpsc::Receiver<Observation>>>,
    profiles: Mutex<BTreeMap<String, ModelProfile>>,
    traces: Mutex<Traces>,
    metrics: LiveMetrics,
}

/// One model's rolling profile, and its file.
pub(crate) struct ModelProfile {
    pub(crate) rolling: Rolling,
    pub(crate) file: PathBuf,
    /// Unix time in seconds and result of the last write.
    pub(crate) written: Option<(u64, Result<(), SharedError>)>,
}

impl Live {
    pub(crate) fn new(metrics: LiveMetrics) -> Self {
        let (queue, waiting) = mpsc::channel(WAITING);
        let waiting = Mutex::new(Some(waiting));
        Self { queue, waiting, profiles: Mutex::default(), traces: Mutex::default(), metrics }
    }

    /// Records that an engine does not return routed experts; it is not sampled again until the next probe.
    fn note_refusal(&self, backend: &BackendLive, what: &'static str) {
        if backend.refuse() {
            self.metrics.refused(&backend.name, true);
            tracing::warn!(
                backend = backend.name,
                "the engine {what}: not sampling it until the next probe; was it started with --enable-return-routed-experts?"
            );
        }
    }

    /// Records that a vLLM response contains routed experts: the engine runs with its flag, even if an earlier response
    /// lacked them.
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
