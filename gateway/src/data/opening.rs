//! The first piece of an answer, awaited before its head goes to the client: until then the request can be sent
//! elsewhere.
//!
//! An engine whose core died under a living server answers with a 500, with a 200 whose generation was aborted before
//! its first token, or with an error as the first event of a stream. The words of an answer can be a client's, so the
//! health route is asked whether it is dead. Servers that send the head of a stream at once do so long before the
//! first token, which is what clients wait for: holding the head back costs them nothing. Only what comes at once with
//! the first piece is waited for, and never longer than the limit.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use semmoe_engines::failures::{self, Failure};
use semmoe_engines::http::{AnswerBody, AnswerLimits, HttpError, RequestBody};
use semmoe_engines::refusal::{self, RankRefusal};
use semmoe_engines::{Route, probe};

use crate::error::RequestError;
use crate::live::Sample;

use super::reports::{Kind, Reports};
use super::retry::{ALIVE_WITHIN, LOOK_EVERY, SendError, Wait};

/// The first event of a chat names the role, and says nothing; the next one follows in the same step of the engine.
const SAME_STEP: Duration = Duration::from_millis(5);

type Polled = Result<Frame<Bytes>, hyper::Error>;

/// The body of an engine's answer, of which some may have been read already.
pub(crate) struct Upstream {
    body: AnswerBody,
    /// The first bytes of the body, in order.
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

    /// Puts back what [`poll_frame`](Self::poll_frame) brought last.
    pub(crate) fn put_back(&mut self, polled: Polled) {
        self.ahead.swap(0, 1);
        self.ahead[0] = Some(polled);
    }

    /// Whether nothing follows, as far as that is known.
    pub(crate) fn is_end_stream(&self) -> bool {
        self.ahead[0].is_none() && self.body.is_end_stream()
    }

    /// Bytes that are still to come.
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

    /// Everything that was read and not yet passed on.
    pub(crate) fn ahead_bytes(&self) -> Bytes {
        match (&self.ahead[1], self.ahead_data().next()) {
            (None, Some(only)) => only.clone(),
            _ => self.ahead_data().flatten().copied().collect(),
        }
    }
}

/// An answer that may begin to go to the client.
pub(crate) struct Opened {
    /// Boxed, as its body is large and is moved often.
    pub(crate) response: Response<Box<Upstream>>,
    /// The engine failed before its answer had any content.
    pub(crate) failure: Option<Failure>,
    /// The engine has no such rank, and did nothing.
    pub(crate) refusal: Option<RankRefusal>,
}

/// Waits for the first piece of an answer and looks at it. `streams`: the client asked for a stream. `pinned`: the rank
/// that it was pinned to, as the engine counts.
///
/// # Errors
/// The body broke off before its first piece, or the backend's probes failed while it was awaited.
pub(crate) async fn open(
    wait: &Wait<'_>,
    response: Response<AnswerBody>,
    route: Route,
    streams: bool,
    pinned: Option<u32>,
) -> Result<Opened, SendError> {
    let mut response = response.map(|body| Box::new(Upstream { body, ahead: [None, None] }));
    let status = response.status();
    // The engine is dead, or only full: its health route shows which.
    if probe::is_dead(wait.backend.engine, Some(status.as_u16())) {
        wait.backend.suspect();
    }
    if status == StatusCode::INTERNAL_SERVER_ERROR && route.runs_model() {
        let failure = is_core_dead(wait).await.then_some(Failure::Dead);
        return Ok(Opened { response, failure, refusal: None });
    }
    let may_refuse = pinned.is_some() && refusal::may_refuse(status, streams);
    let is_looked_at = may_refuse || status == StatusCode::OK && route.generates();
    let kind = Kind::of(response.headers());
    // Streams that the client asked for, and JSON documents, which come in one piece.
    let is_held = kind == Kind::Json || streams && kind == Kind::Events;
    if !is_looked_at || !is_held || response.body().is_end_stream() {
        return Ok(Opened { response, failure: None, refusal: None });
    }
    let look = |response: &Response<Box<Upstream>>| {
        let ahead = response.body().ahead_bytes();
        let failure = Reports::of(route, kind).look(&ahead, true);
        // Parsing an answer costs more than relaying it.
        let is_empty = (streams || failure.is_some()) && failures::is_empty(&ahead);
        (failure, is_empty)
    };
    first_piece(wait, response.body_mut()).await?;
    let refusal = if may_refuse { refusal::of_rank(&response.body().ahead_bytes()) } else { None };
    let refusal = refusal.filter(|refusal| Some(refusal.rank) == pinned);
    if refusal.is_some() || status != StatusCode::OK {
        return Ok(Opened { response, failure: None, refusal });
    }
    let mut seen = look(&response);
    if streams && seen == (None, true) {
        let upstream = response.body_mut();
        if let Ok(second) = tokio::time::timeout(SAME_STEP, upstream.body.frame()).await {
            upstream.ahead[1] = second;
        }
        seen = look(&response);
    }
    let failure = match seen {
        (Some(Failure::Error), true) if is_core_dead(wait).await => Some(Failure::Dead),
        (failure, true) => failure,
        _ => None,
    };
    Ok(Opened { response, failure, refusal: None })
}

/// Whether the engine's error is about every request: its health route says that the core behind the server is dead. An
/// engine whose health route cannot know is probed.
async fn is_core_dead(wait: &Wait<'_>) -> bool {
    let backend = wait.backend;
    if !probe::health_knows_core(backend.engine) {
        backend.suspect();
        return false;
    }
    let limits = AnswerLimits { timeout: ALIVE_WITHIN, ..wait.core.probe_limits() };
    let target = backend.target();
    // Boxed: it is rare, and every request would reserve memory for it.
    let asked = Box::pin(probe::health(&backend.client, &target, &limits));
    let Err(error) = asked.await else { return false };
    backend.suspect();
    probe::is_dead(backend.engine, error.status())
}

/// Returns when there is a first piece, at the end of the body, or after the limit.
async fn first_piece(wait: &Wait<'_>, upstream: &mut Upstream) -> Result<(), SendError> {
    let mut left = wait.hold;
    while !left.is_zero() {
        let look = LOOK_EVERY.min(left);
        match tokio::time::timeout(look, upstream.body.frame()).await {
            Ok(Some(Err(error))) => {
                let (url, cause) = (format!("backend '{}'", wait.backend.name), error.to_string());
                return Err(SendError::Http(HttpError::Body { url, cause }));
            }
            Ok(first) => {
                upstream.ahead[0] = first;
                return Ok(());
            }
            Err(_) => left = left.saturating_sub(look),
        }
        wait.check_health()?;
    }
    Ok(())
}

/// Sends a request that asks and waits for the head of its answer; one that is refused is sent again without the
/// question, as nothing has gone to the client. An engine that takes it then is not asked any more until it is probed
/// again.
pub(super) async fn send_sampled(
    wait: &Wait<'_>,
    mut request: Request<RequestBody>,
    sample: Sample,
    plain: impl FnOnce() -> Result<Request<RequestBody>, RequestError>,
) -> Result<(Result<Response<AnswerBody>, SendError>, Option<Sample>), RequestError> {
    // Compressed answers cannot be cut.
    request.headers_mut().remove(header::ACCEPT_ENCODING);
    let answer = wait.send(request).await;
    if !answer.as_ref().is_ok_and(|answer| may_be_refusal(answer.status())) {
        return Ok((answer, Some(sample)));
    }
    let answer = wait.send(plain()?).await;
    let is_refusal = answer.as_ref().is_ok_and(|answer| answer.status().is_success());
    // Refused either way, it was the client's fault.
    if is_refusal {
        sample.refuse()
    } else {
        sample.give_up("failed")
    }
    Ok((answer, None))
}

/// Status codes of engines for a body they reject. Other codes are not about a field.
fn may_be_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY)
}
