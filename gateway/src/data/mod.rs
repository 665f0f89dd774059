//! The data plane: one path for every route.
//!
//! A request to an engine passes these steps: admit ([`trust`]), read ([`body`], [`decode`]), score ([`read`],
//! [`score`]), attempts ([`relay`]; a place, [`find`] and [`place`]; one attempt, [`attempt`] and [`opening`]; whether
//! another follows, [`attempts`] and [`retry`]), relay ([`relay`], [`stream`]), while [`watch`] inspects its chunks. A
//! [`ticket::Ticket`] accompanies it from its first byte to its last and counts it, however it ends.

mod access;
mod attempt;
mod attempts;
mod body;
pub(crate) mod body_memory;
mod cors;
mod decode;
mod fields;
mod find;
mod models;
mod opening;
pub(crate) mod outflow;
mod place;
mod plane;
mod progress;
mod read;
mod relay;
mod reports;
mod retry;
mod sampling;
#[cfg(test)]
mod schedule_tests;
mod score;
mod served;
pub(crate) mod stall;
mod stream;
mod ticket;
mod trace;
pub(crate) mod trust;
mod watch;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::response::{IntoResponse, Response as OwnResponse};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Either;
use hyper::body::Incoming;
use semmoe_engines::Route;

use crate::backends::{Form, Model, REQUEST_ID, RequestError, RequestId};
use crate::config::HEALTH;
use crate::observe::{Done, Generated, NONE, Place};
pub(crate) use plane::DataPlane;

use access::Record;
use cors::Cors;
use decode::Coding;
use place::Placed;
use read::Job;
use retry::RetryReason;
use stream::RelayBody;
use ticket::Ticket;
use watch::Watch;

/// An HTTP/2 request, from its head to the end of its response. Connections, and the streams on each, are limited
/// separately; this limits the streams across all connections.
struct OpenStream(Arc<DataPlane>);

impl OpenStream {
    fn begin(plane: &Arc<DataPlane>) -> Result<Self, RequestError> {
        let limit = plane.backends.current.load().config.limits.open_streams;
        if plane.metrics.trust.stream_begins(limit) {
            Ok(Self(Arc::clone(plane)))
        } else {
            Err(RequestError::TooManyStreams { limit })
        }
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.metrics.trust.stream_ended();
    }
}

/// Answers one request. A separate router would allocate for each request and again for each body.
pub(crate) async fn serve(
    plane: Arc<DataPlane>,
    mut request: Request<Incoming>,
) -> Result<Response<Answered>, Infallible> {
    let stream = (request.version() == Version::HTTP_2).then(|| OpenStream::begin(&plane)).transpose();
    let id = RequestId::of(request.headers_mut());
    let cors = Cors::of(&plane, request.headers());
    let head = || check_head(&plane, request.version(), request.headers());
    let mut answer = match stream.and_then(|stream| head().map(|()| stream)) {
        // Do not wait for the request's body: that would occupy the stream that is being refused.
        Err(refusal) => refuse(&plane, &id, request.uri().path(), &refusal).map(|body| Answered::here(body, None)),
        Ok(stream) => match route_of(&plane, &request) {
            Some(route) => {
                engine_route(&plane, route, request, id).await.map(|body| Answered { body, _stream: stream })
            }
            None => own_route(&plane, request, &id).await.map(|body| Answered::here(body, stream)),
        },
    };
    cors::strip(answer.headers_mut());
    if let Some(cors) = cors {
        cors.mark(answer.headers_mut());
    }
    Ok(answer)
}

/// Returns the route of a request that is forwarded to an engine.
fn route_of(plane: &DataPlane, request: &Request<Incoming>) -> Option<Route> {
    let path = request.uri().path();
    match Route::ALL.into_iter().find(|route| route.path() == path) {
        Some(route) => (request.method() == Method::POST).then_some(route),
        None => (plane.passes(path) && preflight(plane, request).is_none()).then_some(Route::Extra),
    }
}

/// Answers requests that are not forwarded. Unknown paths get 404, because engines have routes that replace weights.
async fn own_route(plane: &DataPlane, request: Request<Incoming>, id: &RequestId) -> OwnResponse {
    let path = request.uri().path();
    if let Some(preflight) = preflight(plane, &request) {
        preflight
    } else if Route::ALL.into_iter().any(|route| route.path() == path) {
        wrong_method(plane, &request, "POST", id)
    } else if path == HEALTH {
        health(plane, &request, id)
    } else if path != models::LIST && models::entry_of(path).is_none() {
        no_route(plane, request, id).await
    } else if [Method::GET, Method::HEAD].contains(request.method()) {
        list_models(plane, request, id)
    } else {
        wrong_method(plane, &request, models::METHODS, id)
    }
}

/// Returns the response to a CORS preflight; `None` for other requests.
fn preflight(plane: &DataPlane, request: &Request<Incoming>) -> Option<OwnResponse> {
    // Test the method first, so that other requests do not pay for the check.
    (request.method() == Method::OPTIONS)
        .then(|| Cors::of(plane, request.headers())?.preflight(request.headers()))
        .flatten()
}

/// Performs checks that hyper leaves to its users: otherwise a server behind this one might see a different host, or
/// wait for bytes that never arrive.
fn check_head(plane: &DataPlane, version: Version, headers: &HeaderMap) -> Result<(), RequestError> {
    // hyper enforces this limit for HTTP/1.1 only.
    let limit = plane.backends.current.load().config.limits.headers;
    if version == Version::HTTP_2 && headers.len() > limit {
        return Err(RequestError::TooManyHeaders { found: headers.len(), limit });
    }
    let hosts = headers.get_all(header::HOST).iter().count();
    if hosts > 1 || (hosts == 0 && version == Version::HTTP_11) {
        return Err(RequestError::Hosts { found: hosts });
    }
    let expected = headers.get_all(header::EXPECT).iter();
    match expected.into_iter().all(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
        true => Ok(()),
        false => Err(RequestError::Expectation),
    }
}

/// Answers a request. Its ticket accompanies it to the last byte of the response, and counts it however it ends.
async fn engine_route(
    plane: &Arc<DataPlane>,
    route: Route,
    request: Request<Incoming>,
    id: RequestId,
) -> Response<Either<Box<RelayBody>, axum::body::Body>> {
    let mut ticket = Ticket::new(Arc::clone(plane), Record::new(id.clone(), Some(route)));
    if let Some(tracer) = &plane.tracer {
        ticket.trace = trace::begin(tracer, request.headers(), route, &id);
    }
    let answer = unless_closing(plane, std::pin::pin!(answer(plane, route, request, &mut ticket))).await;
    ticket.release_body();
    match answer {
        Ok(answer) => relay::respond(answer, ticket).map(Either::Left),
        Err(error) => {
            ticket.finish(error.status().as_u16());
            error.respond(&id, Form::of(Some(route))).map(Either::Right)
        }
    }
}

/// Processes a request up to the head of the engine's response.
async fn answer(
    plane: &Arc<DataPlane>,
    route: Route,
    request: Request<Incoming>,
    ticket: &mut Ticket,
) -> Result<relay::Answer, RequestError> {
    let (mut head, incoming) = request.into_parts();
    let coding = match admit(plane, &mut head.headers, ticket) {
        Ok(coding) => coding,
        Err(refusal) => {
            body::discard(incoming).await;
            return Err(refusal);
        }
    };
    let mut body = body::read(plane, &head.headers, incoming, ticket).await?;
    let is_coded = coding.is_some() && !body.is_empty();
    if is_coded || !decode::is_plain(route, &body) {
        body = Box::pin(decode::plain(plane, coding, route, body, ticket)).await?;
    }
    // Boxed: the future accounts for most of a request's memory, which is not needed before the body arrives. Clients
    // may open streams and send nothing.
    Box::pin(score_and_send(plane, route, &head, body, ticket)).await
}

/// Checks whether the client may send the request, and returns how its body is compressed.
fn admit(plane: &DataPlane, headers: &mut HeaderMap, ticket: &mut Ticket) -> Result<Option<Coding>, RequestError> {
    ticket.record.caller = plane.admit(headers)?;
    Coding::take(headers)
}

/// Reads, scores and sends the request; starts over if its model's backends change meanwhile.
async fn score_and_send(
    plane: &Arc<DataPlane>,
    route: Route,
    head: &Parts,
    body: Bytes,
    ticket: &mut Ticket,
) -> Result<relay::Answer, RequestError> {
    let mut before = None;
    loop {
        ticket.arrive();
        let caller = ticket.record.caller.clone();
        let job = read::read(plane, route, &head.headers, caller, body.clone(), before.as_ref()).await?;
        if before.is_none() {
            job.model.budget.request(ticket.arrived);
            if job.body.bytes().as_ptr() != body.as_ptr() {
                ticket.hold(job.body.bytes().len())?;
            }
        }
        ticket.read(&job);
        if let Some(answer) = relay::attempts(plane, head, &job, ticket).await? {
            return Ok(answer);
        }
        before = Some(job);
    }
}

/// Ends `work` with an error if it is still waiting when the gateway closes. At that time every connection is polled
/// once more, so requests need not register for it.
async fn unless_closing<T>(
    plane: &DataPlane,
    mut work: Pin<&mut impl Future<Output = Result<T, RequestError>>>,
) -> Result<T, RequestError> {
    std::future::poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Pending if plane.is_closing() => Poll::Ready(Err(RequestError::Closing)),
        polled => polled,
    })
    .await
}

/// Returns the list of models, or the entry that the path names.
fn list_models(plane: &DataPlane, mut request: Request<Incoming>, id: &RequestId) -> OwnResponse {
    let answer = plane.admit(request.headers_mut()).and_then(|caller| match models::entry_of(request.uri().path()) {
        None => Ok(models::list(plane, &caller)),
        Some(model) => models::entry(plane, &caller, model),
    });
    answer.map_or_else(|error| refuse(plane, id, models::LIST, &error), IntoResponse::into_response)
}

/// Reports whether requests can be served, for load balancers and for clients written for an engine. It requires no
/// key, reveals no more than engines do, and is logged only when it fails.
fn health(plane: &DataPlane, request: &Request<Incoming>, id: &RequestId) -> OwnResponse {
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        return wrong_method(plane, request, models::METHODS, id);
    }
    let serves = |model: &Arc<Model>| model.members.iter().any(|member| member.backend.takes_requests());
    if plane.is_draining() {
        refuse(plane, id, HEALTH, &RequestError::Closing)
    } else if plane.backends.snapshot().models.iter().any(serves) {
        let mut ready = StatusCode::OK.into_response();
        ready.headers_mut().insert(REQUEST_ID, id.header().clone());
        ready
    } else {
        refuse(plane, id, HEALTH, &RequestError::NotReady)
    }
}

async fn no_route(plane: &DataPlane, request: Request<Incoming>, id: &RequestId) -> OwnResponse {
    let (method, path) = method_and_path(&request);
    body::discard(request.into_body()).await;
    refuse(plane, id, &path, &RequestError::NoRoute { method, path: path.clone() })
}

/// Answers a request that is not forwarded.
fn refuse(plane: &DataPlane, id: &RequestId, path: &str, error: &RequestError) -> OwnResponse {
    let status = error.status().as_u16();
    let done = Done {
        backend: NONE,
        model: NONE,
        route: None,
        place: Place::Nowhere,
        policy: NONE,
        code: status,
        took: Duration::ZERO,
        trace: None,
        generated: Generated::default(),
    };
    Record::refused(id.clone(), path).log(plane.backends.current.load().config.log.access, &done);
    // Health checks do not count as requests, because load balancers poll them.
    if path != HEALTH {
        plane.metrics.requests.done(&done);
    }
    error.respond(id, Form::of_path(path))
}

/// Returns the method and the path, for messages.
pub(crate) fn method_and_path<B>(request: &Request<B>) -> (String, String) {
    (request.method().to_string(), request.uri().path().to_owned())
}

fn wrong_method(plane: &DataPlane, request: &Request<Incoming>, allowed: &'static str, id: &RequestId) -> OwnResponse {
    let (method, path) = method_and_path(request);
    let mut response = refuse(plane, id, request.uri().path(), &RequestError::Method { method, path });
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

/// A response body: relayed from the engine, or created by the gateway.
pub(crate) struct Answered {
    body: Either<Box<RelayBody>, axum::body::Body>,
    _stream: Option<OpenStream>,
}

impl Answered {
    fn here(body: axum::body::Body, stream: Option<OpenStream>) -> Self {
        Self { body: Either::Right(body), _stream: stream }
    }
}

impl Body for Answered {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Size of the future that a function returns, without calling it.
    fn future_bytes<A, B, F>(_: impl Fn(A, B) -> F) -> usize {
        size_of::<F>()
    }

    /// Each open stream holds one, and 8,192 connections may have 128 streams each.
    #[test]
    fn a_request_that_waits_for_its_body_is_small() {
        let bytes = future_bytes(serve);
        assert!(bytes <= 3072, "{bytes} bytes");
        let bytes = size_of::<Answered>();
        assert!(bytes <= 64, "{bytes} bytes");
    }
}
