//! Requests that engines refuse, and the shapes of their errors.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use crate::answer::{events, is_set};
use crate::dialect::{CHAT, COMPLETIONS, GENERATE, RESPONSES};
use crate::engine::Engine;

/// The kind of rejection; engines name them differently.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The body or a header is malformed for the route.
    Form,
    /// Well-formed, but impossible.
    Request,
    UnknownModel,
    /// SGLang: a pin header that is not a number.
    Header,
    /// SGLang: token ids requested of a streamed chat.
    Streamed,
}

/// A received request: its path, and the route whose formats apply.
pub(crate) struct Asked<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) path: &'a str,
}

impl Asked<'_> {
    fn vllm(&self) -> bool {
        self.engine.dialect.is_vllm()
    }

    pub(crate) fn refuse(&self, kind: Kind, message: &str) -> Box<Response> {
        let status = if kind == Kind::UnknownModel { StatusCode::NOT_FOUND } else { StatusCode::BAD_REQUEST };
        let name = match kind {
            Kind::Form => "Bad Request",
            Kind::Request => "BadRequestError",
            Kind::UnknownModel => "NotFoundError",
            Kind::Header => "400",
            Kind::Streamed => "BadRequest",
        };
        let error = json!({ "message": message, "type": name, "param": null, "code": status.as_u16() });
        let body = match (self.vllm(), self.path == GENERATE && kind != Kind::Form) {
            (true, _) => json!({ "error": error }),
            (false, true) => json!({ "error": { "message": message } }),
            (false, false) => {
                json!({ "object": "error", "message": message, "type": name, "param": null, "code": status.as_u16() })
            }
        };
        Box::new((status, Json(body)).into_response())
    }

    /// Parses the body as JSON.
    pub(crate) fn read(&self, headers: &HeaderMap, body: &[u8]) -> Result<Value, Box<Response>> {
        let json = headers.get("content-type").is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
        if !json {
            return Err(self.refuse(Kind::Form, "Unsupported Media Type: Only 'application/json' is allowed"));
        }
        let body = serde_json::from_slice(body).map_err(|error| self.refuse(Kind::Form, &error.to_string()))?;
        self.check(&body)?;
        Ok(body)
    }

    /// Checks required members and their types.
    fn check(&self, body: &Value) -> Result<(), Box<Response>> {
        let is_absent = |names: &[&str]| names.iter().all(|name| body[*name].is_null());
        let not_a_number = |name: &str| !(body[name].is_null() || body[name].is_i64());
        if let Some(name) =
            ["max_tokens", "routed_dp_rank", "data_parallel_rank"].into_iter().find(|name| not_a_number(name))
        {
            return Err(self.refuse(Kind::Form, &format!("{name}: Input should be a valid integer")));
        }
        match self.path {
            CHAT if is_absent(&["messages"]) => {
                return Err(self.refuse(Kind::Form, "messages: Field required"));
            }
            COMPLETIONS if is_absent(&["prompt"]) => {
                let kind = if self.vllm() { Kind::Request } else { Kind::Form };
                return Err(self.refuse(kind, "prompt: Field required"));
            }
            GENERATE if is_absent(&["text", "input_ids"]) => {
                return Err(self.refuse(Kind::Request, "Either text, input_ids or input_embeds should be provided."));
            }
            _ => {}
        }
        let unknown = |id: &Value| id.as_u64().is_some_and(|id| id >= u64::from(self.engine.model.vocab_size));
        if let Some(id) =
            body["prompt"].as_array().and_then(|ids| ids.iter().find(|id| unknown(id))).filter(|_| self.vllm())
        {
            return Err(self.refuse(Kind::Request, &format!("Token id {id} is out of vocabulary")));
        }
        // SGLang accepts any name.
        let named = body["model"].as_str().is_none_or(|name| name == self.engine.model.model);
        if self.vllm() && !named {
            return Err(self.refuse(Kind::UnknownModel, &format!("The model {} does not exist.", body["model"])));
        }
        if self.path == CHAT && body["stream"] == true && body["return_prompt_token_ids"] == true && !self.vllm() {
            return Err(self.refuse(Kind::Streamed, "return_prompt_token_ids is not supported with streaming."));
        }
        Ok(())
    }

    /// The pin, whose rank must exist.
    pub(crate) fn pin(&self, headers: &HeaderMap, body: &Value) -> Result<Option<u16>, Box<Response>> {
        let (settings, dialect) = (self.engine.settings().clone(), &self.engine.dialect);
        let is_read = settings.pinned_routes.as_ref().is_none_or(|routes| routes.contains(&self.path));
        if !is_read || settings.ignores_pins || settings.real_ranks == Some(0) {
            return Ok(None);
        }
        let reads_header = settings.pinned_routes.is_some() || dialect.header_on.contains(&self.path);
        let header = headers.get("x-data-parallel-rank").filter(|_| reads_header);
        let header = header.map(|value| value.to_str().unwrap_or(""));
        let number = header.map(|value| value.parse::<i64>().map_err(|_| value));
        let pin = match number {
            // vLLM ignores it.
            Some(Err(_)) if self.vllm() => None,
            Some(Err(found)) => {
                let message = format!("Invalid X-Data-Parallel-Rank header: must be an integer, got '{found}'");
                return Err(self.refuse(Kind::Header, &message));
            }
            Some(Ok(rank)) => Some(rank),
            None => dialect.fields(self.path).iter().find_map(|field| body[*field].as_i64()),
        };
        let Some(rank) = pin else { return Ok(None) };
        let ranks = settings.real_ranks.unwrap_or(settings.ranks);
        let (first, end) = (settings.first_pin, settings.first_pin + ranks);
        if let Ok(found) = u16::try_from(rank)
            && (first..end).contains(&found)
        {
            return Ok(Some(found));
        }
        let message = if self.vllm() {
            format!("data_parallel_rank {rank} is out of range [0, {end}).")
        } else {
            format!("routed_dp_rank={rank} out of range [0, {ranks})")
        };
        // These streams begin before their pins are checked.
        if is_set(body, "stream") && (self.vllm() || self.path == GENERATE) {
            return Err(Box::new(events(&[json!({ "error": { "message": message } })])));
        }
        Err(self.refuse(Kind::Request, &message))
    }

    /// Whether the prompt and the requested tokens fit.
    pub(crate) fn fits(&self, prompt: &[u32], max_tokens: u64, stream: bool) -> Result<(), Box<Response>> {
        let (context, length) = (self.engine.settings().context, prompt.len());
        // SGLang 0.5.23 treats a lone 0 as an empty prompt.
        if prompt.is_empty() || (!self.vllm() && self.path == COMPLETIONS && prompt == [0]) {
            return Err(self.refuse(Kind::Request, "Prompt cannot be empty"));
        }
        if !self.vllm() && self.path == RESPONSES && max_tokens < 2 {
            return Err(self.refuse(Kind::Request, "max_tokens must be at least 1, got 0"));
        }
        if length as u64 + max_tokens <= context {
            return Ok(());
        }
        let message =
            format!("The input ({length} tokens) is longer than the model's context length ({context} tokens).");
        // Detected too late for a status.
        if self.path == GENERATE && stream && length as u64 >= context {
            let error = json!({ "error": { "message": message, "type": "invalid_request_error", "code": 400, "retryable": false } });
            return Err(Box::new(events(&[error])));
        }
        Err(self.refuse(Kind::Request, &message))
    }
}
