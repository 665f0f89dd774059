//! The attempts of one request, in sequence, until a backend answers or none is left to try. They are independent of
//! the network, so that tests can run schedules without one (`schedule_tests`).

use std::ops::ControlFlow;
use std::sync::Arc;

use super::find::{Found, Patience, find};
use super::retry::{Pending, Tries};
use super::{DataPlane, Job, Placed, RetryReason, Ticket};
use crate::backends::RequestError;
use crate::observe::Stage;

/// The next step.
pub(super) enum Next<A> {
    /// Attempt the request at this place.
    Attempt(Placed),
    /// Nothing was sent, and the model's backends have changed.
    Moved,
    /// Make no further attempt: the client receives the response of the last engine that failed.
    Answer(A),
}

/// The attempts of one request; `A` is an engine's response.
pub(super) struct Attempts<'a, A> {
    pub(super) tries: Tries<'a>,
    pending: Option<Pending<'a, A>>,
    /// Number of attempts whose pins were refused.
    refused_pins: usize,
}

impl<'a, A> Attempts<'a, A> {
    pub(super) fn new(plane: &'a Arc<DataPlane>, job: &'a Job) -> Self {
        Self { tries: Tries::new(plane, job), pending: None, refused_pins: 0 }
    }

    /// Finds a place for the next attempt.
    ///
    /// # Errors
    /// No place is available; after a failed attempt, returns that attempt's error.
    pub(super) async fn next(&mut self, ticket: &mut Ticket) -> Result<Next<A>, RequestError> {
        ticket.enter(Stage::Route);
        let patience = if self.pending.is_none() { Patience::ForAll } else { Patience::ForRoom };
        match (find(self.tries.plane, self.tries.job, &self.tries.tried, patience).await, self.pending.take()) {
            (Ok(Found::Placed(placed)), None) => Ok(Next::Attempt(placed)),
            (Ok(Found::Placed(placed)), Some(pending)) => {
                self.tries.again(pending);
                Ok(Next::Attempt(placed))
            }
            (Ok(Found::Moved), None) => Ok(Next::Moved),
            (Err(error), None) => Err(error),
            // No other backend is left: report the last failure.
            (Ok(Found::Moved) | Err(_), Some(pending)) => self.tries.nowhere(pending).map(Next::Answer),
        }
    }

    /// Allows the request to be placed again after an engine refused its pin. The engine receives no more pins; the
    /// refusal does not count as a backend failure and costs no retry budget.
    ///
    /// # Errors
    /// Returns `error` if more pins were refused than there are backends.
    pub(super) fn without_pin(&mut self, error: RequestError) -> Result<(), RequestError> {
        self.refused_pins += 1;
        let outcome = if self.refused_pins > self.tries.job.model.members.len() { "no_attempts" } else { "again" };
        self.tries.plane.metrics.retry(RetryReason::NoSuchRank.label(), outcome);
        if outcome == "again" { Ok(()) } else { Err(error) }
    }

    /// Records that the attempt on `member` failed; the client would receive `last`: an error, or the engine's own
    /// response. Returns `Some` if that is final.
    ///
    /// # Errors
    /// Returns `last` if it is final, or an error if several engines died while running the request.
    pub(super) async fn failed(
        &mut self,
        ticket: &mut Ticket,
        member: usize,
        reason: RetryReason,
        last: Result<A, RequestError>,
    ) -> Result<Option<A>, RequestError> {
        if self.tries.is_suspect(member, reason).await {
            return Err(self.tries.refuse(reason));
        }
        match self.tries.failed(member, reason, last) {
            ControlFlow::Continue(next) => {
                // The request may have to wait, and no engine works on it meanwhile.
                ticket.unplace();
                self.pending = Some(next);
                Ok(None)
            }
            ControlFlow::Break(last_word) => last_word.map(Some),
        }
    }
}
