//! The state that all parts of one gateway share: the snapshot, the metrics and the settings.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use semmoe_engines::http::AnswerLimits;
use semmoe_engines::probe::Probe;
use semmoe_engines::sglang::ServerInfo;
use semmoe_engines::{Dialect, Route};
use semmoe_text::Shapes;
use tokio::sync::Semaphore;

use crate::backend::{Backend, Health, WatchedBackends};
use crate::body_memory::BodyMemory;
use crate::compat;
use crate::config::Config;
use crate::current::Current;
use crate::drains::Drains;
use crate::error::RequestError;
use crate::live::Live;
use crate::metrics::Metrics;
use crate::otlp::Tracer;
use crate::parity::counts::Change;
use crate::reload::outcome::Reloads;
use crate::snapshot::{Member, Model, Snapshot};
use crate::stall::AnswerMemory;
use crate::switching::Records;
use crate::tables::Lanes;
use crate::trust::{self, Caller};
use crate::verdict::{Closed, Fit};

/// Longest health or information answer of an engine; SGLang's server information holds all of its arguments.
const PROBE_ANSWER_BYTES: usize = 4 << 20;

pub(crate) struct Core {
    pub(crate) current: Current,
    /// Held while the next snapshot is made from the current one, and while availability changes: both are short.
    changing: Mutex<()>,
    pub(crate) metrics: Metrics,
    pub(crate) live: Live,
    /// Units whose layouts the switch policy decides.
    pub(crate) switches: Records,
    pub(crate) reloads: Reloads,
    pub(crate) watched: WatchedBackends,
    /// Backends that are gone or have fewer ranks, with the ranks that they had: requests may still be in flight there.
    retired: Mutex<Vec<(String, u16)>>,
    /// Backends that are drained, also when they come back.
    pub(crate) drains: Drains,
    /// Prompts scored off the network threads at a time: as many as there are cores, the others wait.
    pub(crate) scoring: Arc<Semaphore>,
    /// Those that may take seconds, as megabytes of one word do: one at a time and in a lane of their own, so that
    /// other long prompts do not wait behind them.
    pub(crate) scoring_huge: Arc<Semaphore>,
    /// Long bodies that are looked through at a time, as their prompts took too long to score.
    pub(crate) skimming: Arc<Semaphore>,
    /// Loads of tables.
    pub(crate) tables: Lanes,
    /// Where requests are traced.
    pub(crate) tracer: Option<Arc<Tracer>>,
    draining: AtomicBool,
    closing: AtomicBool,
    pub(crate) body_memory: BodyMemory,
    pub(crate) answer_memory: Arc<AnswerMemory>,
    pub(crate) started_unix_seconds: u64,
}

impl Core {
    pub(crate) fn new(snapshot: Snapshot, metrics: Metrics, tracer: Option<Arc<Tracer>>) -> Self {
        metrics.generation(snapshot.generation);
        let answers = AnswerMemory::new(snapshot.config.limits.answer_memory_bytes, metrics.memory.clone());
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            current: Current::new(snapshot, metrics.tables.waits()),
            changing: Mutex::new(()),
            switches: Records::new(metrics.switching.clone()),
            metrics,
            live: Live::new(),
            reloads: Reloads::default(),
            watched: WatchedBackends::default(),
            retired: Mutex::default(),
            drains: Drains::default(),
            scoring: Arc::new(Semaphore::new(cores)),
            scoring_huge: Arc::new(Semaphore::new(1)),
            skimming: Arc::new(Semaphore::new(cores)),
            tables: Lanes::new(),
            tracer,
            draining: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            body_memory: BodyMemory::default(),
            answer_memory: Arc::new(answers),
            started_unix_seconds: started.map_or(0, |since| since.as_secs()),
        }
    }

    /// The current state; keep it for one request, not longer.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// The settings as they are now, for work that is no request's. A request reads its own snapshot's.
    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.current.load().config)
    }

    /// Whether a path that is not the gateway's own goes to engines.
    pub(crate) fn passes(&self, path: &str) -> bool {
        self.current.load().config.server.extra_routes.iter().any(|route| route == path)
    }

    /// Lets a request in, and takes its key out of its headers where the engine is not to see it.
    pub(crate) fn let_in(&self, headers: &mut HeaderMap) -> Result<Caller, RequestError> {
        trust::admit(&self.current.load().config.auth, headers, &self.metrics)
    }

    /// To be held while the next snapshot is made from the current one, and while availability changes.
    pub(crate) fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a snapshot the current one. `_changing`: it was made from the current one under the lock. Returns how long
    /// it took until readers get it.
    pub(crate) fn swap(&self, _changing: &MutexGuard<'_, ()>, next: Arc<Snapshot>) -> Duration {
        self.metrics.generation(next.generation);
        self.answer_memory.set_limit(next.config.limits.answer_memory_bytes);
        self.current.store(next)
    }

    /// Takes the backends that are in one snapshot and not in the next out of the metrics.
    pub(crate) fn retire(&self, before: &Snapshot, next: &Snapshot) {
        let gone = before.members().filter(|(_, member)| next.find(&member.backend.name).is_none());
        let gone = gone.map(|(_, member)| (member.backend.name.clone(), member.fit.ranks));
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).extend(gone);
        self.sweep();
    }

    /// Forgets the backends that are gone and whose requests have ended.
    pub(crate) fn sweep(&self) {
        let snapshot = self.snapshot();
        for backend in self.drains.follow(|name| snapshot.find(name).is_some(), Instant::now()) {
            tracing::warn!(backend, "backend has been gone for too long: its drain is forgotten");
        }
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|(name, ranks)| match snapshot.find(name) {
            None => !self.metrics.forget_backend(name, *ranks),
            Some(at) => !self.metrics.forget_ranks(name, snapshot.at(at).1.fit.ranks..*ranks),
        });
    }

    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// The time to finish is over: what still runs ends with an error.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    pub(crate) fn probe_limits(&self) -> AnswerLimits {
        AnswerLimits { timeout: self.config().health.timeout, max_bytes: PROBE_ANSWER_BYTES }
    }

    /// For routes that wait for the engine's scheduler, which answers between two steps.
    pub(crate) fn patient_limits(&self) -> AnswerLimits {
        let health = &self.config().health;
        AnswerLimits { timeout: health.timeout.max(health.busy), max_bytes: PROBE_ANSWER_BYTES }
    }

    /// Judges a backend by its report and what is loaded for it now, takes over its number of ranks, and opens it.
    pub(crate) fn admit(&self, backend: &Arc<Backend>, probe: &Probe) -> Result<(), Closed> {
        self.judge_by(backend, probe, true)
    }

    /// The same of a backend that serves already, which goes on as it does.
    pub(crate) fn judge_again(&self, backend: &Arc<Backend>, probe: &Probe) -> Result<(), Closed> {
        self.judge_by(backend, probe, false)
    }

    fn judge_by(&self, backend: &Arc<Backend>, probe: &Probe, admits: bool) -> Result<(), Closed> {
        let changing = self.changing();
        let snapshot = self.snapshot();
        let Some(at) = snapshot.position(backend) else { return Ok(()) };
        // Kept whatever the verdict is: tables that fit it may be loaded next.
        backend.set_probe(probe.clone());
        let (model, member) = snapshot.at(at);
        let fit = model.judge(at.member, Some(probe), snapshot.config.limits.ranks)?;
        if admits {
            self.note_admission(model, member, probe, &fit);
        } else {
            self.note_fit(backend, &fit);
        }
        if member.fit != fit {
            if fit.ranks < member.fit.ranks {
                let vanished = (backend.name.clone(), member.fit.ranks);
                self.retired.lock().unwrap_or_else(PoisonError::into_inner).push(vanished);
            }
            self.swap(&changing, Arc::new(snapshot.with_backend(at, fit, &self.metrics)));
        }
        self.refresh(backend);
        drop(changing);
        self.sweep();
        Ok(())
    }

    /// A backend can serve: it is healthy, and its circuit breaker is closed.
    pub(crate) fn note_admission(&self, model: &Model, member: &Member, probe: &Probe, fit: &Fit) {
        let (backend, tables) = (&member.backend, member.tables.as_ref().map(|loaded| loaded.tables.as_ref()));
        let ranks = fit.ranks;
        backend.live.probed(backend.engine, probe);
        self.metrics.live.refused(&backend.name, false);
        tracing::info!(
            model = model.name,
            backend = backend.name,
            version = probe.version.as_deref().unwrap_or("unknown"),
            ranks,
            placement_by = compat::placement_source(probe, &backend.config, tables),
            "backend probed"
        );
        self.note_fit(backend, fit);
        warn_of_launch(&backend.name, probe, tables.is_some());
        warn_of_routes_without_pins(backend, &fit.dialect, ranks);
        self.note_health(backend, Health::Healthy);
        // The failure before it went away may have been another process's.
        backend.gate.renew();
    }

    /// Reports why a backend's requests are not pinned, if they are not.
    pub(crate) fn note_fit(&self, backend: &Backend, fit: &Fit) {
        self.show_pins(backend, fit);
        if !fit.parity.differs.is_empty() {
            let (backend, shapes) = (backend.name.as_str(), fit.parity.differs);
            let how = fit.parity.detail.as_deref().unwrap_or_default();
            tracing::warn!(backend, %shapes, how, "the engine reads such chats otherwise, so they are routed by load");
        }
        if let Some(why) = &fit.unpinned {
            let (backend, reason) = (backend.name.as_str(), why.reason());
            tracing::warn!(backend, reason, %why, "requests are not pinned, but routed by load");
        }
    }

    /// Compares the prompt's tokens as counted here with the engine's count. Where they differ the engine has another
    /// tokenizer or chat template than the gateway, and scores are not of what it runs.
    pub(crate) fn note_count(&self, backend: &Backend, shapes: Shapes, counted: u64, reported: u64) {
        let differ = self.metrics.prompts.counted(&backend.name, counted == reported);
        if !shapes.is_empty() {
            note_shapes(backend, shapes, counted == reported);
        }
        // The first one, and ever fewer of those that follow.
        if differ.is_power_of_two() && counted != reported {
            tracing::warn!(
                backend = backend.name,
                counted,
                reported,
                differ,
                "the engine counts prompt tokens differently: does it have another tokenizer or chat template?"
            );
        }
    }

    /// The backend of this name.
    pub(crate) fn backend(&self, name: &str) -> Option<Arc<Backend>> {
        self.snapshot().backend(name).cloned()
    }

    /// The names of a backend's model in requests to it; none once it is gone.
    pub(crate) fn names_asked(&self, backend: &Arc<Backend>) -> Vec<String> {
        let snapshot = self.snapshot();
        snapshot.position(backend).map_or_else(Vec::new, |at| snapshot.at(at).0.names_asked(backend))
    }

    /// A backend as it is now; `None` once it is gone.
    pub(crate) fn member(&self, backend: &Arc<Backend>) -> Option<Member> {
        let snapshot = self.snapshot();
        let (_, member) = snapshot.at(snapshot.position(backend)?);
        Some(member.clone())
    }

    /// Closes a backend.
    pub(crate) fn mark_unhealthy(&self, backend: &Arc<Backend>, cause: String) {
        let _changing = self.changing();
        // Nothing is reported about a backend that left in this moment.
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
                Health::Unhealthy { cause } => tracing::warn!(backend = name, cause, "backend gets no requests"),
                _ => tracing::info!(backend = name, "backend is healthy"),
            }
        }
    }
}

/// Several chats of the same shapes whose counts differ are no accident.
fn note_shapes(backend: &Backend, shapes: Shapes, agree: bool) {
    let name = backend.name.as_str();
    match backend.counts.note(shapes, agree) {
        None => {}
        Some(Change::Distrusted(shapes)) => tracing::warn!(
            backend = name,
            %shapes,
            "the engine counts the tokens of such chats otherwise: they are routed by load until the counts agree"
        ),
        Some(Change::Trusted(shapes)) => {
            tracing::info!(backend = name, %shapes, "the counts of such chats agree again")
        }
    }
}

/// Locality saves bytes only where tokens travel to the experts that they need.
fn warn_of_launch(backend: &str, probe: &Probe, has_tables: bool) {
    if has_tables && probe.server.as_ref().is_some_and(ServerInfo::exchanges_nothing) {
        tracing::warn!(
            backend,
            moe_a2a_backend = "none",
            "every EP rank of this engine computes over the same gathered tokens, so affinity saves no bytes; start it with \
             --moe-a2a-backend deepep or another all-to-all backend"
        );
    }
}

/// An engine of this kind and version may read pins on some routes only: the operator must know which requests run
/// where the engine likes.
fn warn_of_routes_without_pins(backend: &Backend, dialect: &Dialect, ranks: u16) {
    let chosen = [Route::Chat, Route::Completions, Route::Responses, Route::Generate];
    let has = |route: &Route| *route != Route::Generate || backend.engine.speaks_sglang();
    let unpinned = chosen.into_iter().filter(|route| has(route) && dialect.reads(*route).is_none());
    let unpinned: Vec<String> = unpinned.map(|route| route.to_string()).collect();
    if ranks > 1 && !unpinned.is_empty() {
        let (backend, routes) = (backend.name.as_str(), unpinned.join(" "));
        tracing::warn!(backend, routes, "this engine version reads no pin on these routes: it chooses the rank itself");
    }
}
