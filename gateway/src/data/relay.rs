//! To the engine and back: one request out, or several one after the other ([`super::attempts`]), the answer relayed as
//! it comes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body::Body;
use http_body_util::Full;
use semmoe_engines::failures::Failure;
use semmoe_engines::http::RequestBody;
use semmoe_engines::pin::Stripped;
use semmoe_engines::refusal::RankRefusal;
use semmoe_engines::{Dialect, Engine, Route, json, pin, routed, verify};
use semmoe_tables::RankId;

use crate::backend::Backend;
use crate::config::RawRetry;
use crate::error::RequestError;
use crate::flow::FlowPart;
use crate::heads::WaitingStream;
use crate::live::{self, Edit, Sample};
use crate::request_id::REQUEST_ID;
use crate::state::Core;

use super::attempts::{Attempts, Next};
use super::opening::{Opened, Upstream, open, send_sampled};
use super::place::Placed;
use super::read::Job;
use super::reports::{Kind, Reports};
use super::retry::{self, Cause, SendError, Tries, Wait};
use super::served;
use super::stream::RelayBody;
use super::ticket::Ticket;
use super::trace;
use super::watch::{self, Expected, Watch};

const BACKEND: HeaderName = HeaderName::from_static("x-semmoe-backend");
const RANK: HeaderName = HeaderName::from_static("x-semmoe-rank");
const POLICY: HeaderName = HeaderName::from_static("x-semmoe-policy");
const GENERATION: HeaderName = HeaderName::from_static("x-semmoe-generation");
/// Backends that were asked, where it was not one.
const ATTEMPTS: HeaderName = HeaderName::from_static("x-semmoe-attempts");

/// Headers that are about one connection, not about the message (RFC 9110, 7.6.1).
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Of clients' requests: cookies of whatever site the gateway is a part of are none of the engine's business.
const CLIENTS_OWN: [HeaderName; 2] = [header::COOKIE, HeaderName::from_static("cookie2")];
/// Of engines' answers: they contain addresses of engines, or speak to browsers in the gateway's name.
const ENGINES_OWN: [HeaderName; 6] = [
    header::LOCATION,
    header::CONTENT_LOCATION,
    header::REFRESH,
    header::ALT_SVC,
    header::SET_COOKIE,
    HeaderName::from_static("set-cookie2"),
];

/// The head of an engine's answer, and where it came from.
pub(crate) struct Answer {
    response: Response<Box<Upstream>>,
    kind: Kind,
    /// The expected content of its body, and its sender.
    watch: Watch,
    /// `None` where the engine chose it, or is known to have ignored the pin.
    rank: Option<RankId>,
    policy: &'static str,
    /// Of the tables and everything else that it was placed by.
    generation: u64,
    /// The request was sampled.
    sample: Option<Sample>,
    /// The longest answer that is held back to cut out routed experts that nothing asked for, where it may have some.
    unasked: Option<usize>,
    /// Longest silence between two pieces of its body.
    idle_limit: Duration,
    /// Backends that were asked.
    attempts: usize,
}

impl Answer {
    /// Why another backend is asked, where it is.
    fn failed(&self, config: &RawRetry) -> Option<Cause> {
        let by_status = || Cause::of_status(self.response.status(), config);
        self.watch.failure.map(Cause::Engine).or_else(by_status)
    }
}

/// `None` if nothing was sent, and the model has other backends by now.
pub(crate) async fn relay(
    core: &Arc<Core>,
    head: &Parts,
    job: &Job,
    ticket: &mut Ticket,
    arrived: Instant,
) -> Result<Option<Answer>, RequestError> {
    let mut attempts = Attempts::new(core, job);
    loop {
        let placed = match attempts.next(ticket).await? {
            Next::Attempt(placed) => placed,
            Next::Moved => return Ok(None),
            Next::Answer(answer) => return Ok(Some(answer)),
        };
        let member = placed.lease.backend;
        let (cause, last) = match attempt(core, head, job, ticket, arrived, placed, &attempts.tries).await? {
            Ok(answer) => match answer.failed(&job.snapshot.config.retry) {
                Some(cause) => (cause, Ok(answer)),
                None => {
                    attempts.tries.answered();
                    return Ok(Some(answer));
                }
            },
            // The engine is asked again, without a pin.
            Err((Cause::NoSuchRank, error)) => {
                attempts.without_pin(error)?;
                continue;
            }
            Err((cause, error)) => (cause, Err(error)),
        };
        if let Some(answer) = attempts.failed(ticket, member, cause, last).await? {
            return Ok(Some(answer));
        }
    }
}

/// Sends the request to the backend where it was placed, and waits for the head of the answer.
async fn attempt(
    core: &Arc<Core>,
    head: &Parts,
    job: &Job,
    ticket: &mut Ticket,
    arrived: Instant,
    placed: Placed,
    tries: &Tries<'_>,
) -> Result<Result<Answer, (Cause, RequestError)>, RequestError> {
    let (config, route) = (&job.snapshot.config, job.route);
    let (policy, waited, lease) = (placed.policy, placed.waited, &placed.lease);
    let (at, member) = (lease.backend, &job.model.members[lease.backend]);
    let (backend, dialect) = (&member.backend, &member.fit.dialect);
    let pinned = Some(lease.chosen).filter(|_| member.sends_pin(route));
    // A pin may have been refused since it was placed.
    let shown = lease.rank.filter(|_| pinned.is_some() || member.fit.ranks <= 1);
    let prompt_tokens = u32::try_from(job.scored.tokens).unwrap_or(u32::MAX);
    let waiting = WaitingStream { since: arrived, priority: job.priority, prompt_tokens };
    let flow = route.runs_model().then(|| FlowPart::begin(&backend.flow, waiting, job.streams));
    ticket.place(backend, shown, placed, flow);
    trace::placed(ticket, &backend.name, shown, policy);
    let traced = ticket.trace.as_ref().map(|trace| trace.here());
    let write = |body: &Stripped| {
        let body = served::body(backend, route, job.adapter.as_deref(), body);
        let mut request = outbound(backend, dialect, route, head, &body, pinned)?;
        if let Some(here) = traced {
            here.pass_on(request.headers_mut());
        }
        Ok(request)
    };
    let sample = Sample::choose(core, &config.sampling, &job.model, &job.body, route, at, shown);
    let request = write(sample.as_ref().map_or(&job.body, |sample| &sample.asking.body))?;
    ticket.hold_copy(copied_bytes(&request, &job.body))?;
    let expected = pinned.and_then(|rank| Expected::new(dialect, route, rank));
    if expected.as_ref().is_none_or(|expected| !expected.in_meta) {
        backend.pins.count_request(route);
    }
    let attempts = tries.tried.len() + 1;
    if attempts == 1 {
        core.metrics.overhead(arrived.elapsed().saturating_sub(waited));
    }
    let (limit, hold) = (config.timeouts.first_byte, Duration::from_secs_f64(config.retry.hold_seconds));
    let wait = Wait { core, backend, member: at, limit, hold, tries };
    let (answer, sample) = match sample {
        None => (wait.send(request).await, None),
        // Boxed: few requests are sampled, and all would reserve memory for it.
        Some(sample) => Box::pin(send_sampled(&wait, request, sample, || write(&job.body))).await?,
    };
    let wire_rank = expected.as_ref().map(|expected| expected.wire_rank);
    let opened = match answer {
        Ok(response) => open(&wait, response, route, job.streams, wire_rank).await,
        Err(cause) => Err(cause),
    };
    let sent = Sent { core, job, backend, shown, policy, expected, sample, attempts };
    Ok(match opened {
        Ok(Opened { refusal: Some(refusal), .. }) => Err(sent.refused(ticket, &refusal)),
        Ok(Opened { response, failure, .. }) => Ok(sent.answered(ticket, response, failure)),
        Err(cause) => Err(sent.failed(ticket, cause)),
    })
}

/// A request that was sent to a backend.
struct Sent<'a> {
    core: &'a Arc<Core>,
    job: &'a Job,
    backend: &'a Arc<Backend>,
    /// The rank that the client is shown.
    shown: Option<RankId>,
    policy: &'static str,
    expected: Option<Expected>,
    sample: Option<Sample>,
    /// Backends that were asked.
    attempts: usize,
}

impl Sent<'_> {
    /// The engine has no such rank, and did nothing.
    fn refused(&self, ticket: &mut Ticket, refusal: &RankRefusal) -> (Cause, RequestError) {
        self.core.note_refusal(self.backend, refusal);
        trace::failed(ticket, Cause::NoSuchRank.label());
        ticket.refused(&self.job.scored.blocks);
        ticket.unplace();
        let cause = format!("it has no rank {}, to which the request was pinned", refusal.rank);
        (Cause::NoSuchRank, RequestError::Broken { backend: self.backend.name.clone(), cause })
    }

    /// The head of an answer came, and perhaps its first piece.
    fn answered(self, ticket: &mut Ticket, response: Response<Box<Upstream>>, failure: Option<Failure>) -> Answer {
        let Self { core, job, backend, shown, policy, expected, sample, attempts } = self;
        let (config, route) = (&job.snapshot.config, job.route);
        trace::answered(ticket, response.status());
        note_head(ticket, backend, job, &response, failure);
        let rank = echo(core, backend, route, &response, expected);
        // Other routes have no such count of their own, but may repeat a client's object that has one.
        let has_count = matches!(route, Route::Chat | Route::Completions | Route::Generate);
        let counted = job.scored.counted.filter(|_| has_count && response.status().is_success());
        let kind = Kind::of(response.headers());
        let (reports, shapes) = (Reports::of(route, kind), job.scored.shapes);
        let watch = Watch { backend: Arc::clone(backend), rank, counted, shapes, reports, failure };
        let unasked = unasked_experts(core, backend, job, &response).then_some(config.sampling.max_answer_bytes);
        let (idle_limit, generation) = (config.timeouts.idle, job.snapshot.generation);
        Answer { response, kind, watch, rank: shown, policy, generation, sample, unasked, idle_limit, attempts }
    }

    /// No answer came.
    fn failed(&self, ticket: &mut Ticket, error: SendError) -> (Cause, RequestError) {
        let (cause, error) = error.judge(self.backend);
        trace::failed(ticket, cause.label());
        match cause {
            // Probes report unhealthy backends, and what the gateway lacks is no backend's fault.
            Cause::Unhealthy | Cause::Exhausted => {}
            Cause::Connect | Cause::Broke => ticket.failed(self.backend),
            _ => {
                ticket.recognise(self.job.body.bytes());
                ticket.erred(self.backend);
            }
        }
        ticket.unplace();
        (cause, error)
    }
}

/// Bytes of a request's body that are its own, as something was put into it or cut out.
fn copied_bytes(request: &Request<RequestBody>, body: &Stripped) -> usize {
    let sent = usize::try_from(request.body().size_hint().lower()).unwrap_or(usize::MAX);
    if sent == body.bytes().len() { 0 } else { sent }
}

/// The evidence in an answer's head about the request's load and the backend. `failure`: the engine failed before its
/// answer had any content.
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

/// Whether an answer may have routed experts that nothing asked for. vLLM sends them to every client when it is started
/// with its flag, in every answer that is no stream; one answer shows that for the backend.
fn unasked_experts(core: &Core, backend: &Backend, job: &Job, response: &Response<Box<Upstream>>) -> bool {
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
        live::note_unasked(core, backend);
    }
    !matches!(json::top_level(job.body.bytes(), routed::PROMPT_START_FIELD), Ok(Some(_)))
}

/// Compares the rank that the head of an answer names with the pin; returns what is still to be seen in its body.
fn echo(
    core: &Core,
    backend: &Backend,
    route: Route,
    response: &Response<Box<Upstream>>,
    expected: Option<Expected>,
) -> Option<Expected> {
    let expected = expected.filter(|_| response.status().is_success())?;
    match verify::echoed_rank(response.headers()) {
        Some(rank) => {
            core.note_pin(backend, route, expected.wire_rank, rank);
            None
        }
        None => Some(expected).filter(|expected| expected.in_meta),
    }
}

/// The request as the engine gets it: the client's, less what is about the connection, with the pin.
fn outbound(
    backend: &Backend,
    dialect: &Dialect,
    route: Route,
    head: &Parts,
    body: &Stripped,
    pinned: Option<RankId>,
) -> Result<Request<RequestBody>, RequestError> {
    let mut headers = head.headers.clone();
    strip_hop_by_hop(&mut headers);
    // The HTTP client writes its own; the body is complete here, so no `Expect` remains.
    for name in CLIENTS_OWN.iter().chain(&[header::HOST, header::CONTENT_LENGTH, header::EXPECT]) {
        headers.remove(name);
    }
    pin::strip_headers(&mut headers);
    let body = match pinned {
        None => body.bytes().clone(),
        Some(rank) => pin::apply(dialect, route, rank, &mut headers, body)?,
    };
    let uri = backend.url(dialect, pinned).join(&path(route, head));
    let uri = uri.map_err(|_| RequestError::Field { cause: "the query cannot be sent to an engine".to_owned() })?;
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    Ok(request)
}

fn path(route: Route, head: &Parts) -> String {
    let path = if route == Route::Extra { head.uri.path() } else { route.path() };
    match head.uri.query() {
        None => path.to_owned(),
        Some(query) => format!("{path}?{query}"),
    }
}

/// The engine's answer with our four headers; the ticket goes with the body.
pub(crate) fn respond(answer: Answer, ticket: Ticket) -> Response<Box<RelayBody>> {
    let Answer { response, kind, watch, rank, policy, generation, sample, unasked, idle_limit, attempts } = answer;
    let (mut head, body) = response.into_parts();
    strip_hop_by_hop(&mut head.headers);
    // Our other headers are always set below.
    for name in ENGINES_OWN.iter().chain(&[BACKEND, RANK, ATTEMPTS]) {
        head.headers.remove(name);
    }
    head.headers.insert(REQUEST_ID, ticket.record.id.header().clone());
    // The name was checked with the configuration; one that is no header value is left out.
    if let Ok(name) = HeaderValue::from_str(&watch.backend.name) {
        head.headers.insert(BACKEND, name);
    }
    if let Some(rank) = rank {
        head.headers.insert(RANK, HeaderValue::from(rank.get()));
    }
    head.headers.insert(POLICY, HeaderValue::from_static(policy));
    head.headers.insert(GENERATION, HeaderValue::from(generation));
    if attempts > 1 {
        head.headers.insert(ATTEMPTS, HeaderValue::from(attempts));
    }
    let events = kind == Kind::Events;
    let edit = match sample {
        Some(sample) => Edit::begin(sample, &head, events),
        None => unasked.filter(|_| !events).map(Edit::unasked),
    };
    if events || edit.is_some() {
        // An error event may make it longer, a cut shorter.
        head.headers.remove(header::CONTENT_LENGTH);
    }
    let relayed = RelayBody::new(body, events, edit, idle_limit, head.status.as_u16(), watch, ticket);
    let mut response = Response::new(Box::new(relayed));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    response
}

/// Removes the headers of the connection, also those that `Connection` names.
fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_headers_stay_behind() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-private"),
            ("connection", "Keep-Alive"),
            ("x-private", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("authorization", "Bearer x"),
            ("accept", "text/event-stream"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        strip_hop_by_hop(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["accept", "authorization"]);
    }
}
