//! Which requests a backend gets, besides its health: whether it is drained, its circuit breaker, a rest that it asked
//! for.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::breaker::{Breaker, BreakerRules, State, TrialId};
use crate::snapshot::Model;
use crate::state::Core;

/// An engine may ask for longer, but it is asked again after this time.
const MAX_REST: Duration = Duration::from_secs(60);

/// The breaker is not closed, or it has seen failures.
const NEWS: u8 = 1;
/// The breaker is half open: trials only.
const TRIALS: u8 = 2;
/// It asked not to be asked for a while.
const RESTS: u8 = 4;

/// Why requests should rather go to another backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Aside {
    /// Its streams fell silent, and its scheduler answers no probe.
    Silent = 8,
    /// It is of the pool whose layout is not in use.
    Pool = 16,
    /// It switches its layout.
    Switching = 32,
}

const ASIDE: u8 = Aside::Silent as u8 | Aside::Pool as u8 | Aside::Switching as u8;

/// The gate of one backend.
#[derive(Default)]
pub(crate) struct Gate {
    breaker: Mutex<Breaker>,
    draining: AtomicBool,
    rest_until: Mutex<Option<Instant>>,
    /// The exceptions: requests read this, and take a lock only where it is not 0.
    marks: AtomicU8,
}

impl Gate {
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// A copy, to be shown.
    pub(crate) fn breaker(&self) -> Breaker {
        self.lock().clone()
    }

    fn state(&self) -> State {
        self.lock().state()
    }

    /// Whether requests may be placed on it, all of them or trials.
    pub(crate) fn is_passable(&self) -> bool {
        !self.is_draining() && (self.marks() & NEWS == 0 || self.state() != State::Open)
    }

    /// Whether a request must ask before it is placed: for a trial, or as the backend rests or is silent.
    pub(crate) fn asks_for_care(&self) -> bool {
        self.marks() & (TRIALS | RESTS | ASIDE) != 0
    }

    pub(crate) fn is_on_trial(&self) -> bool {
        self.marks() & TRIALS != 0
    }

    pub(crate) fn has_room(&self, rules: &BreakerRules) -> bool {
        self.lock().has_room(rules)
    }

    /// Sends requests elsewhere for a while, where there is an elsewhere.
    pub(crate) fn rest(&self, now: Instant, time: Duration) {
        let mut until = self.rest_until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = Some(now + time.min(MAX_REST)).max(*until);
        self.marks.fetch_or(RESTS, Ordering::Relaxed);
    }

    /// Sends requests elsewhere from now on, where there is an elsewhere, or no longer.
    pub(crate) fn set_aside(&self, why: Aside, aside: bool) {
        if aside {
            self.marks.fetch_or(why as u8, Ordering::Relaxed);
        } else {
            self.marks.fetch_and(!(why as u8), Ordering::Relaxed);
        }
    }

    /// Whether requests go elsewhere for this.
    pub(crate) fn is_aside(&self, why: Aside) -> bool {
        self.marks() & why as u8 != 0
    }

    /// Whether requests should rather go to another backend.
    pub(crate) fn is_spared(&self, now: Instant) -> bool {
        self.marks() & ASIDE != 0 || self.is_resting(now)
    }

    fn is_resting(&self, now: Instant) -> bool {
        if self.marks() & RESTS == 0 {
            return false;
        }
        let mut until = self.rest_until.lock().unwrap_or_else(PoisonError::into_inner);
        let rests = until.is_some_and(|until| now < until);
        if !rests {
            *until = None;
            self.marks.fetch_and(!RESTS, Ordering::Relaxed);
        }
        rests
    }

    /// Returns when an open breaker's time is over.
    pub(crate) async fn wait_for_trials(&self) {
        let until = self.lock().open_until();
        match until {
            Some(until) => tokio::time::sleep_until(until.into()).await,
            None => std::future::pending().await,
        }
    }

    /// Another process may be there now: its breaker is closed.
    pub(crate) fn renew(&self) {
        self.change(|breaker| breaker.close(Instant::now()));
    }

    fn marks(&self) -> u8 {
        self.marks.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the breaker and keeps the marks true.
    fn change<T>(&self, change: impl FnOnce(&mut Breaker) -> T) -> T {
        let mut breaker = self.lock();
        let result = change(&mut breaker);
        let (set, clear) = match (breaker.state(), breaker.failures()) {
            (State::Closed, 0) => (0, NEWS | TRIALS),
            (State::Closed, _) | (State::Open, _) => (NEWS, TRIALS),
            (State::HalfOpen, _) => (NEWS | TRIALS, 0),
        };
        self.marks.fetch_or(set, Ordering::Relaxed);
        self.marks.fetch_and(!clear, Ordering::Relaxed);
        result
    }
}

/// A request that is let through a half-open breaker; dropping it without a verdict makes room for another one.
pub(crate) struct Trial {
    core: Arc<Core>,
    backend: Arc<Backend>,
    id: TrialId,
    ended: bool,
}

impl Trial {
    /// `None` where enough trials run.
    pub(crate) fn begin(core: &Arc<Core>, backend: &Arc<Backend>, rules: &BreakerRules) -> Option<Self> {
        let id = backend.gate.lock().begin_trial(rules)?;
        Some(Self { core: Arc::clone(core), backend: Arc::clone(backend), id, ended: false })
    }

    fn end(&mut self, good: Option<bool>) {
        if !std::mem::replace(&mut self.ended, true) {
            self.core.change_gate(&self.backend, |gate, rules| {
                gate.change(|breaker| breaker.end_trial(Instant::now(), self.id, good, rules));
            });
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.end(None);
    }
}

impl Core {
    /// A request to a backend went well or failed, in a way that is not the request's own.
    pub(crate) fn judge(&self, backend: &Arc<Backend>, trial: Option<Trial>, good: bool) {
        if let Some(mut trial) = trial {
            trial.end(Some(good));
            return;
        }
        let gate = &backend.gate;
        if good {
            if gate.marks() & NEWS != 0 {
                gate.change(Breaker::passed);
            }
            return;
        }
        let rules = self.config().breaker;
        if !gate.change(|breaker| breaker.failed(&rules)) {
            return;
        }
        self.change_gate(backend, |gate, rules| {
            // The last backend stays: a poor answer is better than none.
            if self.is_last(backend) {
                self.metrics.faults.breaker_changed(&backend.name, "spared");
            } else if gate.state() == State::Closed {
                gate.change(|breaker| breaker.open(Instant::now(), rules));
            }
        });
    }

    /// The time of a breaker may be over.
    pub(crate) fn look_at_breaker(&self, backend: &Arc<Backend>) {
        self.change_gate(backend, |gate, _| {
            gate.change(|breaker| breaker.look(Instant::now()));
        });
    }

    /// New requests go elsewhere, or come again. False if there is no such backend, and none of that name is drained
    /// for when it comes back.
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

    /// A backend joins: it is drained if one of its name was. The caller holds what [`Core::changing`] gives.
    pub(crate) fn keep_drained(&self, backend: &Backend) {
        if self.drains.holds(&backend.name) {
            self.drain_or_not(backend, true);
            tracing::warn!(
                backend = backend.name,
                "backend was drained before and still is: undrain it when it may serve"
            );
        }
    }

    fn drain_or_not(&self, backend: &Backend, draining: bool) {
        backend.gate.draining.store(draining, Ordering::Relaxed);
        self.metrics.faults.draining(&backend.name, draining);
    }

    fn change_gate(&self, backend: &Arc<Backend>, change: impl FnOnce(&Gate, &BreakerRules)) {
        let _changing = self.changing();
        change(&backend.gate, &self.config().breaker);
        self.refresh(backend);
    }

    /// Whether no other backend of its model takes requests as usual.
    fn is_last(&self, backend: &Arc<Backend>) -> bool {
        let snapshot = self.snapshot();
        let Some(at) = snapshot.position(backend) else { return false };
        let mut members = snapshot.models[at.model].members.iter().enumerate();
        !members.any(|(other, member)| other != at.member && can_serve(&member.backend) && is_closed(&member.backend))
    }

    /// Opens and closes the ranks of a model as the health and gates of its backends say. The caller holds what
    /// [`Core::changing`] gives.
    pub(crate) fn refresh(&self, backend: &Arc<Backend>) {
        let snapshot = self.snapshot();
        if let Some(at) = snapshot.position(backend) {
            self.refresh_model(&snapshot.models[at.model]);
        }
    }

    /// The same of all backends of a model of the current snapshot.
    pub(crate) fn refresh_model(&self, model: &Model) {
        self.spare_the_last(model);
        for (index, member) in model.members.iter().enumerate() {
            model.pool.set_available(index, member.backend.takes_requests());
            self.note_breaker(&member.backend);
        }
        model.queue.wake_all();
    }

    /// Where every backend that could serve has failed requests, all of them serve.
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
        let before = self.metrics.faults.breaker(&backend.name, state);
        let name = backend.name.as_str();
        if before == state {
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
                    "consecutive requests to this backend failed: it gets none for a while"
                );
                // Its watcher has to learn of the time.
                backend.suspect();
            }
            State::HalfOpen => tracing::info!(backend = name, "backend gets a few trial requests"),
            State::Closed => tracing::info!(backend = name, "backend gets requests again"),
        }
    }
}

fn can_serve(backend: &Backend) -> bool {
    backend.health().is_healthy() && !backend.gate.is_draining()
}

fn is_closed(backend: &Backend) -> bool {
    backend.gate.state() == State::Closed
}
