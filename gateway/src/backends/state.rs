//! The gateway's backends and the current snapshot, which table loads, probes and reloads change and requests read.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use semmoe_engines::http::AnswerLimits;

use crate::backends::current::Current;
use crate::backends::drains::Drains;
use crate::backends::tables::Lanes;
use crate::backends::{Backend, Health, Member, Snapshot};
use crate::config::Config;
use crate::observe::Metrics;

/// Maximum length of an engine's health or server information response; SGLang's contains all of its arguments.
const PROBE_ANSWER_BYTES: usize = 4 << 20;

/// All backends.
pub(crate) struct Backends {
    pub(crate) current: Current,
    /// Held while the next snapshot is derived from the current one, and while availability changes: both are short.
    changing: Mutex<()>,
    pub(crate) metrics: Arc<Metrics>,
    /// Backends that are gone or have lost ranks, with their former rank counts: requests may still be in flight there.
    retired: Mutex<Vec<(String, u16)>>,
    /// Drained backends; a backend that returns stays drained.
    pub(crate) drains: Drains,
    /// Loads of tables.
    pub(crate) lanes: Lanes,
}

impl Backends {
    pub(crate) fn new(snapshot: Snapshot, metrics: Arc<Metrics>) -> Self {
        metrics.generation(snapshot.generation);
        snapshot.members().for_each(|(_, member)| member.backend.live.follow(member.tables_generation()));
        Self {
            current: Current::new(snapshot, metrics.tables.waits()),
            changing: Mutex::new(()),
            metrics,
            retired: Mutex::default(),
            drains: Drains::default(),
            lanes: Lanes::new(),
        }
    }

    /// Returns the current snapshot; hold it for one request at most.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Returns the current settings, for work that belongs to no request. A request uses its own snapshot's settings.
    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.current.load().config)
    }

    /// Takes the lock that must be held while the next snapshot is derived from the current one, and while availability
    /// changes.
    pub(crate) fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a snapshot the current one. It must have been derived from the current one under the lock `_changing`.
    /// Returns the time until readers saw it.
    pub(crate) fn swap(&self, _changing: &MutexGuard<'_, ()>, next: Arc<Snapshot>) -> Duration {
        self.metrics.generation(next.generation);
        self.current.store(next)
    }

    /// Removes the metrics of backends that are in `before` but not in `next`.
    pub(crate) fn retire(&self, before: &Snapshot, next: &Snapshot) {
        let gone = before.members().filter(|(_, member)| next.find(&member.backend.name).is_none());
        self.retire_ranks(gone.map(|(_, member)| (member.backend.name.clone(), member.fit.ranks)));
        let gone = before.members().filter(|(_, member)| next.position(&member.backend).is_none());
        gone.for_each(|(_, member)| member.backend.live.follow(0));
        self.sweep();
    }

    /// Records that these backends have lost ranks, or are gone.
    pub(crate) fn retire_ranks(&self, had: impl IntoIterator<Item = (String, u16)>) {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).extend(had);
    }

    /// Forgets departed backends whose requests have ended.
    pub(crate) fn sweep(&self) {
        let snapshot = self.snapshot();
        for backend in self.drains.follow(|name| snapshot.find(name).is_some(), Instant::now()) {
            tracing::warn!(backend, "backend absent for too long: forgetting its drain");
        }
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|(name, ranks)| match snapshot.find(name) {
            None => !self.metrics.forget_backend(name, *ranks),
            Some(at) => !self.metrics.forget_ranks(name, snapshot.at(at).1.fit.ranks..*ranks),
        });
    }

    pub(crate) fn probe_limits(&self) -> AnswerLimits {
        AnswerLimits { timeout: self.config().health.timeout, max_bytes: PROBE_ANSWER_BYTES }
    }

    /// Returns the limits for routes that wait for the engine's scheduler, which responds between two steps.
    pub(crate) fn patient_limits(&self) -> AnswerLimits {
        let health = &self.config().health;
        AnswerLimits { timeout: health.timeout.max(health.busy), max_bytes: PROBE_ANSWER_BYTES }
    }

    /// Returns the backend with this name.
    pub(crate) fn backend(&self, name: &str) -> Option<Arc<Backend>> {
        self.snapshot().backend(name).cloned()
    }

    /// Returns the names that requests to a backend use for its model; none once the backend is gone.
    pub(crate) fn names_asked(&self, backend: &Arc<Backend>) -> Vec<String> {
        let snapshot = self.snapshot();
        snapshot.position(backend).map_or_else(Vec::new, |at| snapshot.at(at).0.names_asked(backend))
    }

    /// Returns a backend's current state; `None` once it is gone.
    pub(crate) fn member(&self, backend: &Arc<Backend>) -> Option<Member> {
        let snapshot = self.snapshot();
        let (_, member) = snapshot.at(snapshot.position(backend)?);
        Some(member.clone())
    }

    /// Closes a backend to requests.
    pub(crate) fn mark_unhealthy(&self, backend: &Arc<Backend>, cause: String) {
        let _changing = self.changing();
        // Do not report a backend that has just left.
        if self.snapshot().position(backend).is_some() {
            self.note_health(backend, Health::Unhealthy { cause });
            self.refresh(backend);
        }
    }

    pub(crate) fn note_health(&self, backend: &Backend, health: Health) {
        let name = backend.name.as_str();
        self.metrics.backend_healthy(name, health.is_healthy());
        if backend.set_health(health.clone()) {
            match health {
                Health::Unhealthy { cause } => tracing::warn!(backend = name, cause, "backend receives no requests"),
                _ => tracing::info!(backend = name, "backend is healthy"),
            }
        }
    }
}
