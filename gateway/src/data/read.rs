//! Reads a request: its model, its token count, and its tokens' expected locality on each rank.
//!
//! Only this module and [`super::score`] parse the body, and nothing serializes it again. Long bodies are read off the
//! network threads, and wait only a limited time for their score.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use http::HeaderMap;
use semmoe_engines::pin::{self, Stripped};
use semmoe_engines::{Route, json};
use semmoe_routing::Policy;
use semmoe_tables::RankId;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::fields::Marked;
use super::score::{Effort, Scored, Unscored, Whole, score};
use super::{DataPlane, served};
use crate::backends::{Model, RequestError, Snapshot};
use crate::data::trust::Caller;

/// The header that names the model if the body cannot.
const MODEL_HEADER: &str = "x-semmoe-model";
/// Size from which a single word takes a tenth of a second or more to encode.
const HUGE_BYTES: usize = 256 << 10;

/// Maximum number of times that a waiting request is reread under a new snapshot, so that its wait is bounded.
const MAX_MOVES: u32 = 8;

/// A request that has been read.
pub(crate) struct Job {
    /// The snapshot that the request uses until it ends.
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) model: Arc<Model>,
    pub(crate) route: Route,
    pub(crate) body: Stripped,
    /// The request's scored prompt.
    pub(crate) scored: Scored,
    /// Hash of the client's session.
    pub(crate) key: Option<u64>,
    /// Whether the response is streamed.
    pub(crate) streams: bool,
    /// Number of choices: `n` on the OpenAI routes.
    pub(crate) sequences: u32,
    /// The client's limit on generated tokens per choice.
    pub(crate) most_output: Option<u64>,
    /// The `priority` in the body, 0 if absent; `None` if it is outside 0 to 255.
    pub(crate) priority: Option<u8>,
    /// The policy that places this request, including its retries.
    pub(crate) policy: Arc<dyn Policy>,
    /// The client's pin, if client pins are trusted.
    pub(crate) client_pin: Option<RankId>,
    /// The named adapter, without its model's name.
    pub(crate) adapter: Option<String>,
    /// How often the request was reread because the model's backends changed while it waited.
    moves: u32,
}

impl Job {
    /// Creates a job without a key or a pin, whose response is not streamed.
    fn new(
        snapshot: Arc<Snapshot>,
        model: Arc<Model>,
        route: Route,
        scored: Scored,
        adapter: Option<String>,
        body: Stripped,
    ) -> Self {
        let policy = Arc::clone(&model.plan.policy);
        Self {
            snapshot,
            model,
            route,
            body,
            scored,
            key: None,
            streams: false,
            sequences: 1,
            most_output: None,
            priority: Some(0),
            policy,
            client_pin: None,
            adapter,
            moves: 0,
        }
    }

    /// Whether a backend outside `except` accepts requests. Checks the backends as well as the pool, because the pool
    /// of an earlier snapshot is no longer updated when they close.
    pub(super) fn has_other(&self, except: &[usize]) -> bool {
        let takes = |at: usize| self.model.members[at].backend.takes_requests();
        self.model.pool.has_one(|backend| !except.contains(&backend) && takes(backend))
    }

    /// Whether the model's backends or ranks have changed, so that rereading the request may place it.
    pub(super) fn has_moved(&self, plane: &DataPlane) -> bool {
        let now = plane.backends.snapshot();
        let model = || now.models.iter().find(|model| model.name == self.model.name);
        now.generation != self.snapshot.generation
            && self.moves < MAX_MOVES
            && model().is_some_and(|model| !Arc::ptr_eq(&model.pool, &self.model.pool))
    }
}

/// Reads a request. `before` is the result under an earlier snapshot, if any.
pub(crate) async fn read(
    plane: &Arc<DataPlane>,
    route: Route,
    headers: &HeaderMap,
    caller: Caller,
    body: Bytes,
    before: Option<&Job>,
) -> Result<Job, RequestError> {
    let snapshot = plane.backends.snapshot();
    let short = body.len() < snapshot.config.routing.offload_bytes;
    let here = short.then(|| read_now(plane, Arc::clone(&snapshot), route, headers, &caller, &body, Effort::Here));
    let mut job = match here {
        Some(Ok(job)) => job,
        Some(Err(Unread::Refused(error))) => return Err(error),
        Some(Err(Unread::NotHere)) | None => read_long(plane, snapshot, route, headers.clone(), caller, body).await?,
    };
    // A canary counts each request once, however often it is reread.
    job.policy = match before.filter(|before| Arc::ptr_eq(&before.model.plan, &job.model.plan)) {
        Some(before) => Arc::clone(&before.policy),
        None => job.model.plan.next(),
    };
    job.moves = before.map_or(0, |before| before.moves + 1);
    Ok(job)
}

/// Reads off the network threads, and limits the wait for the score. Once the request has its score, stops waiting or
/// loses its client, its remaining work stops at the next slice.
async fn read_long(
    plane: &Arc<DataPlane>,
    snapshot: Arc<Snapshot>,
    route: Route,
    headers: HeaderMap,
    caller: Caller,
    body: Bytes,
) -> Result<Job, RequestError> {
    let limit = snapshot.config.routing.score_limit;
    let lane = if body.len() >= HUGE_BYTES { &plane.scoring_huge } else { &plane.scoring };
    let plane_too = Arc::clone(plane);
    let work = Arc::new(move |effort: Effort<'_>| {
        let read = read_now(&plane_too, Arc::clone(&snapshot), route, &headers, &caller, &body, effort);
        read.map_err(|unread| match unread {
            Unread::Refused(error) => error,
            Unread::NotHere => {
                RequestError::Internal { source: "the request could not be read even on a blocking thread".into() }
            }
        })
    });
    // Neither acquisition can fail: the semaphores are never closed, and `read_now` catches panics in scoring.
    let died = |error: tokio::task::JoinError| Err(RequestError::from(error));
    let scored = async {
        let given_up = CancellationToken::new();
        let _waiting = given_up.clone().drop_guard();
        let permit = Arc::clone(lane).acquire_owned().await;
        let work = Arc::clone(&work);
        let done = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(Effort::Away(&mut || !given_up.is_cancelled()))
        });
        done.await.unwrap_or_else(died)
    };
    match tokio::time::timeout(limit, scored).await {
        Ok(job) => job,
        // This read occupies no slot in the scoring lanes.
        Err(_) => {
            let permit = Arc::clone(&plane.skimming).acquire_owned().await;
            let done = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                work(Effort::Skip { limit })
            });
            done.await.unwrap_or_else(died)
        }
    }
}

/// Why a request was not read.
enum Unread {
    Refused(RequestError),
    /// Reading requires work that must not run on a network thread.
    NotHere,
}

impl<E: Into<RequestError>> From<E> for Unread {
    fn from(error: E) -> Self {
        Self::Refused(error.into())
    }
}

/// Positions of the body members that the gateway uses. If a member is repeated, the last one counts, as in the
/// engines' parsers.
#[derive(Default)]
struct Members {
    model: Option<Range<usize>>,
    stream: Option<Range<usize>>,
    priority: Option<Range<usize>>,
    sequences: Option<Range<usize>>,
    most_output: Option<Range<usize>>,
    sampling: Option<Range<usize>>,
}

/// SGLang's sampling parameters that bound the generation.
#[derive(Default, Deserialize)]
struct Sampling {
    n: Option<u32>,
    max_new_tokens: Option<u64>,
}

impl Members {
    fn see(&mut self, body: &[u8], member: &json::Member) {
        if member.is(body, "model") {
            self.model = Some(member.value.clone());
        } else if member.is(body, "stream") {
            self.stream = Some(member.value.clone());
        } else if member.is(body, "priority") {
            self.priority = Some(member.value.clone());
        } else if member.is(body, "n") {
            self.sequences = Some(member.value.clone());
        } else if ["max_tokens", "max_completion_tokens", "max_output_tokens"].iter().any(|name| member.is(body, name))
        {
            self.most_output = Some(member.value.clone());
        } else if member.is(body, "sampling_params") {
            self.sampling = Some(member.value.clone());
        }
    }
}

fn read_now(
    plane: &DataPlane,
    snapshot: Arc<Snapshot>,
    route: Route,
    headers: &HeaderMap,
    caller: &Caller,
    body: &Bytes,
    effort: Effort<'_>,
) -> Result<Job, Unread> {
    if route == Route::Extra {
        return read_extra(plane, snapshot, headers, caller, body).map_err(Unread::Refused);
    }
    let (mut members, mut marked) = (Members::default(), Marked::default());
    let whole = Whole::new(route, body, &effort);
    let stripped = Stripped::seeing(body, whole.known(), |member, field| {
        members.see(body, member);
        marked.see(route, field, member);
    })?;
    let routing = &snapshot.config.routing;
    let name = named(route, headers, members.model.map(|value| &body[value]))?;
    let model = permitted(plane, &snapshot, name.as_deref(), caller)?;
    marked.check(route, body, model)?;
    let client_pin = if routing.trust_client_pins { trusted_pin(model, route, headers, body)? } else { None };
    let block_tokens = routing.prefix.block_tokens;
    let mut scored = match score(plane, model, route, &whole, block_tokens, effort) {
        Ok(scored) => scored,
        Err(Unscored::Client(error)) => return Err(Unread::Refused(error)),
        Err(Unscored::OracleAway | Unscored::TemplateBudget { .. }) => return Err(Unread::NotHere),
        Err(Unscored::GivenUp) => return Err(RequestError::Internal { source: "given up".into() }.into()),
        Err(Unscored::Open { reason, cause }) => {
            plane.metrics.score_failure(reason);
            tracing::warn!(model = model.name, %route, reason, %cause, "prompt not scored, routed by load");
            Scored::unseen(body)
        }
    };
    if route == Route::Messages && model.scoring_text().is_some() {
        // Engines convert this form to a chat in their own ways.
        plane.metrics.score_failure("messages");
    }
    let adapter = name.as_deref().filter(|name| !model.is_named(name));
    if let Some(adapter) = adapter {
        tell_apart(&mut scored.blocks, adapter.as_bytes());
    }
    if let Some(adapters) = marked.adapters(body) {
        tell_apart(&mut scored.blocks, adapters);
    }
    let key = session(headers, &routing.sticky_header).map(|value| semmoe_routing::hash_key(value.as_bytes()));
    let adapter = adapter.and_then(|name| served::adapter(model, name));
    // The body is known to be JSON here.
    let streams = members.stream.is_some_and(|value| body[value] == *b"true");
    let priority = members.priority.map_or(Some(0), |value| number(body, value));
    // A list of sampling parameters belongs to a list of prompts, which counts as one request.
    let sampling = members.sampling.filter(|_| route == Route::Generate);
    let sampling: Sampling = sampling.and_then(|value| serde_json::from_slice(&body[value]).ok()).unwrap_or_default();
    let sequences = members.sequences.and_then(|value| number(body, value)).or(sampling.n).unwrap_or(1);
    let most_output = members.most_output.and_then(|value| number(body, value)).or(sampling.max_new_tokens);
    let model = Arc::clone(model);
    let job = Job::new(snapshot, model, route, scored, adapter, stripped);
    Ok(Job { client_pin, key, streams, sequences, most_output, priority, ..job })
}

/// Returns a member's value, if it is a number of this type.
fn number<N: std::str::FromStr>(body: &[u8], value: Range<usize>) -> Option<N> {
    std::str::from_utf8(&body[value]).ok()?.parse().ok()
}

/// Session headers of other routers and agents, tried after the configured one.
const SESSION_HEADERS: [&str; 2] = ["x-session-id", "conversation_id"];

/// Returns the name of the request's session.
fn session<'a>(headers: &'a HeaderMap, configured: &http::HeaderName) -> Option<&'a http::HeaderValue> {
    headers.get(configured).or_else(|| SESSION_HEADERS.iter().find_map(|name| headers.get(*name)))
}

/// Reads a request on a route whose bodies only the engine understands; the body may be empty. If it is a JSON object,
/// it may name the model, and client pins are removed, as on every route.
fn read_extra(
    plane: &DataPlane,
    snapshot: Arc<Snapshot>,
    headers: &HeaderMap,
    caller: &Caller,
    body: &Bytes,
) -> Result<Job, RequestError> {
    let mut marked = Marked::default();
    let seeing = Stripped::seeing(body, None, |member, field| marked.see(Route::Extra, field, member));
    let stripped = match seeing {
        Ok(stripped) => stripped,
        // Reject the body: the engine's parser may accept it, along with any pins and model in it.
        Err(error) if json::begins_object(body) => return Err(error.into()),
        Err(_) => Stripped::opaque(body),
    };
    if caller.models().is_some() && is_form(headers) {
        let cause =
            "this API key is restricted to certain models, and the gateway does not read the model field of form data";
        return Err(RequestError::Field { source: cause.into() });
    }
    let named = model_name(Route::Extra, headers, stripped.bytes()).or_else(|error| match error {
        RequestError::BodyScan { .. } => model_name(Route::Generate, headers, &[]),
        other => Err(other),
    })?;
    let model = permitted(plane, &snapshot, named.as_deref(), caller)?;
    marked.check(Route::Extra, body, model)?;
    let adapter = named.as_deref().filter(|name| !model.is_named(name)).and_then(|name| served::adapter(model, name));
    let model = Arc::clone(model);
    Ok(Job::new(snapshot, model, Route::Extra, Scored::unseen(body), adapter, stripped))
}

/// Whether the body is a form, which names its model in a form field (audio transcriptions).
fn is_form(headers: &HeaderMap) -> bool {
    let is = |kind: &[u8], start: &[u8]| kind.get(..start.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(start));
    let kinds = headers.get_all(http::header::CONTENT_TYPE).iter().map(http::HeaderValue::as_bytes);
    kinds.map(<[u8]>::trim_ascii).any(|kind| is(kind, b"multipart/") || is(kind, b"application/x-www-form-urlencoded"))
}

/// Returns the model with this name, if it exists and the caller may use it. To restricted callers, forbidden and
/// unknown models are indistinguishable.
fn permitted<'a>(
    plane: &DataPlane,
    snapshot: &'a Snapshot,
    name: Option<&str>,
    caller: &Caller,
) -> Result<&'a Arc<Model>, RequestError> {
    let found = snapshot.model(name);
    let Some(allowed) = caller.models() else { return found };
    match (found, name) {
        (Ok(model), _) if caller.may_use(&model.name) => Ok(model),
        (_, Some(name)) => {
            plane.metrics.trust.auth_failure("model");
            Err(RequestError::unknown_model(name, allowed.join(", ")))
        }
        (_, None) => Err(RequestError::NoModel { known: allowed.join(", ") }),
    }
}

/// Makes the adapter part of each block's identity, because engines share no KV cache between adapters.
fn tell_apart(blocks: &mut [u64], adapter: &[u8]) {
    if !blocks.is_empty() {
        let adapter = semmoe_routing::hash_key(adapter);
        blocks.iter_mut().for_each(|block| *block ^= adapter);
    }
}

fn model_name<'a>(route: Route, headers: &'a HeaderMap, body: &'a [u8]) -> Result<Option<Cow<'a, str>>, RequestError> {
    named(route, headers, if route.names_model() { json::top_level(body, "model")? } else { None })
}

/// Returns the model's name: `value` from the body, or else the header's.
fn named<'a>(
    route: Route,
    headers: &'a HeaderMap,
    value: Option<&'a [u8]>,
) -> Result<Option<Cow<'a, str>>, RequestError> {
    match value.filter(|value| route.names_model() && *value != b"null") {
        None => Ok(headers.get(MODEL_HEADER).and_then(|value| value.to_str().ok()).map(Cow::Borrowed)),
        Some(value) => serde_json::from_slice::<String>(value)
            .map(|name| Some(Cow::Owned(name)))
            .map_err(|_| RequestError::Field { source: "model must be a string".into() }),
    }
}

fn trusted_pin(model: &Model, route: Route, headers: &HeaderMap, body: &[u8]) -> Result<Option<RankId>, RequestError> {
    for member in &model.members {
        if let Some(pin) = pin::client_pin(member.backend.engine, route, headers, body)? {
            return Ok(Some(pin));
        }
    }
    Ok(None)
}
