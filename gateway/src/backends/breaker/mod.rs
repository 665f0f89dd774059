//! The circuit breaker of one backend, as a pure state machine: time and rules are arguments.
//!
//! ```text
//!   too many consecutive failures/errors                open period over
//!   closed ------------------------------> open ----------------------------> half open
//!      ^                                    ^  a trial fails: longer than before  |  |
//!      |                                    +-------------------------------------+  |
//!      +-----------------------------------------------------------------------------+
//!                                                    enough trials pass
//! ```
//!
//! A closed breaker admits every request, an open one none, and a half-open one a few at a time, as trials. Outcomes of
//! requests from an earlier phase are ignored.
//!
//! A *failure* means that the backend could not be reached. An *error* may also be the request's fault: a response that
//! reports a server error, breaks off or takes too long. Errors are compared with the outcomes of other backends
//! ([`Errors`]) and remembered while the breaker is open, so one more error reopens it.

mod errors;

use std::time::Instant;

use errors::Errors;

/// When the breaker opens, for how long, and when it closes.
pub(crate) use crate::config::BreakerRules;

/// The states as requests see them; the discriminants are the metric values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    Closed,
    HalfOpen,
    Open,
}

impl State {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::HalfOpen => "half open",
            Self::Open => "open",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Closed { failures: u32 },
    HalfOpen { running: u32, passed: u32 },
    Open { until: Instant },
}

/// A request's outcome, to the extent that the backend is responsible for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The model ran without errors.
    Well,
    /// The backend answered without generating: it refused the request, or the request needed no generation.
    Answered,
    /// The backend reported an error, broke off or took too long; `request` is a digest of the request, if known.
    Erred { request: Option<u64> },
    /// The backend could not be reached.
    Failed,
}

/// The half-open phase that a trial belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrialId(u64);

/// The state machine.
#[derive(Clone, Debug)]
pub(crate) struct Breaker {
    phase: Phase,
    errors: Errors,
    /// When the breaker last closed.
    closed_at: Option<Instant>,
    /// Number of openings since the breaker last stayed closed for a long time.
    pub(crate) openings: u32,
    /// Number of half-open phases so far.
    trial: u64,
}

impl Default for Breaker {
    fn default() -> Self {
        let phase = Phase::Closed { failures: 0 };
        Self { phase, errors: Errors::default(), closed_at: None, openings: 0, trial: 0 }
    }
}

impl Breaker {
    pub(crate) fn state(&self) -> State {
        match self.phase {
            Phase::Closed { .. } => State::Closed,
            Phase::HalfOpen { .. } => State::HalfOpen,
            Phase::Open { .. } => State::Open,
        }
    }

    /// Consecutive failures while closed.
    pub(crate) fn failures(&self) -> u32 {
        match self.phase {
            Phase::Closed { failures } => failures,
            _ => 0,
        }
    }

    /// Consecutive errors that count as evidence.
    pub(crate) fn errors(&self) -> u32 {
        self.errors.count
    }

    /// When an open breaker is due to half-open.
    pub(crate) fn open_until(&self) -> Option<Instant> {
        match self.phase {
            Phase::Open { until } => Some(until),
            _ => None,
        }
    }

    /// Records the outcome of a request that was not a trial. Returns whether the breaker should open; the caller then
    /// opens or spares it.
    pub(crate) fn note(&mut self, outcome: Outcome, rules: &BreakerRules) -> bool {
        let Phase::Closed { failures } = &mut self.phase else { return false };
        *failures = match outcome {
            Outcome::Well | Outcome::Answered => 0,
            Outcome::Erred { .. } => *failures,
            Outcome::Failed => failures.saturating_add(1),
        };
        let too_many = rules.failures > 0 && *failures >= rules.failures;
        self.note_error(outcome, rules) || (outcome == Outcome::Failed && too_many)
    }

    /// Adds an outcome to the consecutive errors; returns whether the breaker should open.
    fn note_error(&mut self, outcome: Outcome, rules: &BreakerRules) -> bool {
        match outcome {
            Outcome::Well => self.errors = Errors::default(),
            Outcome::Erred { request } => return self.errors.add(request, rules.errors),
            Outcome::Answered | Outcome::Failed => {}
        }
        false
    }

    /// Records that another backend of the model answered a request successfully.
    pub(crate) fn answered_elsewhere(&mut self, request: Option<u64>) {
        self.errors.answered_elsewhere(request);
    }

    /// Blocks all requests, for a period that grows with every opening.
    pub(crate) fn open(&mut self, now: Instant, rules: &BreakerRules) {
        let long_ago = |closed: Instant| now.saturating_duration_since(closed) >= rules.open_most;
        if self.state() == State::Closed && self.closed_at.is_some_and(long_ago) {
            self.openings = 0;
        }
        let factor = 2u32.checked_pow(self.openings).unwrap_or(u32::MAX);
        let time = rules.open.saturating_mul(factor).min(rules.open_most.max(rules.open));
        self.openings = self.openings.saturating_add(1);
        self.phase = Phase::Open { until: now + time };
    }

    /// Admits all requests.
    pub(crate) fn close(&mut self, now: Instant) {
        if self.state() != State::Closed {
            self.closed_at = Some(now);
        }
        self.phase = Phase::Closed { failures: 0 };
        self.errors = Errors::default();
    }

    /// Half-opens the breaker if its open period is over; returns whether it did.
    pub(crate) fn half_open_if_due(&mut self, now: Instant) -> bool {
        let over = self.open_until().is_some_and(|until| until <= now);
        if over {
            self.trial += 1;
            self.phase = Phase::HalfOpen { running: 0, passed: 0 };
        }
        over
    }

    /// Whether a trial may begin.
    pub(crate) fn has_room(&self, rules: &BreakerRules) -> bool {
        matches!(self.phase, Phase::HalfOpen { running, .. } if running < rules.trials)
    }

    /// Begins a trial if a slot is free.
    pub(crate) fn begin_trial(&mut self, rules: &BreakerRules) -> Option<TrialId> {
        match &mut self.phase {
            Phase::HalfOpen { running, .. } if *running < rules.trials => {
                *running += 1;
                Some(TrialId(self.trial))
            }
            _ => None,
        }
    }

    /// Ends a trial; `None` if its outcome is inconclusive. Trials from an earlier phase have no effect.
    pub(crate) fn end_trial(&mut self, now: Instant, trial: TrialId, outcome: Option<Outcome>, rules: &BreakerRules) {
        if trial.0 != self.trial {
            return;
        }
        let Phase::HalfOpen { running, passed } = &mut self.phase else { return };
        *running = running.saturating_sub(1);
        let Some(outcome) = outcome else { return };
        // If errors opened the breaker, only a successful generation shows that they are over.
        if outcome == Outcome::Well || (outcome == Outcome::Answered && self.errors.is_empty()) {
            *passed += 1;
            if *passed >= rules.passes {
                return self.close(now);
            }
        }
        if self.note_error(outcome, rules) || outcome == Outcome::Failed {
            self.open(now, rules);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use proptest::prelude::*;

    const RULES: BreakerRules = BreakerRules {
        failures: 3,
        errors: 4,
        open: Duration::from_secs(5),
        open_most: Duration::from_secs(60),
        trials: 2,
        passes: 2,
    };

    fn note(breaker: &mut Breaker, now: Instant, outcome: Outcome) {
        if breaker.note(outcome, &RULES) {
            breaker.open(now, &RULES);
        }
    }

    fn fail(breaker: &mut Breaker, now: Instant) {
        note(breaker, now, Outcome::Failed);
    }

    /// A request unlike any other.
    fn err(breaker: &mut Breaker, now: Instant, request: u64) {
        note(breaker, now, Outcome::Erred { request: Some(request) });
    }

    fn try_once(breaker: &mut Breaker, now: Instant, outcome: Outcome) {
        let trial = breaker.begin_trial(&RULES).unwrap();
        breaker.end_trial(now, trial, Some(outcome), &RULES);
    }

    #[test]
    fn errors_in_a_row_open_it_while_others_answer_and_one_more_opens_it_again() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        for request in 0..3 {
            err(&mut breaker, now, request);
            breaker.answered_elsewhere(None);
        }
        note(&mut breaker, now, Outcome::Answered);
        assert_eq!((breaker.state(), breaker.errors()), (State::Closed, 3), "a refused request runs no model");
        note(&mut breaker, now, Outcome::Well);
        for request in 0..4 {
            assert_eq!((breaker.state(), breaker.failures()), (State::Closed, 0));
            err(&mut breaker, now, request);
            breaker.answered_elsewhere(None);
        }
        assert_eq!(breaker.state(), State::Open);
        let now = now + RULES.open_most;
        assert!(breaker.half_open_if_due(now));
        try_once(&mut breaker, now, Outcome::Erred { request: Some(0) });
        assert_eq!(breaker.state(), State::HalfOpen, "the fault of this request, as far as is known");
        (0..RULES.passes).for_each(|_| try_once(&mut breaker, now, Outcome::Answered));
        assert_eq!(breaker.state(), State::HalfOpen);
        try_once(&mut breaker, now, Outcome::Erred { request: Some(9) });
        assert_eq!(breaker.state(), State::Open);
        let now = now + RULES.open_most;
        assert!(breaker.half_open_if_due(now));
        (0..RULES.passes).for_each(|_| try_once(&mut breaker, now, Outcome::Well));
        assert_eq!((breaker.state(), breaker.errors()), (State::Closed, 0));
    }

    #[test]
    fn failures_in_a_row_open_it_and_passed_trials_close_it() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        fail(&mut breaker, now);
        fail(&mut breaker, now);
        note(&mut breaker, now, Outcome::Answered);
        fail(&mut breaker, now);
        fail(&mut breaker, now);
        assert_eq!((breaker.state(), breaker.failures()), (State::Closed, 2));
        fail(&mut breaker, now);
        assert_eq!(breaker.state(), State::Open);
        // These requests began before it opened.
        note(&mut breaker, now, Outcome::Well);
        fail(&mut breaker, now);
        assert!(!breaker.half_open_if_due(now + Duration::from_millis(4999)));
        let now = now + RULES.open;
        assert!(breaker.half_open_if_due(now));
        let trials: Vec<TrialId> = (0..2).map(|_| breaker.begin_trial(&RULES).unwrap()).collect();
        assert!(breaker.begin_trial(&RULES).is_none());
        breaker.end_trial(now, trials[0], None, &RULES);
        assert!(breaker.has_room(&RULES), "a client that left makes room and proves nothing");
        let third = breaker.begin_trial(&RULES).unwrap();
        breaker.end_trial(now, trials[1], Some(Outcome::Well), &RULES);
        assert_eq!(breaker.state(), State::HalfOpen);
        breaker.end_trial(now, third, Some(Outcome::Well), &RULES);
        assert_eq!(breaker.state(), State::Closed);
    }

    #[test]
    fn it_stays_open_longer_each_time_and_forgets_that_after_a_good_while() {
        let (mut breaker, mut now) = (Breaker::default(), Instant::now());
        breaker.open(now, &RULES);
        for seconds in [5, 10, 20, 40, 60, 60] {
            let until = breaker.open_until().unwrap();
            assert_eq!(until - now, Duration::from_secs(seconds));
            now = until;
            assert!(breaker.half_open_if_due(now));
            try_once(&mut breaker, now, Outcome::Failed);
        }
        breaker.close(now);
        breaker.open(now + Duration::from_secs(59), &RULES);
        assert_eq!(breaker.openings, 8);
        breaker.close(now + Duration::from_secs(59));
        breaker.open(now + Duration::from_secs(119), &RULES);
        assert_eq!(breaker.openings, 1);
    }

    proptest! {
        /// For any sequence of events: trials are few and run only while it is half open; it never stays open longer
        /// than its limit; it opens on enough consecutive failures and on nothing less; late trials change nothing.
        #[test]
        fn laws(steps in proptest::collection::vec((0u8..9, 0u64..20_000), 1..200)) {
            let (mut breaker, mut now) = (Breaker::default(), Instant::now());
            let mut trials: Vec<(u64, TrialId)> = Vec::new();
            let mut in_a_row = 0;
            for (step, millis) in steps {
                now += Duration::from_millis(millis);
                let before = breaker.state();
                match step {
                    0 => { note(&mut breaker, now, Outcome::Well); in_a_row = 0; }
                    7 => {
                        let counted = breaker.errors();
                        err(&mut breaker, now, millis % 9);
                        prop_assert!(counted <= breaker.errors() || counted >= 2 * RULES.errors - 1);
                        if breaker.state() != before {
                            prop_assert!(before == State::Closed && breaker.errors() >= RULES.errors);
                        }
                    }
                    8 => breaker.answered_elsewhere(Some(millis % 9)),
                    1 | 2 => {
                        fail(&mut breaker, now);
                        in_a_row = if before == State::Closed { in_a_row + 1 } else { 0 };
                        prop_assert_eq!(before == State::Closed && in_a_row >= RULES.failures,
                            before == State::Closed && breaker.state() == State::Open);
                    }
                    3 => { breaker.half_open_if_due(now); }
                    4 => {
                        let trial = breaker.begin_trial(&RULES);
                        prop_assert!(trial.is_none() || before == State::HalfOpen);
                        trials.extend(trial.map(|trial| (breaker.trial, trial)));
                    }
                    _ => if !trials.is_empty() {
                        let (time, trial) = trials.remove(millis as usize % trials.len());
                        let erred = Outcome::Erred { request: Some(millis % 7) };
                        let verdict = [None, Some(Outcome::Well), Some(Outcome::Failed), Some(erred)][millis as usize % 4];
                        let current = time == breaker.trial && before == State::HalfOpen;
                        breaker.end_trial(now, trial, verdict, &RULES);
                        prop_assert!(current || breaker.state() == before);
                        if breaker.state() == State::Closed && before != State::Closed { in_a_row = 0; }
                    }
                }
                if breaker.state() == State::HalfOpen {
                    let running = trials.iter().filter(|(time, _)| *time == breaker.trial).count();
                    prop_assert!(running <= RULES.trials as usize);
                    prop_assert_eq!(breaker.has_room(&RULES), running < RULES.trials as usize);
                }
                if let Some(until) = breaker.open_until() {
                    prop_assert!(until <= now + RULES.open_most);
                    in_a_row = 0;
                }
            }
            // It always gets another chance.
            if breaker.state() == State::Open {
                prop_assert!(breaker.half_open_if_due(now + RULES.open_most));
            }
        }
    }
}
