//! One engine behind the gateway: who it is and how it is. Lives as long as the gateway, through every reload.

use std::sync::{Mutex, PoisonError};

use semmoe_engines::Engine;
use semmoe_engines::http::BaseUrl;
use semmoe_engines::probe::Probe;
use tokio::sync::{Notify, watch};

use crate::config::BackendConfig;

/// Whether a backend gets requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Not probed yet.
    Unknown,
    /// It answered, and what it told fits its tables.
    Healthy,
    /// It does not answer, or what it told does not fit.
    Unhealthy {
        /// One sentence.
        cause: String,
    },
}

impl Health {
    /// Whether it gets requests.
    pub fn is_healthy(&self) -> bool {
        *self == Self::Healthy
    }
}

/// One backend.
pub(crate) struct Backend {
    pub(crate) name: String,
    pub(crate) engine: Engine,
    pub(crate) url: BaseUrl,
    pub(crate) configured_ranks: Option<u16>,
    /// What the last successful probe found.
    probe: Mutex<Option<Probe>>,
    health: watch::Sender<Health>,
    /// Wakes the prober before its interval is over.
    suspicion: Notify,
}

impl Backend {
    pub(crate) fn new(config: &BackendConfig) -> Self {
        Self {
            name: config.name.clone(),
            engine: config.engine,
            url: config.url.clone(),
            configured_ranks: config.ranks,
            probe: Mutex::new(None),
            health: watch::Sender::new(Health::Unknown),
            suspicion: Notify::new(),
        }
    }

    pub(crate) fn health(&self) -> Health {
        self.health.borrow().clone()
    }

    /// Sees every change of health from now on.
    pub(crate) fn watch_health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    /// Returns whether anything changed.
    pub(crate) fn set_health(&self, health: Health) -> bool {
        self.health.send_if_modified(|current| {
            let changed = *current != health;
            *current = health;
            changed
        })
    }

    /// A request could not reach it: probe it now.
    pub(crate) fn suspect(&self) {
        self.suspicion.notify_one();
    }

    /// Returns when somebody suspects it.
    pub(crate) async fn suspected(&self) {
        self.suspicion.notified().await;
    }

    pub(crate) fn last_probe(&self) -> Option<Probe> {
        self.probe.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_probe(&self, probe: Probe) {
        *self.probe.lock().unwrap_or_else(PoisonError::into_inner) = Some(probe);
    }
}
