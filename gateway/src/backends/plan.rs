//! Decides which policy places a request: the model's own or, during a canary, sometimes the baseline.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;
use semmoe_routing::{Canary, Needs, Policy, PolicyError, policy_with};

use crate::config::PolicyConfig;
use crate::observe::Metrics;

/// The policy for models whose backends ignore pins; it needs nothing that depends on pins.
const FALLBACK: &str = "least_load";

/// The policy for requests that belong to a session and whose prompts are not read.
const SESSION: &str = "sticky";

/// The policies of one model.
pub(crate) struct Plan {
    /// The model's own policy.
    pub(crate) policy: Arc<dyn Policy>,
    pub(crate) trial: Option<Trial>,
    /// Used when no backend honours pins.
    pub(crate) fallback: Arc<dyn Policy>,
    /// The policy for requests that belong to a session and whose prompts are not read.
    pub(crate) session: Arc<dyn Policy>,
    pub(crate) needs: Needs,
    requests: AtomicU64,
}

/// A canary: a policy on trial.
pub(crate) struct Trial {
    pub(crate) canary: Canary,
    pub(crate) baseline: Arc<dyn Policy>,
    /// Number of requests placed by the policy on trial, and by the baseline.
    pub(crate) tried: Counter,
    pub(crate) spared: Counter,
}

impl Plan {
    pub(crate) fn new(model: &str, config: &PolicyConfig, metrics: &Metrics) -> Result<Self, PolicyError> {
        let make = |name: &str| policy_with(name, &config.settings).map(Arc::<dyn Policy>::from);
        let policy = make(&config.name)?;
        let trial = config.canary.map(|canary| {
            Ok(Trial {
                canary,
                baseline: make(&config.settings.baseline)?,
                tried: metrics.canary(model, "canary"),
                spared: metrics.canary(model, "baseline"),
            })
        });
        let trial = trial.transpose()?;
        let (fallback, session) = (make(FALLBACK)?, make(SESSION)?);
        Ok(Plan { policy, trial, fallback, session, needs: config.needs, requests: AtomicU64::new(0) })
    }

    /// Returns the policy for the next request.
    pub(crate) fn next(&self) -> Arc<dyn Policy> {
        let Some(trial) = &self.trial else { return Arc::clone(&self.policy) };
        if trial.canary.takes(self.requests.fetch_add(1, Ordering::Relaxed)) {
            trial.tried.inc();
            Arc::clone(&self.policy)
        } else {
            trial.spared.inc();
            Arc::clone(&trial.baseline)
        }
    }
}
