//! Decides whether a request that failed on one backend is sent to another, as long as no part of the response has
//! reached the client.
//!
//! A request is always safe to send elsewhere if no connection was made. If the connection broke before the response
//! head, the engine may already have started; a client that has received nothing cannot notice, so a retry is allowed
//! by default (`retry.after_send`). An engine's report that it cannot serve is trusted, and its own response is relayed
//! if there is no other backend. A request that exhausted the time limit is not retried, as it would wait as long
//! again. No backend is tried twice.
//!
//! A request may itself crash engines. If its engine dies while running it, it is retried once, because engines die of
//! other causes and take many requests with them. If a second engine dies, it is not retried.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderValue, Response, StatusCode, header};
use semmoe_engines::failures::Failure;
use semmoe_engines::http::{AnswerLimits, HttpError};
use semmoe_engines::probe;

use super::{DataPlane, Job};
use crate::backends::{Backend, Paid, RequestError};
use crate::config::RawRetry;

/// Number of engine deaths while running one request after which it is not retried.
const MAX_DEATHS: usize = 2;
/// Time within which a live server accepts a connection.
pub(super) const ALIVE_WITHIN: Duration = Duration::from_secs(1);

/// Why an attempt failed, as far as the next attempt depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryReason {
    /// No connection was made: the engine saw nothing.
    Connect,
    /// No connection was made, because the gateway is out of files or ports.
    Exhausted,
    /// The engine reported that it did not accept the request.
    NotTaken,
    /// The connection broke before the response head: the engine may already have started.
    Broke,
    /// The response broke off before its first chunk.
    BrokeOff,
    /// The backend's probes failed while its response was pending: the engine may already have started.
    Unhealthy,
    /// The time limit expired.
    Slow,
    /// The engine answered with this status.
    Status(u16),
    /// The engine reported a failure before its response had any content.
    Engine(Failure),
    /// The engine does not have the pinned rank, and did not process the request.
    NoSuchRank,
}

impl RetryReason {
    /// Returns the reason behind an attempt's error; `None` if the request could not have been sent to any backend.
    pub(super) fn of(error: &RequestError) -> Option<Self> {
        Some(match error {
            RequestError::Slow { .. } => Self::Slow,
            RequestError::Exhausted { .. } => Self::Exhausted,
            RequestError::Unhealthy { .. } => Self::Unhealthy,
            RequestError::NoSuchRank { .. } => Self::NoSuchRank,
            RequestError::Unreachable { source: HttpError::NotTaken { .. }, .. } => Self::NotTaken,
            RequestError::Unreachable { .. } => Self::Connect,
            RequestError::Broken { source: HttpError::Body { .. }, .. } => Self::BrokeOff,
            RequestError::Broken { .. } => Self::Broke,
            _ => return None,
        })
    }

    /// Returns the reason to try another backend, if the response's status is one.
    pub(crate) fn of_status(status: StatusCode, config: &RawRetry) -> Option<Self> {
        let status = status.as_u16();
        (status >= 400 && config.statuses.contains(&status)).then_some(Self::Status(status))
    }

    fn may_be_retried(self, config: &RawRetry) -> bool {
        match self {
            Self::Connect | Self::NotTaken | Self::NoSuchRank => true,
            Self::Broke | Self::BrokeOff | Self::Unhealthy | Self::Engine(_) => config.after_send,
            // Another backend would also need a connection, or as much time.
            Self::Slow | Self::Exhausted => false,
            Self::Status(status) => config.statuses.contains(&status),
        }
    }

    /// Returns the metric label.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Exhausted => "exhausted",
            Self::NotTaken => "not_taken",
            Self::Broke | Self::BrokeOff => "broke",
            Self::Unhealthy => "ill",
            Self::Slow => "slow",
            Self::Engine(failure) => failure.label(),
            Self::NoSuchRank => "no_such_rank",
            Self::Status(429) => "status_429",
            Self::Status(500) => "status_500",
            Self::Status(502) => "status_502",
            Self::Status(503) => "status_503",
            Self::Status(504) => "status_504",
            Self::Status(_) => "status_5xx",
        }
    }
}

/// Returns the pause that an unavailable engine requests. A 429 does not count, as it concerns one client rather than
/// all.
pub(crate) fn retry_after<B>(response: &Response<B>) -> Option<Duration> {
    if response.status() != StatusCode::SERVICE_UNAVAILABLE {
        return None;
    }
    let seconds: u32 = response.headers().get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds.into()))
}

/// Whether a response comes from a proxy in front of a departed engine: engines return their own errors as JSON. A
/// proxy's 504 does not count, because it only indicates that the request took long.
pub(crate) fn is_not_the_engines<B>(response: &Response<B>) -> bool {
    let kind = || response.headers().get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    matches!(response.status().as_u16(), 502 | 503) && !kind().starts_with(b"application/json")
}

/// A failed attempt that will be retried if a place is available.
pub(crate) struct Pending<'a, A> {
    reason: RetryReason,
    /// The client's response if no place is available: the engine's own response, or an error.
    failed: Result<A, RequestError>,
    /// The budget's grant; `None` if the retry costs no budget.
    paid: Option<Paid<'a>>,
}

/// The attempts of one request. Each retry is counted once: by its outcome, or as unfinished if this is dropped first.
pub(crate) struct Tries<'a> {
    pub(super) plane: &'a Arc<DataPlane>,
    pub(super) job: &'a Job,
    /// Backends that failed, as indices in the model.
    pub(super) tried: Vec<usize>,
    /// Backends that broke off before responding.
    broke: Vec<usize>,
    /// Number of engines that reported themselves dead.
    dead: usize,
    /// Number of backends that did not accept the request; they do not count as attempts.
    not_taken: usize,
    /// Why the current attempt was made, if it is not the first.
    running: Option<RetryReason>,
}

impl<'a> Tries<'a> {
    pub(crate) fn new(plane: &'a Arc<DataPlane>, job: &'a Job) -> Self {
        Self { plane, job, tried: Vec::new(), broke: Vec::new(), dead: 0, not_taken: 0, running: None }
    }

    /// Records that the attempt on `member` failed; the client would receive `failed`. Returns `Break` with the final
    /// outcome if no attempt follows.
    pub(crate) fn failed<A>(
        &mut self,
        member: usize,
        reason: RetryReason,
        failed: Result<A, RequestError>,
    ) -> ControlFlow<Result<A, RequestError>, Pending<'a, A>> {
        self.count_running("failed");
        self.tried.push(member);
        let config = self.config();
        if !reason.may_be_retried(config) {
            return ControlFlow::Break(self.last_word(failed, "this failure is not retried"));
        }
        if reason == RetryReason::NotTaken {
            self.not_taken += 1;
            return ControlFlow::Continue(Pending { reason, failed, paid: None });
        }
        if self.tried.len() - self.not_taken >= config.attempts as usize {
            self.plane.metrics.retry(reason.label(), "no_attempts");
            return ControlFlow::Break(self.last_word(failed, "no attempts left"));
        }
        let Some(paid) = self.job.model.budget.take(Instant::now(), config) else {
            self.plane.metrics.retry(reason.label(), "no_budget");
            return ControlFlow::Break(self.last_word(failed, "the retry budget is exhausted"));
        };
        ControlFlow::Continue(Pending { reason, failed, paid: Some(paid) })
    }

    /// Whether so many engines died with this request, including the one on `member`, that it may be the cause.
    /// Backends that broke off are checked for a listening server only once a second one fails.
    pub(crate) async fn is_suspect(&mut self, member: usize, reason: RetryReason) -> bool {
        match reason {
            RetryReason::Broke | RetryReason::BrokeOff => self.broke.push(member),
            RetryReason::Engine(Failure::Dead) => self.dead += 1,
            _ => return false,
        }
        if self.dead + self.broke.len() < MAX_DEATHS {
            return false;
        }
        let gone = self.broke.iter().map(|member| self.is_gone(&self.job.model.members[*member].backend));
        let gone = futures_util::future::join_all(gone).await.into_iter().filter(|gone| *gone).count();
        self.dead + gone >= MAX_DEATHS
    }

    async fn is_gone(&self, backend: &Backend) -> bool {
        let limits = AnswerLimits { timeout: ALIVE_WITHIN, ..self.plane.backends.probe_limits() };
        let found = probe::alive(&backend.client, &backend.target(), &limits, ALIVE_WITHIN).await;
        matches!(found, Err(HttpError::Connect { .. } | HttpError::Exchange { .. }))
    }

    /// Rejects a request during which several engines died.
    pub(crate) fn refuse(&mut self, reason: RetryReason) -> RequestError {
        self.count_running("failed");
        self.plane.metrics.retry(reason.label(), "suspect");
        tracing::warn!(
            model = self.job.model.name,
            engines = self.tried.len() + 1,
            "consecutive engines died while running one request: rejecting it"
        );
        RequestError::Suspect { engines: self.tried.len() + 1 }
    }

    /// Ends the attempts because no place is available for another one.
    pub(crate) fn nowhere<A>(&self, Pending { reason, failed, .. }: Pending<'_, A>) -> Result<A, RequestError> {
        self.plane.metrics.retry(reason.label(), "no_backend");
        self.last_word(failed, "no other backend can serve")
    }

    /// Begins the next attempt.
    pub(crate) fn again<A>(&mut self, pending: Pending<'_, A>) {
        if let Some(paid) = pending.paid {
            paid.spend();
        }
        self.running = Some(pending.reason);
    }

    /// Records that the current attempt has a response to relay.
    pub(crate) fn answered(&mut self) {
        self.count_running("answered");
    }

    /// Whether another attempt may follow a waiting one on `member`.
    pub(super) fn may_move_from(&self, member: usize) -> bool {
        let config = self.config();
        let mut tried = self.tried.clone();
        tried.push(member);
        let left = tried.len() - self.not_taken < config.attempts as usize;
        left && RetryReason::Unhealthy.may_be_retried(config) && self.job.has_other(&tried)
    }

    fn last_word<A>(&self, failed: Result<A, RequestError>, why: &'static str) -> Result<A, RequestError> {
        failed.map_err(|last| RequestError::GaveUp { attempts: self.tried.len(), why, source: Box::new(last) })
    }

    fn config(&self) -> &'a RawRetry {
        &self.job.snapshot.config.retry
    }

    fn count_running(&mut self, outcome: &'static str) {
        if let Some(reason) = self.running.take() {
            self.plane.metrics.retry(reason.label(), outcome);
        }
    }
}

impl Drop for Tries<'_> {
    fn drop(&mut self) {
        self.count_running("unfinished");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every reason and what may follow it, by default and where nothing may run twice.
    #[test]
    fn what_may_be_retried() {
        let config = |after_send, statuses: &str| {
            let text = format!(
                "[[models]]\nname = \"m\"\npolicy = \"random\"\n[[models.backends]]\nname = \"b\"\nengine = \"openai\"\n\
                 url = \"http://b\"\n[retry]\nafter_send = {after_send}\n{statuses}"
            );
            crate::Config::from_toml(&text, std::path::Path::new("")).unwrap().retry
        };
        let (usual, careful) = (config(true, ""), config(false, "statuses = []"));
        for (reason, usually, carefully) in [
            (RetryReason::Connect, true, true),
            (RetryReason::NotTaken, true, true),
            (RetryReason::Broke, true, false),
            (RetryReason::BrokeOff, true, false),
            (RetryReason::Unhealthy, true, false),
            (RetryReason::Slow, false, false),
            (RetryReason::Exhausted, false, false),
            (RetryReason::NoSuchRank, true, true),
            (RetryReason::Status(429), true, false),
            (RetryReason::Status(503), true, false),
            (RetryReason::Status(500), false, false),
            (RetryReason::Status(400), false, false),
            (RetryReason::Engine(Failure::Dead), true, false),
            (RetryReason::Engine(Failure::Abort), true, false),
        ] {
            let found = (reason.may_be_retried(&usual), reason.may_be_retried(&careful));
            assert_eq!(found, (usually, carefully), "{reason:?}");
            if let RetryReason::Status(status) = reason {
                let seen = RetryReason::of_status(StatusCode::from_u16(status).unwrap(), &usual);
                assert_eq!(seen, usually.then_some(reason));
            }
        }
    }

    #[test]
    fn reasons_of_errors() {
        let (url, source) = (|| "http://b".to_owned(), || "planted".into());
        let unreachable = |source| RequestError::Unreachable { backend: "b".to_owned(), source };
        let broken = |source| RequestError::Broken { backend: "b".to_owned(), source };
        for (error, reason) in [
            (unreachable(HttpError::Connect { url: url(), source: source() }), Some(RetryReason::Connect)),
            (unreachable(HttpError::NotTaken { url: url(), source: source() }), Some(RetryReason::NotTaken)),
            (RequestError::Exhausted { source: source() }, Some(RetryReason::Exhausted)),
            (broken(HttpError::Exchange { url: url(), source: source() }), Some(RetryReason::Broke)),
            (broken(HttpError::Body { url: url(), source: source() }), Some(RetryReason::BrokeOff)),
            (RequestError::Closing, None),
        ] {
            assert_eq!(RetryReason::of(&error), reason);
        }
    }
}
