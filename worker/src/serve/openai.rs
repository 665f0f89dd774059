//! The OpenAI routes, with SGLang's extensions.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use semmoe_engines::Route as EngineRoute;
use semmoe_text::{Route, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::answer::{Answer, Delta};
use super::app::App;
use super::error::ApiError;
use super::fields;
use super::info::unix_time;
use super::listen::WholeBody;
use super::logprobs;
use super::params::SamplingFields;
use super::reply::{Dialect, serve};
use super::validated::{self, ParsedRequest, ValidatedRequest};
use crate::engine::Finish;

/// OpenAI's default limit on new tokens for completions; chats default to the rest of the context.
const DEFAULT_COMPLETION_TOKENS: u32 = 16;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    model: Option<String>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    logprobs: Option<Value>,
    top_logprobs: Option<u64>,
    return_input_ids_in_sglext: Option<bool>,
    return_output_ids_in_sglext: Option<bool>,
    #[serde(flatten)]
    sampling: SamplingFields,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
    /// Used with `include_usage`, as in SGLang and vLLM: every event also reports its choice's usage so far.
    continuous_usage_stats: Option<bool>,
}

/// `POST /v1/chat/completions`
pub(super) async fn chat(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Result<Response, ApiError> {
    serve(&app, headers, body, |app, headers, body| prepare(app, headers, body, &CHAT)).await
}

/// `POST /v1/completions`
pub(super) async fn completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Result<Response, ApiError> {
    serve(&app, headers, body, |app, headers, body| prepare(app, headers, body, &COMPLETION)).await
}

fn prepare(
    app: &App,
    headers: &HeaderMap,
    bytes: &[u8],
    route: &'static RouteTraits,
) -> Result<(ValidatedRequest, OpenAi), ApiError> {
    let ParsedRequest { body, rank, stream, routes_from, priority, fields } =
        ParsedRequest::<Fields>::read(app, route.engine_route, headers, bytes)?;
    fields::check(&body, route.place)?;
    fields::check(&body["stream_options"], fields::STREAM)?;
    let mut request = fields.sampling.check(app, app.served.defaults)?;
    (request.routes_from, request.priority) = (routes_from, priority);
    request.logprobs = logprobs::requested(route.is_chat, fields.logprobs.as_ref(), fields.top_logprobs)?;
    let prompts = validated::prompts(app, route.text_route, &body)?;
    let requested = fields.max_completion_tokens.or(fields.max_tokens);
    let sequences = validated::sequences(app, &request, prompts, requested, route.default_tokens)?;
    let extension = Extension {
        input_ids: fields.return_input_ids_in_sglext.unwrap_or(false),
        output_ids: fields.return_output_ids_in_sglext.unwrap_or(false),
        routes: routes_from.is_some(),
    };
    if extension != Extension::default() && sequences.len() > 1 {
        return Err(ApiError::bad(format!("sglext requires a single prompt, found {}", sequences.len())));
    }
    let options = fields.stream_options.unwrap_or_default();
    let usage = options.include_usage.unwrap_or(false);
    let dialect = OpenAi {
        route,
        id: format!("{}-{:032x}", route.id_prefix, fastrand::u128(..)),
        created: unix_time().as_secs(),
        model: fields.model.unwrap_or_else(|| app.served.name.clone()),
        usage,
        running_usage: usage && options.continuous_usage_stats.unwrap_or(false),
        extension,
        tokenizer: Arc::clone(&app.served.tokenizer),
    };
    Ok((ValidatedRequest { rank, sequences, stream }, dialect))
}

/// How a route parses requests and formats responses.
struct RouteTraits {
    is_chat: bool,
    engine_route: EngineRoute,
    text_route: Route,
    place: u8,
    default_tokens: Option<u32>,
    id_prefix: &'static str,
    object: &'static str,
    chunk: &'static str,
    /// Formats the logprobs of the answer's tokens from an index on.
    logprobs: fn(&Tokenizer, &Answer, usize) -> Value,
}

static CHAT: RouteTraits = RouteTraits {
    is_chat: true,
    engine_route: EngineRoute::Chat,
    text_route: Route::Chat,
    place: fields::CHAT,
    default_tokens: None,
    id_prefix: "chatcmpl",
    object: "chat.completion",
    chunk: "chat.completion.chunk",
    logprobs: logprobs::chat,
};

static COMPLETION: RouteTraits = RouteTraits {
    is_chat: false,
    engine_route: EngineRoute::Completions,
    text_route: Route::Completions,
    place: fields::COMPLETIONS,
    default_tokens: Some(DEFAULT_COMPLETION_TOKENS),
    id_prefix: "cmpl",
    object: "text_completion",
    chunk: "text_completion",
    logprobs: logprobs::completion,
};

/// The fields of `sglext` that the client requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Extension {
    input_ids: bool,
    output_ids: bool,
    routes: bool,
}

struct OpenAi {
    route: &'static RouteTraits,
    id: String,
    created: u64,
    model: String,
    /// Whether a stream ends with a usage event.
    usage: bool,
    /// Whether all other events of a stream also carry usage.
    running_usage: bool,
    extension: Extension,
    tokenizer: Arc<Tokenizer>,
}

impl OpenAi {
    fn envelope(&self, stream: bool, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": if stream { self.route.chunk } else { self.route.object },
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    /// Builds an event for one choice.
    fn chunk(&self, choice: Value, answer: &Answer) -> Value {
        let mut event = self.envelope(true, Value::Array(vec![choice]));
        if self.running_usage {
            event["usage"] = usage(std::slice::from_ref(answer));
        }
        event
    }

    fn sglext(&self, answer: &Answer) -> Value {
        let mut extension = Map::new();
        if self.extension.routes {
            extension.insert("routed_experts".into(), json!(answer.routes));
        }
        if self.extension.input_ids {
            extension.insert("input_ids".into(), json!(answer.prompt));
        }
        if self.extension.output_ids {
            extension.insert("output_ids".into(), json!(answer.output));
        }
        Value::Object(extension)
    }
}

fn usage(answers: &[Answer]) -> Value {
    let prompt: usize = answers.iter().map(|answer| answer.prompt.len()).sum();
    let completion: usize = answers.iter().map(|answer| answer.output.len()).sum();
    let cached: u64 = answers.iter().map(|answer| u64::from(answer.cached)).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

/// Returns OpenAI's finish reason and the matched stop (SGLang's `matched_stop`).
fn finish(finish: Option<&Finish>) -> (Value, Value) {
    match finish {
        None => (Value::Null, Value::Null),
        Some(Finish::Token(id)) => ("stop".into(), (*id).into()),
        Some(Finish::Text(text)) => ("stop".into(), text.clone().into()),
        Some(Finish::Length(_)) => ("length".into(), Value::Null),
        Some(Finish::Abort) => ("abort".into(), Value::Null),
    }
}

impl Dialect for OpenAi {
    fn whole(&self, answers: &[Answer]) -> Value {
        let choice = |(index, answer): (usize, &Answer)| {
            let (reason, matched) = finish(answer.finish.as_ref());
            let mut choice = json!({
                "index": index,
                "logprobs": (self.route.logprobs)(&self.tokenizer, answer, 0),
                "finish_reason": reason,
                "matched_stop": matched,
            });
            match self.route.is_chat {
                true => choice["message"] = json!({"role": "assistant", "content": answer.text}),
                false => choice["text"] = json!(answer.text),
            }
            choice
        };
        let mut whole = self.envelope(false, answers.iter().enumerate().map(choice).collect());
        whole["usage"] = usage(answers);
        if let [answer] = answers
            && self.extension != Extension::default()
        {
            whole["sglext"] = self.sglext(answer);
        }
        whole
    }

    fn opening(&self, answers: &[Answer]) -> Vec<Value> {
        let chunk = |(index, answer)| {
            let delta = json!({"role": "assistant", "content": ""});
            self.chunk(json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}), answer)
        };
        if self.route.is_chat { answers.iter().enumerate().map(chunk).collect() } else { Vec::new() }
    }

    fn news(&self, answer: &Answer, delta: &Delta) -> Vec<Value> {
        let (reason, matched) = finish(answer.finish.as_ref());
        // Logprobs are sent even for tokens whose text is still held back.
        let logprobs = match delta.tokens {
            0 => Value::Null,
            tokens => (self.route.logprobs)(&self.tokenizer, answer, answer.output.len() - tokens),
        };
        if delta.text.is_empty() && reason.is_null() && logprobs.is_null() {
            return Vec::new();
        }
        let mut choice = json!({
            "index": delta.index, "logprobs": logprobs, "finish_reason": reason, "matched_stop": matched,
        });
        match self.route.is_chat {
            true => choice["delta"] = json!({"content": delta.text}),
            false => choice["text"] = json!(delta.text),
        }
        vec![self.chunk(choice, answer)]
    }

    fn closing(&self, answers: &[Answer]) -> Vec<Value> {
        let event = |key: &str, value: Value| {
            let mut event = self.envelope(true, json!([]));
            event[key] = value;
            event
        };
        let extension = match answers {
            [answer] if self.extension != Extension::default() => Some(event("sglext", self.sglext(answer))),
            _ => None,
        };
        let usage = self.usage.then(|| event("usage", usage(answers)));
        extension.into_iter().chain(usage).collect()
    }
}
