//! The state shared by all requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http::HeaderMap;
use tokio::sync::Semaphore;

use crate::backends::{Backends, RequestError};
use crate::data::body_memory::BodyMemory;
use crate::data::stall::AnswerMemory;
use crate::data::trust::{self, Caller};
use crate::observe::{Live, Metrics, Tracer, unix_seconds};

/// Shared state for requests to engines: the backends, and limits.
pub(crate) struct DataPlane {
    pub(crate) backends: Arc<Backends>,
    pub(crate) metrics: Arc<Metrics>,
    pub(super) live: Arc<Live>,
    /// Set if requests are traced.
    pub(super) tracer: Option<Arc<Tracer>>,
    /// Limits the prompts scored concurrently off the network threads to one per core; others wait.
    pub(super) scoring: Arc<Semaphore>,
    /// A separate lane, one at a time, for prompts that may take seconds to tokenize, such as megabytes of a single
    /// word. Other long prompts do not wait behind them.
    pub(super) scoring_huge: Arc<Semaphore>,
    /// Limits the concurrent scans of long bodies whose prompts took too long to score.
    pub(super) skimming: Arc<Semaphore>,
    pub(crate) body_memory: BodyMemory,
    pub(crate) answer_memory: Arc<AnswerMemory>,
    draining: AtomicBool,
    closing: AtomicBool,
    pub(crate) started_unix_seconds: u64,
}

impl DataPlane {
    pub(crate) fn new(backends: Arc<Backends>, live: Arc<Live>, tracer: Option<Arc<Tracer>>) -> Self {
        let metrics = Arc::clone(&backends.metrics);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let answers = AnswerMemory::new(backends.config().limits.answer_memory_bytes, metrics.memory.clone());
        Self {
            backends,
            metrics,
            live,
            tracer,
            scoring: Arc::new(Semaphore::new(cores)),
            scoring_huge: Arc::new(Semaphore::new(1)),
            skimming: Arc::new(Semaphore::new(cores)),
            body_memory: BodyMemory::default(),
            answer_memory: Arc::new(answers),
            draining: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            started_unix_seconds: unix_seconds(),
        }
    }

    /// Whether a path other than the gateway's own routes is forwarded to engines.
    pub(super) fn passes(&self, path: &str) -> bool {
        self.backends.current.load().config.server.extra_routes.iter().any(|route| route == path)
    }

    /// Authenticates a request, and removes its key from the headers if the engine must not see it.
    pub(super) fn admit(&self, headers: &mut HeaderMap) -> Result<Caller, RequestError> {
        trust::admit(&self.backends.current.load().config.auth, headers, &self.metrics)
    }

    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Ends the grace period: requests that are still running end with an error.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}
