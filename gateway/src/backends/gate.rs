//! Which requests a backend receives, apart from its health: its drain, its circuit breaker, and pauses that it
//! requests.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::backends::breaker::{Breaker, BreakerRules, Outcome, State, TrialId};

/// Longest pause that an engine can request.
const MAX_REST: Duration = Duration::from_secs(60);

/// The breaker is not closed, or has recorded failures.
const NEWS: u8 = 1;
/// The breaker is half-open and admits only trials.
const TRIALS: u8 = 2;
/// The engine requested a pause (Retry-After).
const RESTS: u8 = 4;

/// The backend has consecutive errors, which are compared with other backends' responses.
const ERRORS: u8 = 64;

/// Why requests should preferably go to another backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Aside {
    /// The backend's streams fell silent, and its scheduler answers no probe.
    Silent = 8,
    /// The backend belongs to the pool whose layout is not in use.
    Pool = 16,
    /// The backend is switching its layout.
    Switching = 32,
}

const ASIDE: u8 = Aside::Silent as u8 | Aside::Pool as u8 | Aside::Switching as u8;

/// Controls which requests one backend receives, apart from its health.
#[derive(Default)]
pub(crate) struct Gate {
    breaker: Mutex<Breaker>,
    draining: AtomicBool,
    rest_until: Mutex<Option<Instant>>,
    /// Exceptional conditions: requests read this first, and take a lock only if it is not 0.
    marks: AtomicU8,
}

impl Gate {
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// A copy for display.
    pub(crate) fn breaker(&self) -> Breaker {
        self.lock().clone()
    }

    pub(crate) fn state(&self) -> State {
        self.lock().state()
    }

    /// Whether requests, or at least trials, may be placed here.
    pub(crate) fn is_passable(&self) -> bool {
        !self.is_draining() && (self.marks() & NEWS == 0 || self.state() != State::Open)
    }

    /// Whether a request needs a check before it is placed: it may have to be a trial, or the backend may be paused or
    /// silent.
    pub(crate) fn needs_check(&self) -> bool {
        self.marks() & (TRIALS | RESTS | ASIDE) != 0
    }

    /// Reserves a trial slot; returns `None` if the maximum is running.
    pub(crate) fn begin_trial(&self, rules: &BreakerRules) -> Option<TrialId> {
        self.lock().begin_trial(rules)
    }

    /// Whether the outcome of a non-trial request can affect the breaker.
    pub(crate) fn is_news(&self, outcome: Outcome) -> bool {
        match outcome {
            Outcome::Well => self.marks() & (NEWS | ERRORS) != 0,
            Outcome::Answered => self.marks() & NEWS != 0,
            Outcome::Erred { .. } | Outcome::Failed => true,
        }
    }

    /// Whether the backend's most recent requests ended in errors.
    pub(crate) fn has_errors(&self) -> bool {
        self.marks() & ERRORS != 0
    }

    pub(crate) fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::Relaxed);
    }

    pub(crate) fn is_on_trial(&self) -> bool {
        self.marks() & TRIALS != 0
    }

    pub(crate) fn has_room(&self, rules: &BreakerRules) -> bool {
        self.lock().has_room(rules)
    }

    /// Diverts requests for a limited time, if another backend is available.
    pub(crate) fn rest(&self, now: Instant, time: Duration) {
        let mut until = self.rest_until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = Some(now + time.min(MAX_REST)).max(*until);
        self.marks.fetch_or(RESTS, Ordering::Relaxed);
    }

    /// Starts or stops diverting requests; they are diverted only if another backend is available.
    pub(crate) fn set_aside(&self, why: Aside, aside: bool) {
        if aside {
            self.marks.fetch_or(why as u8, Ordering::Relaxed);
        } else {
            self.marks.fetch_and(!(why as u8), Ordering::Relaxed);
        }
    }

    /// Whether requests are diverted for this reason.
    pub(crate) fn is_aside(&self, why: Aside) -> bool {
        self.marks() & why as u8 != 0
    }

    /// Whether requests should preferably go to another backend.
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

    /// Completes when an open breaker is due to half-open.
    pub(crate) async fn wait_for_trials(&self) {
        let until = self.lock().open_until();
        match until {
            Some(until) => tokio::time::sleep_until(until.into()).await,
            None => std::future::pending().await,
        }
    }

    /// Closes the breaker, because another process may have replaced the engine.
    pub(crate) fn renew(&self) {
        self.change(|breaker| breaker.close(Instant::now()));
    }

    fn marks(&self) -> u8 {
        self.marks.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the breaker and updates the marks.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Breaker) -> T) -> T {
        let mut breaker = self.lock();
        let result = change(&mut breaker);
        let set = match (breaker.state(), breaker.failures()) {
            (State::Closed, 0) => 0,
            (State::Closed, _) | (State::Open, _) => NEWS,
            (State::HalfOpen, _) => NEWS | TRIALS,
        };
        let set = set | if breaker.errors() > 0 { ERRORS } else { 0 };
        self.marks.fetch_or(set, Ordering::Relaxed);
        self.marks.fetch_and(set | !(NEWS | TRIALS | ERRORS), Ordering::Relaxed);
        result
    }
}
