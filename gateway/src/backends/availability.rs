//! Opens and closes ranks according to the health and gates of their backends, and feeds request outcomes to the
//! circuit breakers.

use std::sync::Arc;
use std::time::Instant;

use crate::backends::breaker::{BreakerRules, Outcome, State, TrialId};
use crate::backends::gate::Gate;
use crate::backends::{Backend, Backends, Model};

/// A request admitted through a half-open breaker. Dropping it without a verdict frees its slot.
pub(crate) struct Trial {
    backends: Arc<Backends>,
    backend: Arc<Backend>,
    id: TrialId,
    ended: bool,
}

impl Trial {
    /// Returns `None` if the maximum number of trials is already running.
    pub(crate) fn begin(backends: &Arc<Backends>, backend: &Arc<Backend>, rules: &BreakerRules) -> Option<Self> {
        let id = backend.gate.begin_trial(rules)?;
        Some(Self { backends: Arc::clone(backends), backend: Arc::clone(backend), id, ended: false })
    }

    fn end(&mut self, outcome: Option<Outcome>) {
        if !std::mem::replace(&mut self.ended, true) {
            self.backends.change_gate(&self.backend, |gate, rules| {
                gate.change(|breaker| breaker.end_trial(Instant::now(), self.id, outcome, rules));
            });
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.end(None);
    }
}

impl Backends {
    /// Records a request's outcome.
    pub(crate) fn judge(&self, backend: &Arc<Backend>, trial: Option<Trial>, outcome: Outcome) {
        if let Some(mut trial) = trial {
            trial.end(Some(outcome));
            return;
        }
        let gate = &backend.gate;
        if !gate.is_news(outcome) {
            return;
        }
        let rules = self.config().breaker;
        if !gate.change(|breaker| breaker.note(outcome, &rules)) {
            return;
        }
        self.change_gate(backend, |gate, rules| {
            // Never open the breaker of the last backend: a bad response is better than none.
            if self.is_last(backend) {
                self.metrics.faults.breaker_changed(&backend.name, "spared");
            } else if gate.state() == State::Closed {
                gate.change(|breaker| breaker.open(Instant::now(), rules));
            }
        });
    }

    /// Half-opens the breaker if its open period is over.
    pub(crate) fn poll_breaker(&self, backend: &Arc<Backend>) {
        self.change_gate(backend, |gate, _| {
            gate.change(|breaker| breaker.half_open_if_due(Instant::now()));
        });
    }

    /// Drains a backend, or ends its drain. Returns false if the name matches neither a backend nor a remembered drain.
    pub(crate) fn set_draining(&self, name: &str, draining: bool) -> bool {
        let _changing = self.changing();
        let snapshot = self.snapshot();
        let Some(at) = snapshot.find(name) else {
            return if draining { self.drains.holds(name) } else { self.drains.forget(name) };
        };
        let backend = &snapshot.at(at).1.backend;
        self.drains.set(name, draining);
        self.drain_or_not(backend, draining);
        self.refresh(backend);
        true
    }

    /// Drains a joining backend if one with that name was drained before. The caller holds [`Backends::changing`].
    pub(crate) fn keep_drained(&self, backend: &Backend) {
        if self.drains.holds(&backend.name) {
            self.drain_or_not(backend, true);
            tracing::warn!(backend = backend.name, "backend rejoined and is still drained: undrain it to let it serve");
        }
    }

    fn drain_or_not(&self, backend: &Backend, draining: bool) {
        backend.gate.set_draining(draining);
        self.metrics.faults.draining(&backend.name, draining);
    }

    fn change_gate(&self, backend: &Arc<Backend>, change: impl FnOnce(&Gate, &BreakerRules)) {
        let _changing = self.changing();
        change(&backend.gate, &self.config().breaker);
        self.refresh(backend);
    }

    /// Whether no other backend of the same model accepts requests normally.
    fn is_last(&self, backend: &Arc<Backend>) -> bool {
        let snapshot = self.snapshot();
        let Some(at) = snapshot.position(backend) else { return false };
        let mut members = snapshot.models[at.model].members.iter().enumerate();
        !members.any(|(other, member)| other != at.member && can_serve(&member.backend) && is_closed(&member.backend))
    }

    /// Opens and closes a model's ranks according to the health and gates of its backends. The caller holds
    /// [`Backends::changing`].
    pub(crate) fn refresh(&self, backend: &Arc<Backend>) {
        let snapshot = self.snapshot();
        if let Some(at) = snapshot.position(backend) {
            self.refresh_model(&snapshot.models[at.model]);
        }
    }

    /// Opens and closes all ranks of one of the current snapshot's models, and wakes requests waiting for a rank.
    pub(crate) fn refresh_model(&self, model: &Model) {
        self.spare_the_last(model);
        for (index, member) in model.members.iter().enumerate() {
            model.pool.set_available(index, member.backend.takes_requests());
            self.note_breaker(&member.backend);
        }
        model.queue.wake_all();
    }

    /// If no backend that could serve has a closed breaker, closes the breakers of them all.
    fn spare_the_last(&self, model: &Model) {
        let able = || model.members.iter().map(|member| &member.backend).filter(|backend| can_serve(backend));
        if able().any(|backend| is_closed(backend)) {
            return;
        }
        for backend in able() {
            backend.gate.change(|breaker| breaker.close(Instant::now()));
            self.metrics.faults.breaker_changed(&backend.name, "spared");
        }
    }

    fn note_breaker(&self, backend: &Backend) {
        let breaker = backend.gate.breaker();
        let state = breaker.state();
        let (name, number) = (backend.name.as_str(), state as i64);
        if self.metrics.faults.breaker(name, number) == number {
            return;
        }
        self.metrics.faults.breaker_changed(name, state.name());
        match state {
            State::Open => {
                let seconds =
                    breaker.open_until().map(|until| until.saturating_duration_since(Instant::now()).as_secs_f64());
                tracing::warn!(
                    backend = name,
                    seconds,
                    "circuit breaker opened after consecutive failures: no requests are sent for now"
                );
                // Its watcher must learn when to half-open the breaker.
                backend.suspect();
            }
            State::HalfOpen => tracing::info!(backend = name, "circuit breaker half-open: sending trial requests"),
            State::Closed => tracing::info!(backend = name, "circuit breaker closed: backend receives requests again"),
        }
    }
}

fn can_serve(backend: &Backend) -> bool {
    backend.health().is_healthy() && !backend.gate.is_draining()
}

fn is_closed(backend: &Backend) -> bool {
    backend.gate.state() == State::Closed
}
