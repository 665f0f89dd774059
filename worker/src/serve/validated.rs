//! A validated request in any dialect.

use std::sync::Arc;

use axum::http::HeaderMap;
use bytes::Bytes;
use semmoe_engines::{Engine, Route as EngineRoute, pin};
use semmoe_tables::RankId;
use semmoe_text::{Limits, Prompt, Route, prompt_ids};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::app::App;
use super::error::ApiError;
use super::fields;
use crate::engine::SequenceRequest;

/// Maximum number of prompts in one request.
const MAX_PROMPTS: usize = 64;
/// Largest absolute priority, which bounds a request's head start.
const MAX_PRIORITY: u16 = 255;

/// The sequences to run, and the form of the response.
#[derive(Debug)]
pub(super) struct ValidatedRequest {
    /// The rank that the request is pinned to.
    pub(super) rank: Option<RankId>,
    /// One per prompt.
    pub(super) sequences: Vec<SequenceRequest>,
    pub(super) stream: bool,
}

/// Bodies of at least this many bytes are tokenized on another thread.
const LARGE_BODY_BYTES: usize = 4 << 10;

/// Prepares a request, on a blocking thread if its body is large: tokenizing a large body takes milliseconds, which
/// would delay other requests.
pub(super) async fn off_the_runtime<T: Send + 'static>(
    app: &Arc<App>,
    headers: HeaderMap,
    body: Bytes,
    prepare: fn(&App, &HeaderMap, &[u8]) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    if body.len() < LARGE_BODY_BYTES {
        return prepare(app, &headers, &body);
    }
    let app = Arc::clone(app);
    let work = tokio::task::spawn_blocking(move || prepare(&app, &headers, &body));
    work.await.map_err(|_| ApiError::internal("the request could not be prepared"))?
}

/// Parses a body as a JSON object; serde_json limits its nesting depth.
pub(super) fn parse(body: &[u8]) -> Result<Value, ApiError> {
    match serde_json::from_slice(body) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(ApiError::bad("the body must be a JSON object")),
        Err(error) => Err(ApiError::bad(format!("the body is not valid JSON: {error}"))),
    }
}

/// A request's body, pin and typed fields.
pub(super) struct ParsedRequest<T> {
    pub(super) body: Value,
    pub(super) rank: Option<RankId>,
    pub(super) stream: bool,
    /// Index of the first token whose routed experts are requested, if any.
    pub(super) routes_from: Option<u32>,
    pub(super) priority: i16,
    pub(super) fields: T,
}

/// The fields shared by all routes that generate text.
#[derive(Default, Deserialize)]
#[serde(default)]
struct CommonFields {
    stream: Option<bool>,
    return_routed_experts: Option<bool>,
    routed_experts_start_len: Option<u32>,
    priority: Option<i64>,
}

impl<T: DeserializeOwned> ParsedRequest<T> {
    /// Parses the body, the pin and the fields.
    pub(super) fn read(app: &App, route: EngineRoute, headers: &HeaderMap, bytes: &[u8]) -> Result<Self, ApiError> {
        let body = parse(bytes)?;
        let rank = pinned_rank(app, route, headers, bytes)?;
        let mistyped = |error: serde_json::Error| ApiError::bad(format!("a field has the wrong type: {error}"));
        let common = CommonFields::deserialize(&body).map_err(mistyped)?;
        let fields = T::deserialize(&body).map_err(mistyped)?;
        let start = common.routed_experts_start_len.unwrap_or(0);
        let routes_from = common.return_routed_experts.unwrap_or(false).then_some(start);
        let priority = priority(app.unit.limits.priority_seconds, common.priority.unwrap_or(0))?;
        Ok(Self { body, rank, stream: common.stream.unwrap_or(false), routes_from, priority, fields })
    }
}

/// Rejects a priority that has no effect on this worker or exceeds [`MAX_PRIORITY`].
fn priority(priority_seconds: f64, priority: i64) -> Result<i16, ApiError> {
    if priority_seconds == 0.0 && priority != 0 {
        let message = format!("priority {priority} has no effect without --priority-seconds, expected 0");
        return Err(ApiError::param("priority", message));
    }
    i16::try_from(priority).ok().filter(|priority| priority.unsigned_abs() <= MAX_PRIORITY).ok_or_else(|| {
        let message = format!("priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, found {priority}");
        ApiError::param("priority", message)
    })
}

/// Returns the rank that a request is pinned to. On the OpenAI routes, the header takes precedence over the body.
fn pinned_rank(app: &App, route: EngineRoute, headers: &HeaderMap, body: &[u8]) -> Result<Option<RankId>, ApiError> {
    let pinned = pin::client_pin(Engine::Semmoe, route, headers, body)
        .map_err(|error| ApiError::bad(format!("invalid data-parallel rank: {error}")))?;
    let ranks = app.unit.pins();
    match pinned {
        Some(rank) if rank.get() >= ranks => {
            Err(ApiError::bad(format!("the data-parallel rank must be below {ranks}, found {rank}")))
        }
        pinned => Ok(pinned),
    }
}

/// Returns a body's prompts as token ids within the model's vocabulary.
pub(super) fn prompts(app: &App, route: Route, body: &Value) -> Result<Vec<Vec<u32>>, ApiError> {
    if route == Route::Chat {
        fields::check_contents(body)?;
    }
    let limits = Limits { prompts: MAX_PROMPTS, ..Limits::default() };
    let prompt = Prompt::from_json(route, body)?;
    let prompts = prompt_ids(&prompt, &app.served.tokenizer, app.served.template.as_ref(), limits)?;
    let vocabulary = app.served.config.vocab_size;
    match prompts.iter().flatten().find(|id| **id as usize >= vocabulary) {
        Some(id) => Err(ApiError::bad(format!("token id {id} is not below the vocabulary size {vocabulary}"))),
        None => Ok(prompts),
    }
}

/// Combines a request with its prompts. `requested` is the client's limit on new tokens; without one, `default`
/// applies, capped at the remaining context.
pub(super) fn sequences(
    app: &App,
    request: &SequenceRequest,
    prompts: Vec<Vec<u32>>,
    requested: Option<u32>,
    default: Option<u32>,
) -> Result<Vec<SequenceRequest>, ApiError> {
    let join = |tokens: Vec<u32>| -> Result<SequenceRequest, ApiError> {
        let max_new_tokens = new_tokens(tokens.len(), app.context_tokens(), requested, default)?;
        if request.min_new_tokens > max_new_tokens {
            let min = request.min_new_tokens;
            return Err(ApiError::bad(format!(
                "a minimum of {min} and a maximum of {max_new_tokens} new tokens contradict each other"
            )));
        }
        Ok(SequenceRequest { tokens, max_new_tokens, ..request.clone() })
    };
    prompts.into_iter().map(join).collect()
}

/// Returns the maximum number of new tokens for a prompt.
fn new_tokens(prompt: usize, context: usize, requested: Option<u32>, default: Option<u32>) -> Result<u32, ApiError> {
    if prompt == 0 {
        return Err(ApiError::bad("the prompt is empty"));
    }
    let Some(room) = context.checked_sub(prompt).filter(|room| *room > 0) else {
        return Err(ApiError::bad(format!(
            "the prompt has {prompt} tokens, which leaves no room in the model's context of {context} tokens"
        )));
    };
    let room = u32::try_from(room).unwrap_or(u32::MAX);
    match requested {
        Some(0) => Err(ApiError::bad("at least one new token must be requested, found 0")),
        Some(requested) if requested > room => Err(ApiError::bad(format!(
            "the prompt's {prompt} tokens and {requested} new tokens exceed the model's context of {context} tokens"
        ))),
        Some(requested) => Ok(requested),
        None => Ok(default.unwrap_or(u32::MAX).min(room)),
    }
}
