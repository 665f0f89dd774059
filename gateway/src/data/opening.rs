//! Waits for a response's first chunk before sending its head to the client: until then the request can be retried.
//!
//! An engine whose core died behind a live server answers with a 500, with a 200 whose generation was aborted before
//! its first token, or with an error as a stream's first event. An error text in a response may come from the client,
//! so the health route decides whether the engine is dead. Servers that send a stream's head early do so long before
//! the first token, which is what clients wait for: holding back the head costs them nothing. The gateway waits only
//! for the first chunk and the data that arrives with it, and never longer than the limit.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use semmoe_engines::failures::{self, Failure};
use semmoe_engines::http::{AnswerBody, AnswerLimits, HttpError};
use semmoe_engines::probe;
use semmoe_engines::refusal::{self, RankRefusal};

use super::attempt::{Attempt, HEALTH_INTERVAL};
use super::reports::{Kind, Reports};
use super::retry::ALIVE_WITHIN;
use crate::backends::RequestError;

/// How long to wait for a chat's second event: the first one names the role and carries no text, and the second follows
/// in the same engine step.
const SAME_STEP: Duration = Duration::from_millis(5);

type Polled = Result<Frame<Bytes>, hyper::Error>;

/// The body of an engine's response, part of which may already have been read.
pub(crate) struct Upstream {
    body: AnswerBody,
    /// Frames read ahead, in order.
    ahead: [Option<Polled>; 2],
}

impl Upstream {
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Polled>> {
        match self.ahead[0].take() {
            Some(ahead) => {
                self.ahead.swap(0, 1);
                Poll::Ready(Some(ahead))
            }
            None => Pin::new(&mut self.body).poll_frame(cx),
        }
    }

    /// Puts back the result of the last [`poll_frame`](Self::poll_frame).
    pub(crate) fn put_back(&mut self, polled: Polled) {
        self.ahead.swap(0, 1);
        self.ahead[0] = Some(polled);
    }

    /// Whether the body is known to have ended.
    pub(crate) fn is_end_stream(&self) -> bool {
        self.ahead[0].is_none() && self.body.is_end_stream()
    }

    /// Number of bytes still to come.
    pub(crate) fn size_hint(&self) -> SizeHint {
        let ahead: u64 = self.ahead_data().map(|data| data.len() as u64).sum();
        let mut hint = self.body.size_hint();
        match hint.exact() {
            Some(rest) => hint.set_exact(rest + ahead),
            None if ahead > 0 => hint = SizeHint::default(),
            None => {}
        }
        hint
    }

    fn ahead_data(&self) -> impl Iterator<Item = &Bytes> {
        self.ahead.iter().flatten().filter_map(|polled| polled.as_ref().ok()?.data_ref())
    }

    /// Returns all data that was read ahead and has not been passed on.
    pub(crate) fn ahead_bytes(&self) -> Bytes {
        match (&self.ahead[1], self.ahead_data().next()) {
            (None, Some(only)) => only.clone(),
            _ => self.ahead_data().flatten().copied().collect(),
        }
    }
}

/// A response head, perhaps with its first chunk.
pub(crate) enum Opened {
    /// The response may be sent to the client. Boxed, because its body is large and moved often. Includes any failure
    /// that the engine reported before the response had content.
    Answer(Response<Box<Upstream>>, Option<Failure>),
    /// The engine has no such rank and has not processed the request.
    Refused(RankRefusal),
}

/// Waits for a response's first chunk and inspects it.
///
/// # Errors
/// The body broke off before its first chunk, or the backend's probes failed meanwhile.
pub(crate) async fn open(attempt: &Attempt<'_>, response: Response<AnswerBody>) -> Result<Opened, RequestError> {
    let (route, streams) = (attempt.job.route, attempt.job.streams);
    // The rank in the engine's numbering.
    let pinned = attempt.expected.as_ref().map(|expected| expected.wire_rank);
    let mut response = response.map(|body| Box::new(Upstream { body, ahead: [None, None] }));
    let status = response.status();
    // The engine may be dead or merely overloaded: its health route decides.
    if probe::is_dead(attempt.backend.engine, Some(status.as_u16())) {
        attempt.backend.suspect();
    }
    if status == StatusCode::INTERNAL_SERVER_ERROR && route.runs_model() {
        let failure = is_core_dead(attempt).await.then_some(Failure::Dead);
        return Ok(Opened::Answer(response, failure));
    }
    let may_refuse = pinned.is_some() && refusal::may_refuse(status, streams);
    let is_examined = may_refuse || status == StatusCode::OK && route.generates();
    let kind = Kind::of(response.headers());
    // Hold streams that the client requested, and JSON documents, which arrive as one chunk.
    let is_held = kind == Kind::Json || streams && kind == Kind::Events;
    if !is_examined || !is_held || response.body().is_end_stream() {
        return Ok(Opened::Answer(response, None));
    }
    let examine = |response: &Response<Box<Upstream>>| {
        let ahead = response.body().ahead_bytes();
        let failure = Reports::of(route, kind).find(&ahead, true);
        // Parse a response only if necessary, as that costs more than relaying it.
        let is_empty = (streams || failure.is_some()) && failures::is_empty(&ahead);
        (failure, is_empty)
    };
    first_piece(attempt, response.body_mut()).await?;
    let refusal = if may_refuse { refusal::of_rank(&response.body().ahead_bytes()) } else { None };
    let refusal = refusal.filter(|refusal| Some(refusal.rank) == pinned);
    if let Some(refusal) = refusal {
        return Ok(Opened::Refused(refusal));
    } else if status != StatusCode::OK {
        return Ok(Opened::Answer(response, None));
    }
    let mut seen = examine(&response);
    if streams && seen == (None, true) {
        let upstream = response.body_mut();
        if let Ok(second) = tokio::time::timeout(SAME_STEP, upstream.body.frame()).await {
            upstream.ahead[1] = second;
        }
        seen = examine(&response);
    }
    let failure = match seen {
        (Some(Failure::Error), true) if is_core_dead(attempt).await => Some(Failure::Dead),
        (failure, true) => failure,
        _ => None,
    };
    Ok(Opened::Answer(response, failure))
}

/// Whether the engine's error affects every request, that is, its health route reports that the core behind the server
/// is dead. An engine whose health route cannot detect that is probed instead.
async fn is_core_dead(attempt: &Attempt<'_>) -> bool {
    let backend = attempt.backend;
    if !probe::health_knows_core(backend.engine) {
        backend.suspect();
        return false;
    }
    let limits = AnswerLimits { timeout: ALIVE_WITHIN, ..attempt.plane.backends.probe_limits() };
    let target = backend.target();
    // Boxed: this is rare, and otherwise every request would reserve memory for it.
    let asked = Box::pin(probe::health(&backend.client, &target, &limits));
    let Err(error) = asked.await else { return false };
    backend.suspect();
    probe::is_dead(backend.engine, error.status())
}

/// Completes with the first chunk, at the end of the body, or at the time limit.
async fn first_piece(attempt: &Attempt<'_>, upstream: &mut Upstream) -> Result<(), RequestError> {
    let mut left = Duration::from_secs_f64(attempt.job.snapshot.config.retry.hold_seconds);
    while !left.is_zero() {
        let wait = HEALTH_INTERVAL.min(left);
        match tokio::time::timeout(wait, upstream.body.frame()).await {
            Ok(Some(Err(error))) => {
                let url = format!("backend '{}'", attempt.backend.name);
                return Err(attempt.no_answer(HttpError::Body { url, source: error.into() }));
            }
            Ok(first) => {
                upstream.ahead[0] = first;
                return Ok(());
            }
            Err(_) => left = left.saturating_sub(wait),
        }
        attempt.check_health()?;
    }
    Ok(())
}
