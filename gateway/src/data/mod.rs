//! The data plane: one way for every route.
//!
//! body ([`body`]) -> model, evidence, pins stripped ([`read`], [`score`]) -> backend and rank ([`find`], [`place`]) ->
//! engine and back ([`relay`], [`opening`], [`stream`]), or to another backend ([`retry`]), where its pieces are looked
//! at ([`watch`]). A [`ticket::Ticket`] goes with the request from its first byte to its last and counts it, however it
//! ends.

mod access;
mod attempts;
mod body;
mod cors;
mod decode;
mod fields;
mod find;
mod models;
mod opening;
mod place;
mod progress;
mod read;
mod relay;
mod reports;
mod retry;
#[cfg(test)]
mod schedule_tests;
mod score;
mod served;
mod stream;
mod ticket;
mod trace;
mod watch;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::response::{IntoResponse, Response as OwnResponse};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Either;
use hyper::body::Incoming;
use hyper::service::service_fn;
use semmoe_engines::Route;

use crate::config::HEALTH;
use crate::error::{Form, RequestError};
use crate::metrics::{Done, Generated, NONE, Place};
use crate::otlp::Stage;
use crate::request_id::{REQUEST_ID, RequestId};
use crate::server::Serves;
use crate::snapshot::Model;
use crate::state::Core;
use access::Record;
use decode::Coding;
use stream::RelayBody;
use ticket::Ticket;

use cors::Cors;

/// The data plane as a service.
pub(crate) fn service(core: &Arc<Core>) -> impl Serves + use<> {
    let core = Arc::clone(core);
    service_fn(move |request: Request<Incoming>| {
        let stream = (request.version() == Version::HTTP_2).then(|| OpenStream::begin(&core)).transpose();
        serve(Arc::clone(&core), request, stream)
    })
}

/// A request over HTTP/2, from its head to the end of its answer. Connections are bounded, and each has its streams;
/// this bounds the streams of all of them.
struct OpenStream(Arc<Core>);

impl OpenStream {
    fn begin(core: &Arc<Core>) -> Result<Self, RequestError> {
        let limit = core.current.load().config.limits.open_streams;
        if core.metrics.trust.stream_begins(limit) {
            Ok(Self(Arc::clone(core)))
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

/// Answers one request. There is no router in between: it would allocate for each request and again for each body.
async fn serve(
    core: Arc<Core>,
    mut request: Request<Incoming>,
    stream: Result<Option<OpenStream>, RequestError>,
) -> Result<Response<Answered>, Infallible> {
    let id = RequestId::of(request.headers_mut());
    let cors = Cors::of(&core, request.headers());
    let head = || check_head(&core, request.version(), request.headers());
    let mut answer = match stream.and_then(|stream| head().map(|()| stream)) {
        // Its body is not waited for: that would hold what is refused here.
        Err(refusal) => refuse(&core, &id, request.uri().path(), &refusal).map(|body| Answered::here(body, None)),
        Ok(stream) => match route_of(&core, &request) {
            Some(route) => engine_route(&core, route, request, id, stream).await,
            None => own_route(&core, request, &id).await.map(|body| Answered::here(body, stream)),
        },
    };
    cors::strip(answer.headers_mut());
    if let Some(cors) = cors {
        cors.mark(answer.headers_mut());
    }
    Ok(answer)
}

/// The route of a request that goes to an engine.
fn route_of(core: &Core, request: &Request<Incoming>) -> Option<Route> {
    let path = request.uri().path();
    match Route::ALL.into_iter().find(|route| route.path() == path) {
        Some(route) => (request.method() == Method::POST).then_some(route),
        None => (core.passes(path) && preflight(core, request).is_none()).then_some(Route::Extra),
    }
}

/// Answers what goes to no engine; every path that is not known is 404, as engines have routes that replace weights.
async fn own_route(core: &Core, request: Request<Incoming>, id: &RequestId) -> OwnResponse {
    let path = request.uri().path();
    if let Some(preflight) = preflight(core, &request) {
        preflight
    } else if Route::ALL.into_iter().any(|route| route.path() == path) {
        wrong_method(core, &request, "POST", id)
    } else if path == HEALTH {
        health(core, &request, id)
    } else if path != models::LIST && models::entry_of(path).is_none() {
        no_route(core, request, id).await
    } else if [Method::GET, Method::HEAD].contains(request.method()) {
        list_models(core, request, id)
    } else {
        wrong_method(core, &request, models::METHODS, id)
    }
}

/// The answer to a browser's CORS preflight; `None` for everything else.
fn preflight(core: &Core, request: &Request<Incoming>) -> Option<OwnResponse> {
    // Looked at first: no other request pays for this.
    (request.method() == Method::OPTIONS)
        .then(|| Cors::of(core, request.headers())?.preflight(request.headers()))
        .flatten()
}

/// Checks that hyper leaves to its users: readers behind this one might see another host, or wait for bytes that never
/// come.
fn check_head(core: &Core, version: Version, headers: &HeaderMap) -> Result<(), RequestError> {
    // HTTP/1.1 has this limit while it is read.
    let limit = core.current.load().config.limits.headers;
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

async fn engine_route(
    core: &Arc<Core>,
    route: Route,
    request: Request<Incoming>,
    id: RequestId,
    stream: Option<OpenStream>,
) -> Response<Answered> {
    let mut ticket = Ticket::new(Arc::clone(core), Record::new(id.clone(), Some(route)));
    if let Some(tracer) = &core.tracer {
        ticket.trace = trace::begin(tracer, request.headers(), route, &id);
    }
    let answer = unless_closing(core, std::pin::pin!(exchange(core, route, request, &mut ticket))).await;
    ticket.release_body();
    match answer {
        Ok(answer) => relay::respond(answer, ticket).map(|body| Answered { body: Either::Left(body), _stream: stream }),
        Err(error) => {
            ticket.finish(error.status().as_u16());
            error.respond(&id, Form::of(Some(route))).map(|body| Answered::here(body, stream))
        }
    }
}

/// Work that ends with an error where it still waits when the gateway closes. Every connection is polled once more
/// then, so that no request has to be registered for it.
async fn unless_closing<T>(
    core: &Core,
    mut work: Pin<&mut impl Future<Output = Result<T, RequestError>>>,
) -> Result<T, RequestError> {
    std::future::poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Pending if core.is_closing() => Poll::Ready(Err(RequestError::Closing)),
        polled => polled,
    })
    .await
}

async fn exchange(
    core: &Arc<Core>,
    route: Route,
    request: Request<Incoming>,
    ticket: &mut Ticket,
) -> Result<relay::Answer, RequestError> {
    let (mut head, body) = request.into_parts();
    let admitted = core.let_in(&mut head.headers).and_then(|caller| {
        ticket.record.caller = caller;
        Coding::take(&mut head.headers)
    });
    let coding = match admitted {
        Ok(coding) => coding,
        Err(refusal) => {
            body::discard(body).await;
            return Err(refusal);
        }
    };
    let mut body = body::read(core, &head.headers, body, ticket).await?;
    let is_coded = coding.is_some() && !body.is_empty();
    if is_coded || !decode::is_plain(route, &body) {
        body = Box::pin(decode::plain(core, coding, route, body, ticket)).await?;
    }
    // Most of what a request holds, and nothing of it before its body is there: clients may open streams and send none.
    Box::pin(answer(core, route, head, body, ticket)).await
}

/// Answers a request whose body has arrived.
async fn answer(
    core: &Arc<Core>,
    route: Route,
    head: Parts,
    body: Bytes,
    ticket: &mut Ticket,
) -> Result<relay::Answer, RequestError> {
    let mut before = None;
    loop {
        let arrived = Instant::now();
        ticket.enter(Stage::Score);
        let caller = ticket.record.caller.clone();
        let job = read::read(core, route, &head.headers, caller, body.clone(), before.as_ref()).await?;
        if before.is_none() {
            job.model.budget.request(arrived);
            if job.body.bytes().as_ptr() != body.as_ptr() {
                ticket.hold(job.body.bytes().len())?;
            }
        }
        ticket.record.read(&job.model, job.scored.tokens, job.streams);
        trace::scored(ticket, &job);
        ticket.policy = job.policy.acting_name();
        if let Some(answer) = relay::relay(core, &head, &job, ticket, arrived).await? {
            return Ok(answer);
        }
        before = Some(job);
    }
}

/// The list of models, or the one that the path names.
fn list_models(core: &Core, mut request: Request<Incoming>, id: &RequestId) -> OwnResponse {
    let answer = core.let_in(request.headers_mut()).and_then(|caller| match models::entry_of(request.uri().path()) {
        None => Ok(models::list(core, &caller)),
        Some(model) => models::entry(core, &caller, model),
    });
    answer.map_or_else(|error| refuse(core, id, models::LIST, &error), IntoResponse::into_response)
}

/// Whether requests can be served, for load balancers and clients that are made for an engine. Needs no key, says no
/// more than engines do, and is logged only where it fails.
fn health(core: &Core, request: &Request<Incoming>, id: &RequestId) -> OwnResponse {
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        return wrong_method(core, request, models::METHODS, id);
    }
    let serves = |model: &Arc<Model>| model.members.iter().any(|member| member.backend.takes_requests());
    if core.is_draining() {
        refuse(core, id, HEALTH, &RequestError::Closing)
    } else if core.snapshot().models.iter().any(serves) {
        let mut ready = StatusCode::OK.into_response();
        ready.headers_mut().insert(REQUEST_ID, id.header().clone());
        ready
    } else {
        refuse(core, id, HEALTH, &RequestError::NotReady)
    }
}

async fn no_route(core: &Core, request: Request<Incoming>, id: &RequestId) -> OwnResponse {
    let (method, path) = method_and_path(&request);
    body::discard(request.into_body()).await;
    refuse(core, id, &path, &RequestError::NoRoute { method, path: path.clone() })
}

/// Answers what reaches no engine.
fn refuse(core: &Core, id: &RequestId, path: &str, error: &RequestError) -> OwnResponse {
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
    Record::refused(id.clone(), path).log(core.current.load().config.log.access, &done);
    // Load balancers ask for it, and it is no request.
    if path != HEALTH {
        core.metrics.requests.done(&done);
    }
    error.respond(id, Form::of_path(path))
}

/// Method and path, for messages.
pub(crate) fn method_and_path<B>(request: &Request<B>) -> (String, String) {
    (request.method().to_string(), request.uri().path().to_owned())
}

fn wrong_method(core: &Core, request: &Request<Incoming>, allowed: &'static str, id: &RequestId) -> OwnResponse {
    let (method, path) = method_and_path(request);
    let mut response = refuse(core, id, request.uri().path(), &RequestError::Method { method, path });
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

/// The body of an answer: the engine's, or one made here.
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

    /// Bytes of the future that a function returns, without calling it.
    fn future_bytes<A, B, C, F>(_: impl Fn(A, B, C) -> F) -> usize {
        size_of::<F>()
    }

    /// Each open stream holds one, and 8,192 connections may have 128 each.
    #[test]
    fn a_request_that_waits_for_its_body_is_small() {
        let bytes = future_bytes(serve);
        assert!(bytes <= 3072, "{bytes} bytes");
        let bytes = size_of::<Answered>();
        assert!(bytes <= 64, "{bytes} bytes");
    }
}
