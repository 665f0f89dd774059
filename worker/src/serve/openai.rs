//! The OpenAI routes, with SGLang's extensions.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use semmoe_engines::Route as EngineRoute;
use semmoe_text::{Route, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::answer::{Answer, Delta};
use super::app::App;
use super::error::ApiError;
use super::fields;
use super::info::unix_time;
use super::logprobs;
use super::params::SamplingFields;
use super::reply::{Dialect, serve};
use super::wish::{self, Asked, Wish};
use crate::engine::Finish;

/// OpenAI's limit on the completions route where a request names none; chats have what the context leaves.
const DEFAULT_COMPLETION_TOKENS: u32 = 16;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    logprobs: Option<Value>,
    top_logprobs: Option<u64>,
    return_routed_experts: Option<bool>,
    routed_experts_start_len: Option<u32>,
    return_input_ids_in_sglext: Option<bool>,
    return_output_ids_in_sglext: Option<bool>,
    #[serde(flatten)]
    sampling: SamplingFields,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
    /// With `include_usage`: every event has the usage so far.
    continuous_usage_stats: Option<bool>,
}

/// Which events of a stream have the usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamUsage {
    None,
    /// One more at the end.
    Last,
    /// That one, and each one before it for its own choice so far.
    Every,
}

impl StreamOptions {
    /// As in SGLang and vLLM the running usage is part of `include_usage`.
    fn usage(self) -> StreamUsage {
        match (self.include_usage.unwrap_or(false), self.continuous_usage_stats.unwrap_or(false)) {
            (false, _) => StreamUsage::None,
            (true, false) => StreamUsage::Last,
            (true, true) => StreamUsage::Every,
        }
    }
}

/// `POST /v1/chat/completions`
pub(super) async fn chat(State(app): State<Arc<App>>, headers: HeaderMap, body: Bytes) -> Result<Response, ApiError> {
    serve(&app, headers, body, |app, headers, body| prepare(app, headers, body, Kind::Chat)).await
}

/// `POST /v1/completions`
pub(super) async fn completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    serve(&app, headers, body, |app, headers, body| prepare(app, headers, body, Kind::Completion)).await
}

fn prepare(app: &App, headers: &HeaderMap, bytes: &[u8], kind: Kind) -> Result<(Wish, OpenAi), ApiError> {
    let traits = kind.traits();
    let Asked { body, rank, fields } = Asked::<Fields>::read(app, traits.engine_route, headers, bytes)?;
    fields::check(&body, traits.place)?;
    fields::check(&body["stream_options"], fields::STREAM)?;
    let mut request = fields.sampling.check(app, app.defaults)?;
    request.routes_from = wish::routes_from(fields.return_routed_experts, fields.routed_experts_start_len);
    request.logprobs = logprobs::asked(kind == Kind::Chat, fields.logprobs.as_ref(), fields.top_logprobs)?;
    let prompts = wish::prompts(app, traits.text_route, &body)?;
    let asked = fields.max_completion_tokens.or(fields.max_tokens);
    let sequences = wish::sequences(app, &request, prompts, asked, traits.default_tokens)?;
    let extension = Extension {
        input_ids: fields.return_input_ids_in_sglext.unwrap_or(false),
        output_ids: fields.return_output_ids_in_sglext.unwrap_or(false),
        routes: request.routes_from.is_some(),
    };
    if extension != Extension::default() && sequences.len() > 1 {
        return Err(ApiError::bad(format!("sglext is given for one prompt, found {}", sequences.len())));
    }
    let dialect = OpenAi {
        kind,
        id: format!("{}-{:032x}", traits.id_prefix, fastrand::u128(..)),
        created: unix_time().as_secs(),
        model: fields.model.unwrap_or_else(|| app.name.clone()),
        usage: fields.stream_options.map_or(StreamUsage::None, StreamOptions::usage),
        extension,
        tokenizer: Arc::clone(&app.tokenizer),
    };
    Ok((Wish { rank, sequences, stream: fields.stream.unwrap_or(false) }, dialect))
}

/// Which of the two routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Chat,
    Completion,
}

/// How a route is read and answered.
struct RouteTraits {
    engine_route: EngineRoute,
    text_route: Route,
    place: u8,
    default_tokens: Option<u32>,
    id_prefix: &'static str,
    object: &'static str,
    chunk: &'static str,
}

impl Kind {
    const fn traits(self) -> RouteTraits {
        match self {
            Self::Chat => RouteTraits {
                engine_route: EngineRoute::Chat,
                text_route: Route::Chat,
                place: fields::CHAT,
                default_tokens: None,
                id_prefix: "chatcmpl",
                object: "chat.completion",
                chunk: "chat.completion.chunk",
            },
            Self::Completion => RouteTraits {
                engine_route: EngineRoute::Completions,
                text_route: Route::Completions,
                place: fields::COMPLETIONS,
                default_tokens: Some(DEFAULT_COMPLETION_TOKENS),
                id_prefix: "cmpl",
                object: "text_completion",
                chunk: "text_completion",
            },
        }
    }
}

/// The parts requested in `sglext`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Extension {
    input_ids: bool,
    output_ids: bool,
    routes: bool,
}

struct OpenAi {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
    usage: StreamUsage,
    extension: Extension,
    tokenizer: Arc<Tokenizer>,
}

impl OpenAi {
    /// Of the answer's tokens from the `first` on.
    fn logprobs(&self, answer: &Answer, first: usize) -> Value {
        match self.kind {
            Kind::Chat => logprobs::chat(&self.tokenizer, answer, first),
            Kind::Completion => logprobs::completion(&self.tokenizer, answer, first),
        }
    }

    fn envelope(&self, stream: bool, choices: Value) -> Value {
        let RouteTraits { object, chunk, .. } = self.kind.traits();
        json!({
            "id": self.id,
            "object": if stream { chunk } else { object },
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    /// An event about one choice.
    fn chunk(&self, choice: Value, answer: &Answer) -> Value {
        let mut event = self.envelope(true, Value::Array(vec![choice]));
        if self.usage == StreamUsage::Every {
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

    fn has_extension(&self) -> bool {
        self.extension != Extension::default()
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

/// OpenAI's finish reason, and the matched stop (SGLang's `matched_stop`).
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
                "logprobs": self.logprobs(answer, 0),
                "finish_reason": reason,
                "matched_stop": matched,
            });
            match self.kind {
                Kind::Chat => choice["message"] = json!({"role": "assistant", "content": answer.text}),
                Kind::Completion => choice["text"] = json!(answer.text),
            }
            choice
        };
        let mut whole = self.envelope(false, answers.iter().enumerate().map(choice).collect());
        whole["usage"] = usage(answers);
        if let [answer] = answers
            && self.has_extension()
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
        match self.kind {
            Kind::Chat => answers.iter().enumerate().map(chunk).collect(),
            Kind::Completion => Vec::new(),
        }
    }

    fn news(&self, index: usize, answer: &Answer, delta: &Delta) -> Vec<Value> {
        let (reason, matched) = finish(answer.finish.as_ref());
        // Tokens whose text is held back have their logprobs sent all the same.
        let logprobs = match delta.tokens {
            0 => Value::Null,
            tokens => self.logprobs(answer, answer.output.len() - tokens),
        };
        if delta.text.is_empty() && reason.is_null() && logprobs.is_null() {
            return Vec::new();
        }
        let mut choice = json!({
            "index": index, "logprobs": logprobs, "finish_reason": reason, "matched_stop": matched,
        });
        match self.kind {
            Kind::Chat => choice["delta"] = json!({"content": delta.text}),
            Kind::Completion => choice["text"] = json!(delta.text),
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
            [answer] if self.has_extension() => Some(event("sglext", self.sglext(answer))),
            _ => None,
        };
        let usage = (self.usage != StreamUsage::None).then(|| event("usage", usage(answers)));
        extension.into_iter().chain(usage).collect()
    }
}
