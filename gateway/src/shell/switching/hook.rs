//! A switch through the worker's `/switch`: prepare, commit, and every way in which they can fail.
//!
//! Before the commit an abort can undo everything, and does so after a failure. From the commit on the worker completes
//! the switch by itself, in the new layout or back in the old one; if its reply is lost, its status names the layout.

use std::sync::Arc;
use std::time::{Duration, Instant};

use semmoe_engines::http::{AnswerLimits, HttpError};
use semmoe_engines::switch::{self, SwitchAction, SwitchRequest, SwitchState, SwitchStatus, SwitchTarget};
use tokio_util::sync::CancellationToken;

use super::{Move, Outcome};
use crate::backends::{Aside, Backend};
use crate::config::{Meanwhile, SwitchConfig};

/// Maximum size of a status, which usually has a few hundred bytes.
const ANSWER_BYTES: usize = 64 << 10;
/// Interval between status polls after a reply was lost.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Diverts requests to other backends until dropped.
struct Spared<'a>(&'a Backend);

impl<'a> Spared<'a> {
    fn new(backend: &'a Backend) -> Self {
        backend.gate.set_aside(Aside::Switching, true);
        Self(backend)
    }
}

impl Drop for Spared<'_> {
    fn drop(&mut self) {
        self.0.gate.set_aside(Aside::Switching, false);
    }
}

/// A worker's switch route.
pub(super) struct Hook<'a> {
    pub(super) backend: &'a Arc<Backend>,
    pub(super) rules: &'a SwitchConfig,
}

impl Hook<'_> {
    /// Queries the state of the worker's switch.
    pub(super) async fn status(&self) -> Result<SwitchStatus, HttpError> {
        switch::status(&self.backend.client, self.backend.config.first_url(), &limits(self.rules.prepare)).await
    }

    async fn post(&self, request: &SwitchRequest, limit: Duration) -> Result<SwitchStatus, HttpError> {
        switch::switch(&self.backend.client, self.backend.config.first_url(), request, &limits(limit)).await
    }

    /// Undoes a prepare. A worker that does not receive the abort discards a prepared switch by itself.
    async fn abort(&self) {
        let request = SwitchRequest { action: Some(SwitchAction::Abort), ..SwitchRequest::default() };
        if let Err(error) = self.post(&request, self.rules.prepare).await {
            tracing::debug!(backend = self.backend.name, %error, "could not abort a prepared switch");
        }
    }

    /// Switches the worker.
    pub(super) async fn switch(&self, requested: Move, stop: &CancellationToken) -> Outcome {
        let before = match self.status().await {
            Ok(status) if status.state == SwitchState::Stable => status,
            Ok(_) => return Outcome::Refused { cause: "another switch is in progress".to_owned() },
            Err(error) => return Outcome::Lost { cause: error.reason() },
        };
        let name = self.rules.names[requested.to].as_str();
        if before.layout != self.rules.names[requested.from] {
            return Outcome::Refused { cause: format!("it is now in layout '{}'", before.layout) };
        }
        if let Err(outcome) = self.prepare(name, before.epoch, stop).await {
            return outcome;
        }
        if stop.is_cancelled() {
            self.abort().await;
            return Outcome::Stopped;
        }
        let _spared = (self.rules.meanwhile == Meanwhile::Redirect).then(|| Spared::new(self.backend));
        self.commit(name, before.epoch, stop).await
    }

    async fn prepare(&self, name: &str, epoch: u64, stop: &CancellationToken) -> Result<(), Outcome> {
        let request = SwitchRequest {
            to: Some(SwitchTarget::Layout(name.to_owned())),
            if_epoch: Some(epoch),
            action: Some(SwitchAction::Prepare),
            ..SwitchRequest::default()
        };
        let answer = tokio::select! {
            answer = self.post(&request, self.rules.prepare) => answer,
            () = stop.cancelled() => {
                self.abort().await;
                return Err(Outcome::Stopped);
            }
        };
        match answer {
            Ok(status) if status.state == SwitchState::Prepared && status.epoch == epoch => Ok(()),
            Ok(status) => {
                self.abort().await;
                let cause = format!(
                    "it did not prepare; its state is {:?} at epoch {}, expected {epoch}",
                    status.state, status.epoch
                );
                Err(Outcome::Refused { cause })
            }
            Err(error) if error.status().is_some() => Err(Outcome::Refused { cause: error.reason() }),
            Err(error) => {
                self.unreachable(&error);
                self.abort().await;
                Err(Outcome::Lost { cause: format!("no response to the prepare: {}", error.reason()) })
            }
        }
    }

    async fn commit(&self, name: &str, epoch: u64, stop: &CancellationToken) -> Outcome {
        let action = Some(SwitchAction::Commit);
        let request = SwitchRequest { if_epoch: Some(epoch), action, ..SwitchRequest::default() };
        let began = Instant::now();
        let answer = tokio::select! {
            answer = self.post(&request, self.rules.commit) => answer,
            // The worker completes the switch by itself, whether or not a caller still waits.
            () = stop.cancelled() => return Outcome::Stopped,
        };
        match answer {
            Ok(status) => self.judge(&status, name, epoch, began),
            Err(error) if error.status().is_some_and(|status| status < 500) => {
                Outcome::RolledBack { cause: error.reason() }
            }
            Err(error) => {
                self.unreachable(&error);
                tokio::select! {
                    outcome = self.settle(name, epoch, began, &error) => outcome,
                    () = stop.cancelled() => Outcome::Stopped,
                }
            }
        }
    }

    /// Determines the outcome of a finished switch from the status after it.
    fn judge(&self, status: &SwitchStatus, name: &str, epoch: u64, began: Instant) -> Outcome {
        if status.layout == name && status.epoch > epoch {
            let seconds = status.last_seconds.unwrap_or_else(|| began.elapsed().as_secs_f64());
            return Outcome::Committed { seconds };
        }
        Outcome::RolledBack { cause: format!("it is in layout '{}' at epoch {}", status.layout, status.epoch) }
    }

    /// Determines the outcome of a commit whose reply was lost or reports that the worker failed.
    async fn settle(&self, name: &str, epoch: u64, began: Instant, error: &HttpError) -> Outcome {
        loop {
            let status = self.status().await;
            match &status {
                Ok(status) if status.state == SwitchState::Stable => {
                    return match self.judge(status, name, epoch, began) {
                        Outcome::RolledBack { cause } => {
                            Outcome::RolledBack { cause: format!("{}; {cause}", error.reason()) }
                        }
                        outcome => outcome,
                    };
                }
                Ok(status) if status.state == SwitchState::Prepared => {
                    self.abort().await;
                    return Outcome::RolledBack { cause: format!("the commit was not delivered: {}", error.reason()) };
                }
                Ok(_) => {}
                Err(gone) if !gone.may_have_been_sent() => {
                    self.backend.suspect();
                    return Outcome::Lost { cause: format!("the worker is gone: {}", gone.reason()) };
                }
                Err(_) => {}
            }
            if began.elapsed() >= self.rules.commit {
                self.abort().await;
                let state = status.map_or_else(|error| error.reason(), |status| format!("it is {:?}", status.state));
                let seconds = self.rules.commit.as_secs_f64();
                return Outcome::Lost { cause: format!("not finished within {seconds} s: {state}") };
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn unreachable(&self, error: &HttpError) {
        if !error.may_have_been_sent() {
            self.backend.suspect();
        }
    }
}

fn limits(timeout: Duration) -> AnswerLimits {
    AnswerLimits { timeout, max_bytes: ANSWER_BYTES }
}
