//! Sends a request to an engine, or to several in sequence ([`super::attempts`]), and relays the response as it
//! arrives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body::Body;
use semmoe_engines::failures::Failure;
use semmoe_engines::http::RequestBody;
use semmoe_engines::pin::Stripped;
use semmoe_engines::refusal::RankRefusal;
use semmoe_engines::{Engine, Route, json, routed, verify};

use super::attempt::{Attempt, strip_hop_by_hop};
use super::attempts::{Attempts, Next};
use super::opening::{Opened, Upstream, open};
use super::reports::{Kind, Reports};
use super::retry::{self, Tries};
use super::stream::RelayBody;
use super::watch::{self, Expected};
use super::{DataPlane, Job, Placed, RetryReason, Ticket, Watch, sampling, trace};
use crate::backends::{Backend, FlowPart, REQUEST_ID, RequestError, WaitingStream};
use crate::config::RawRetry;
use crate::observe::{Edit, Sample};

const BACKEND: HeaderName = HeaderName::from_static("x-semmoe-backend");
const RANK: HeaderName = HeaderName::from_static("x-semmoe-rank");
const POLICY: HeaderName = HeaderName::from_static("x-semmoe-policy");
const GENERATION: HeaderName = HeaderName::from_static("x-semmoe-generation");
/// Response header with the number of backends tried, if more than one.
const ATTEMPTS: HeaderName = HeaderName::from_static("x-semmoe-attempts");

/// Engine headers that are not forwarded: they reveal engine addresses, or instruct browsers on the gateway's behalf.
const ENGINES_OWN: [HeaderName; 6] = [
    header::LOCATION,
    header::CONTENT_LOCATION,
    header::REFRESH,
    header::ALT_SVC,
    header::SET_COOKIE,
    HeaderName::from_static("set-cookie2"),
];

/// The head of an engine's response, and its origin.
pub(crate) struct Answer {
    response: Response<Box<Upstream>>,
    kind: Kind,
    /// The facts to search for in the body, and the backend that sent it.
    watch: Watch,
    /// Set if the request was sampled.
    sample: Option<Sample>,
    /// Size limit for removing unrequested routed experts from the response, if it may contain some.
    unasked: Option<usize>,
    /// Maximum silence between two chunks of the body.
    idle_limit: Duration,
}

impl Answer {
    /// Returns the reason to try another backend, if there is one.
    fn failed(&self, config: &RawRetry) -> Option<RetryReason> {
        let by_status = || RetryReason::of_status(self.response.status(), config);
        self.watch.failure.map(RetryReason::Engine).or_else(by_status)
    }
}

/// Makes attempts until one yields a response to relay. Returns `None` if nothing was sent, and the model's backends
/// have changed.
pub(crate) async fn attempts(
    plane: &Arc<DataPlane>,
    head: &Parts,
    job: &Job,
    ticket: &mut Ticket,
) -> Result<Option<Answer>, RequestError> {
    let mut attempts = Attempts::new(plane, job);
    loop {
        let placed = match attempts.next(ticket).await? {
            Next::Attempt(placed) => placed,
            Next::Moved => return Ok(None),
            Next::Answer(answer) => return Ok(Some(answer)),
        };
        let member = placed.lease.backend;
        let (reason, last) = match attempt(head, &attempts.tries, ticket, placed).await {
            Ok(answer) => match answer.failed(&job.snapshot.config.retry) {
                Some(reason) => (reason, Ok(answer)),
                None => {
                    attempts.tries.answered();
                    return Ok(Some(answer));
                }
            },
            Err(error) => match RetryReason::of(&error) {
                None => return Err(error),
                // Send the request again without a pin.
                Some(RetryReason::NoSuchRank) => {
                    attempts.without_pin(error)?;
                    continue;
                }
                Some(reason) => (reason, Err(error)),
            },
        };
        if let Some(answer) = attempts.failed(ticket, member, reason, last).await? {
            return Ok(Some(answer));
        }
    }
}

/// Sends the request to its backend and waits for the response head.
async fn attempt(head: &Parts, tries: &Tries<'_>, ticket: &mut Ticket, placed: Placed) -> Result<Answer, RequestError> {
    let (attempt, job, waited) = (Attempt::new(tries, &placed), tries.job, placed.waited);
    begin(&attempt, ticket, placed);
    let traced = ticket.trace.as_ref().map(|trace| trace.here());
    let write = |body: &Stripped| -> Result<_, RequestError> {
        let mut request = attempt.request(head, body)?;
        if let Some(here) = traced {
            here.pass_on(request.headers_mut());
        }
        Ok(request)
    };
    let mut sample = sampling::choose(attempt.plane, job, attempt.member, attempt.shown);
    let mut request = write(sample.as_ref().map_or(&job.body, |sample| &sample.asking.body))?;
    if sample.is_some() {
        // A compressed response cannot be edited.
        request.headers_mut().remove(header::ACCEPT_ENCODING);
    }
    ticket.hold_copy(copied_bytes(&request, &job.body))?;
    if attempt.expected.as_ref().is_none_or(|expected| !expected.in_meta) {
        attempt.backend.pins.count_request(job.route);
    }
    if tries.tried.is_empty() {
        attempt.plane.metrics.overhead(ticket.arrived.elapsed().saturating_sub(waited));
    }
    let mut answer = attempt.send(request).await;
    // The sampling fields may be why the engine refused the request. No part of the response has reached the client, so
    // send it again unsampled.
    if let Some(refused) = sample.take_if(|_| answer.as_ref().is_ok_and(|answer| may_be_refusal(answer.status()))) {
        // Boxed: few requests are sampled, but otherwise all would reserve memory for this.
        answer = Box::pin(attempt.send(write(&job.body)?)).await;
        refused.sent_without(answer.as_ref().is_ok_and(|answer| answer.status().is_success()));
    }
    let opened = match answer {
        Ok(response) => open(&attempt, response).await,
        Err(failed) => Err(failed),
    };
    match opened {
        Ok(Opened::Answer(response, failure)) => Ok(answered(attempt, ticket, response, failure, sample)),
        Ok(Opened::Refused(refusal)) => Err(refused(&attempt, ticket, &refusal)),
        Err(error) => Err(failed(&attempt, ticket, error)),
    }
}

/// Counts the request as in flight on its rank from now on.
fn begin(Attempt { job, backend, shown, policy, .. }: &Attempt<'_>, ticket: &mut Ticket, placed: Placed) {
    let prompt_tokens = u32::try_from(job.scored.tokens).unwrap_or(u32::MAX);
    let waiting = WaitingStream { since: ticket.arrived, priority: job.priority, prompt_tokens };
    let flow = job.route.runs_model().then(|| FlowPart::begin(&backend.flow, waiting, job.streams));
    ticket.place(backend, *shown, placed, flow);
    trace::placed(ticket, &backend.name, *shown, policy);
}

/// Whether engines use this status to reject a body. Other statuses do not indicate a rejected field.
fn may_be_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY)
}

/// Records that the engine has no such rank and has not processed the request.
fn refused(attempt: &Attempt<'_>, ticket: &mut Ticket, refusal: &RankRefusal) -> RequestError {
    attempt.plane.backends.note_refusal(attempt.backend, refusal);
    trace::failed(ticket, RetryReason::NoSuchRank.label());
    ticket.refused(&attempt.job.scored.blocks);
    ticket.unplace();
    RequestError::NoSuchRank { backend: attempt.backend.name.clone(), rank: refusal.rank }
}

/// Records that no response arrived.
fn failed(attempt: &Attempt<'_>, ticket: &mut Ticket, error: RequestError) -> RequestError {
    let reason = RetryReason::of(&error);
    trace::failed(ticket, reason.map_or("unsent", RetryReason::label));
    match reason {
        // Probes report unhealthy backends, and no backend is to blame if the gateway lacks resources.
        Some(RetryReason::Unhealthy | RetryReason::Exhausted) => {}
        Some(RetryReason::Connect | RetryReason::Broke) => ticket.failed(attempt.backend),
        _ => {
            ticket.recognise(attempt.job.body.bytes());
            ticket.erred(attempt.backend);
        }
    }
    ticket.unplace();
    error
}

/// Prepares a response whose head, and perhaps first chunk, has arrived: the gateway's headers replace the engine's.
fn answered(
    attempt: Attempt<'_>,
    ticket: &mut Ticket,
    mut response: Response<Box<Upstream>>,
    failure: Option<Failure>,
    sample: Option<Sample>,
) -> Answer {
    let Attempt { plane, job, tries, backend, shown, policy, expected, .. } = attempt;
    let (config, route) = (&job.snapshot.config, job.route);
    trace::answered(ticket, response.status());
    note_head(ticket, backend, job, &response, failure);
    let rank = echo(plane, backend, route, &response, expected);
    // Other routes report no token count, but may echo a client's object that contains one.
    let has_count = matches!(route, Route::Chat | Route::Completions | Route::Generate);
    let counted = job.scored.counted.filter(|_| has_count && response.status().is_success());
    let kind = Kind::of(response.headers());
    let (reports, shapes) = (Reports::of(route, kind), job.scored.shapes);
    let watch = Watch { backend: Arc::clone(backend), rank, counted, shapes, reports, failure };
    let unasked = unasked_experts(plane, backend, job, &response).then_some(config.sampling.max_answer_bytes);
    let headers = response.headers_mut();
    strip_hop_by_hop(headers);
    // The gateway's other headers are always set below.
    for name in ENGINES_OWN.iter().chain(&[BACKEND, RANK, ATTEMPTS]) {
        headers.remove(name);
    }
    // The configuration validates the name; if it is not a valid header value, the header is omitted.
    if let Ok(name) = HeaderValue::from_str(&backend.name) {
        headers.insert(BACKEND, name);
    }
    if let Some(rank) = shown {
        headers.insert(RANK, HeaderValue::from(rank.get()));
    }
    headers.insert(POLICY, HeaderValue::from_static(policy));
    headers.insert(GENERATION, HeaderValue::from(job.snapshot.generation));
    if !tries.tried.is_empty() {
        headers.insert(ATTEMPTS, HeaderValue::from(tries.tried.len() + 1));
    }
    Answer { response, kind, watch, sample, unasked, idle_limit: config.timeouts.idle }
}

/// Size of the copied request body; 0 if nothing was inserted or removed, because then there is no copy.
fn copied_bytes(request: &Request<RequestBody>, body: &Stripped) -> usize {
    let sent = usize::try_from(request.body().size_hint().lower()).unwrap_or(usize::MAX);
    if sent == body.bytes().len() { 0 } else { sent }
}

/// Records the evidence in a response head about the load and the backend. `failure`: the engine failed before its
/// response had any content.
fn note_head(
    ticket: &mut Ticket,
    backend: &Arc<Backend>,
    job: &Job,
    response: &Response<Box<Upstream>>,
    failure: Option<Failure>,
) {
    if failure.is_some() || response.status().is_server_error() || job.model.has_errors() {
        ticket.recognise(job.body.bytes());
    }
    if let Some(failure) = failure {
        watch::note_failure(ticket, backend, failure);
    } else if response.status().is_success() {
        ticket.answered();
    }
    if response.status().is_client_error() {
        ticket.refused(&job.scored.blocks);
    }
    if let Some(rest) = retry::retry_after(response) {
        backend.gate.rest(Instant::now(), rest);
    }
    let status = response.status();
    if retry::is_not_the_engines(response) {
        ticket.failed(backend);
    } else if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED && job.route.runs_model() {
        ticket.erred(backend);
    }
}

/// Whether a response may contain unrequested routed experts. A vLLM started with its flag adds them to every
/// non-streamed response; one such response identifies the backend.
fn unasked_experts(plane: &DataPlane, backend: &Backend, job: &Job, response: &Response<Box<Upstream>>) -> bool {
    if backend.engine != Engine::Vllm || !matches!(job.route, Route::Chat | Route::Completions) {
        return false;
    }
    let is_json = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
    if !response.status().is_success() || !is_json || response.headers().contains_key(header::CONTENT_ENCODING) {
        return false;
    }
    if !backend.live.tells_unasked() {
        if !routed::has_routed_experts(&response.body().ahead_bytes()) {
            return false;
        }
        plane.live.note_unasked(&backend.live);
    }
    !matches!(json::top_level(job.body.bytes(), routed::PROMPT_START_FIELD), Ok(Some(_)))
}

/// Compares the rank in a response head with the pin; returns what to search for in the body.
fn echo(
    plane: &DataPlane,
    backend: &Backend,
    route: Route,
    response: &Response<Box<Upstream>>,
    expected: Option<Expected>,
) -> Option<Expected> {
    let expected = expected.filter(|_| response.status().is_success())?;
    match verify::echoed_rank(response.headers()) {
        Some(rank) => {
            plane.backends.note_pin(backend, route, expected.wire_rank, rank);
            None
        }
        None => Some(expected).filter(|expected| expected.in_meta),
    }
}

/// Builds the response to the client; its body owns the ticket.
pub(crate) fn respond(answer: Answer, ticket: Ticket) -> Response<Box<RelayBody>> {
    let Answer { response, kind, watch, sample, unasked, idle_limit } = answer;
    let (mut head, body) = response.into_parts();
    head.headers.insert(REQUEST_ID, ticket.record.id.header().clone());
    let events = kind == Kind::Events;
    let edit = match sample {
        Some(sample) => Edit::begin(sample, &head, events),
        None => unasked.filter(|_| !events).map(Edit::unasked),
    };
    if events || edit.is_some() {
        // An error event may lengthen the body, and removing experts may shorten it.
        head.headers.remove(header::CONTENT_LENGTH);
    }
    let relayed = RelayBody::new(body, events, edit, idle_limit, head.status.as_u16(), watch, ticket);
    let mut response = Response::new(Box::new(relayed));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    response
}
