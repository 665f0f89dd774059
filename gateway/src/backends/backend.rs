//! One engine behind the gateway: its identity and state, preserved across reloads.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use semmoe_engines::http::{BaseUrl, HttpClient};
use semmoe_engines::probe::{Probe, Target};
use semmoe_engines::sglang::ServerInfo;
use semmoe_engines::tls::ClientTls;
use semmoe_engines::{Dialect, Engine, Version};
use semmoe_tables::RankId;
use semmoe_text::Preparation;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backends::flow::Flow;
use crate::backends::gate::Gate;
use crate::backends::outgoing::Client;
use crate::backends::parity::counts::Counts;
use crate::backends::pins::record::PinRecord;
use crate::backends::stamp::Seen;
use crate::backends::tables::Trouble;
use crate::config::BackendConfig;
use crate::observe::live::backend::BackendLive;

/// Whether a backend receives requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Not probed yet.
    Unknown,
    /// The backend answered and can serve; whether its tables match is a separate question.
    Healthy,
    /// The backend does not answer, or cannot serve.
    Unhealthy {
        /// The cause in one sentence, from an error or a report.
        cause: String,
    },
}

impl Health {
    /// Whether the backend receives requests.
    pub fn is_healthy(&self) -> bool {
        *self == Self::Healthy
    }
}

/// One backend.
pub(crate) struct Backend {
    /// As configured.
    pub(crate) config: BackendConfig,
    pub(crate) name: String,
    pub(crate) engine: Engine,
    /// The HTTP client, with the backend's connections and API key.
    pub(crate) client: HttpClient,
    /// The TLS certificates of its connection, if it uses TLS.
    pub(crate) tls: Option<Arc<ClientTls>>,
    /// Its key and certificate files, as last read.
    pub(crate) files_seen: Seen,
    /// Evidence of whether the backend's pins take effect.
    pub(crate) pins: PinRecord,
    /// The engine's prompt token counts, compared with the gateway's.
    pub(crate) counts: Counts,
    /// Whether the engine reports that it caches no prefixes; an atomic, because every request reads it.
    keeps_no_prefixes: AtomicBool,
    /// Statistics of sampled requests.
    pub(crate) live: Arc<BackendLive>,
    /// The outcome of the last successful probe.
    probe: Mutex<Option<Arc<Probe>>>,
    /// Why the last attempt to change its tables failed.
    tables_trouble: Mutex<Option<Trouble>>,
    health: watch::Sender<Health>,
    /// Conditions other than health for receiving requests.
    pub(crate) gate: Gate,
    /// Its requests waiting for a first chunk, and its streams.
    pub(crate) flow: Arc<Flow>,
    /// Wakes the prober early.
    suspicion: Notify,
    /// The context length in tokens, from the engine's model list; 0 if not reported.
    max_model_len: AtomicU64,
    /// How the engine prepares chats for the chat template: an index into the preparation table.
    preparation: AtomicUsize,
    /// Whether response bytes have arrived since the prober last checked.
    heard: AtomicBool,
    /// When the prober last detected new response bytes.
    last_heard: Mutex<Instant>,
}

/// A backend, and the token that cancels its watcher tasks.
#[derive(Clone)]
pub(crate) struct Watched {
    pub(crate) backend: Arc<Backend>,
    pub(crate) stop: CancellationToken,
}

/// All watched backends and their tasks.
#[derive(Default)]
pub(crate) struct WatchedBackends {
    pub(crate) tasks: TaskTracker,
    /// Cancels all of them.
    pub(crate) stop: CancellationToken,
    pub(crate) backends: Mutex<Vec<Watched>>,
}

/// Returns the preparation table's index for the engine version that a probe reports.
pub(crate) fn preparation_row(engine: Engine, probe: &Probe) -> usize {
    let version = probe.version.as_deref().and_then(Version::parse).map(Version::numbers);
    Preparation::row_of(engine.name(), version)
}

impl Backend {
    pub(crate) fn new(config: &BackendConfig, client: Client) -> Self {
        Self {
            config: config.clone(),
            name: config.name.clone(),
            engine: config.engine,
            client: client.http,
            tls: client.tls,
            files_seen: client.seen,
            pins: PinRecord::default(),
            counts: Counts::default(),
            keeps_no_prefixes: AtomicBool::new(false),
            live: Arc::new(BackendLive::new(&config.name)),
            probe: Mutex::new(None),
            tables_trouble: Mutex::new(None),
            health: watch::Sender::new(Health::Unknown),
            gate: Gate::default(),
            flow: Arc::default(),
            suspicion: Notify::new(),
            max_model_len: AtomicU64::new(0),
            preparation: AtomicUsize::new(Preparation::row_of(config.engine.name(), None)),
            heard: AtomicBool::new(false),
            last_heard: Mutex::new(Instant::now()),
        }
    }

    /// The target of probes that do not list models.
    pub(crate) fn target(&self) -> Target<'_> {
        Target { engine: self.engine, urls: &self.config.urls, rank_base: self.config.rank_base, names: &[] }
    }

    /// Returns the URL for requests to this rank, or the first URL if no rank is given.
    pub(crate) fn url(&self, dialect: &Dialect, rank: Option<RankId>) -> &BaseUrl {
        let of_rank = rank.and_then(|rank| self.config.urls.get(dialect.url_index(rank)));
        of_rank.unwrap_or(self.config.first_url())
    }

    /// Whether prompts sent to a rank can be assumed to be cached there. All engines cache prefixes by default, so an
    /// engine that reports nothing is assumed to do so.
    pub(crate) fn keeps_prefixes(&self) -> bool {
        !self.keeps_no_prefixes.load(Ordering::Relaxed)
    }

    pub(crate) fn health(&self) -> Health {
        self.health.borrow().clone()
    }

    /// Whether requests may be placed here: the backend is healthy and not drained, and its breaker is not open.
    pub(crate) fn takes_requests(&self) -> bool {
        self.health().is_healthy() && self.gate.is_passable()
    }

    /// Returns why the backend is unhealthy, if it is.
    pub(crate) fn cause_of_unhealthy(&self) -> Option<String> {
        match &*self.health.borrow() {
            Health::Unhealthy { cause } => Some(cause.clone()),
            Health::Healthy | Health::Unknown => None,
        }
    }

    /// Returns a receiver that sees every later health change.
    pub(crate) fn watch_health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    /// Sets the health; returns whether it changed.
    pub(crate) fn set_health(&self, health: Health) -> bool {
        self.health.send_if_modified(|current| {
            let changed = *current != health;
            *current = health;
            changed
        })
    }

    /// Triggers an immediate probe, because a request could not reach the backend.
    pub(crate) fn suspect(&self) {
        self.suspicion.notify_one();
    }

    /// Completes once a request reports that it could not reach the backend.
    pub(crate) async fn suspected(&self) {
        self.suspicion.notified().await;
    }

    /// Returns the context length in tokens, if the engine reports it.
    pub(crate) fn max_model_len(&self) -> Option<u64> {
        Some(self.max_model_len.load(Ordering::Relaxed)).filter(|tokens| *tokens > 0)
    }

    /// Records that bytes of a successful response arrived. Most calls change nothing and leave the cache line shared.
    pub(crate) fn hear(&self) {
        if !self.heard.load(Ordering::Relaxed) {
            self.heard.store(true, Ordering::Relaxed);
        }
    }

    /// Returns when bytes of a successful response last arrived, to the precision of the polling interval.
    pub(crate) fn last_heard(&self) -> Instant {
        let mut last = self.last_heard.lock().unwrap_or_else(PoisonError::into_inner);
        if self.heard.swap(false, Ordering::Relaxed) {
            *last = Instant::now();
        }
        *last
    }

    pub(crate) fn tables_trouble(&self) -> Option<Trouble> {
        self.tables_trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records why the tables could not be changed; returns whether the trouble differs from the previous one.
    pub(crate) fn set_tables_trouble(&self, trouble: Option<Trouble>) -> bool {
        let mut known = self.tables_trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *known, trouble);
        before.map(|before| before.error) != known.as_ref().map(|now| now.error.clone())
    }

    pub(crate) fn last_probe(&self) -> Option<Arc<Probe>> {
        self.probe.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the backend's rank count may change while it serves.
    pub(crate) fn can_switch(&self) -> bool {
        self.last_probe().is_some_and(|probe| probe.server.as_ref().is_some_and(ServerInfo::switches))
    }

    /// How the engine prepares chats for its template, by its last reported version.
    pub(crate) fn preparation(&self) -> &'static Preparation {
        Preparation::row(self.preparation.load(Ordering::Relaxed))
    }

    pub(crate) fn set_probe(&self, probe: Probe) {
        let disabled = probe.server.as_ref().is_some_and(|server| server.disable_radix_cache == Some(true));
        self.keeps_no_prefixes.store(disabled, Ordering::Relaxed);
        self.max_model_len.store(probe.max_model_len.unwrap_or(0), Ordering::Relaxed);
        self.preparation.store(preparation_row(self.engine, &probe), Ordering::Relaxed);
        *self.probe.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(probe));
    }
}
