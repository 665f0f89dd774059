//! SGLang's `/generate`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use semmoe_engines::Route as EngineRoute;
use semmoe_engines::sglang::{FinishReason, GenerateResponse, MetaInfo};
use semmoe_text::Route;
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Answer, Answers, Delta};
use super::app::{App, Defaults};
use super::error::ApiError;
use super::fields;
use super::listen::WholeBody;
use super::logprobs;
use super::params::SamplingFields;
use super::reply::{Dialect, serve};
use super::validated::{self, ParsedRequest, ValidatedRequest};
use crate::engine::Finish;

/// SGLang's default limit on new tokens.
const DEFAULT_NEW_TOKENS: u32 = 128;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    sampling_params: Option<Params>,
    return_prompt_token_ids: Option<bool>,
    rid: Option<String>,
    return_logprob: Option<bool>,
    top_logprobs_num: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Params {
    max_new_tokens: Option<u32>,
    #[serde(flatten)]
    sampling: SamplingFields,
}

/// `POST /generate`
pub(super) async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Result<Response, ApiError> {
    serve(&app, headers, body, prepare).await
}

/// `GET /health_generate`: checks health by generating a token.
pub(super) async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let body = json!({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
    let (request, _) = prepare(&app, &HeaderMap::new(), body.to_string().as_bytes())?;
    Answers::begin(&app, request)?.complete().await?;
    Ok(Json(json!({"status": "ok"})))
}

fn prepare(app: &App, headers: &HeaderMap, bytes: &[u8]) -> Result<(ValidatedRequest, Generate), ApiError> {
    let ParsedRequest { body, rank, stream, routes_from, priority, fields } =
        ParsedRequest::<Fields>::read(app, EngineRoute::Generate, headers, bytes)?;
    fields::check(&body, fields::GENERATE)?;
    if let Some(params) = body.get("sampling_params") {
        fields::check(params, fields::PARAMS)?;
    }
    let params = fields.sampling_params.unwrap_or_default();
    let mut request = params.sampling.check(app, Defaults::NEUTRAL)?;
    (request.routes_from, request.priority) = (routes_from, priority);
    request.logprobs =
        logprobs::requested_by_generate(fields.return_logprob.unwrap_or(false), fields.top_logprobs_num)?;
    let prompts = validated::prompts(app, Route::Generate, &body)?;
    let batch = body.get("text").is_some_and(Value::is_array)
        || body.get("input_ids").and_then(|ids| ids.get(0)).is_some_and(Value::is_array);
    let sequences = validated::sequences(app, &request, prompts, params.max_new_tokens, Some(DEFAULT_NEW_TOKENS))?;
    let dialect = Generate {
        id: fields.rid.unwrap_or_else(|| format!("{:032x}", fastrand::u128(..))),
        batch,
        prompt_ids: fields.return_prompt_token_ids.unwrap_or(false),
    };
    Ok((ValidatedRequest { rank, sequences, stream }, dialect))
}

struct Generate {
    id: String,
    /// Whether the client sent a list of prompts and therefore expects a list of answers.
    batch: bool,
    prompt_ids: bool,
}

impl Generate {
    /// Formats the answer so far; as in SGLang, every event repeats all of it.
    fn so_far(&self, index: usize, answer: &Answer) -> Value {
        let response = GenerateResponse {
            text: answer.text.clone(),
            output_ids: answer.output.clone(),
            prompt_token_ids: self.prompt_ids.then(|| answer.prompt.clone()),
            meta_info: MetaInfo {
                id: if self.batch { format!("{}_{index}", self.id) } else { self.id.clone() },
                finish_reason: answer.finish.as_ref().map(finish_reason),
                prompt_tokens: answer.prompt.len() as u64,
                completion_tokens: answer.output.len() as u64,
                cached_tokens: answer.cached.into(),
                e2e_latency: Some(answer.begun.elapsed().as_secs_f64()),
                dp_rank: Some(answer.running.rank.get().into()),
                routed_experts: answer.routes.clone(),
                prompt_token_ids: None,
            },
        };
        let mut value = json!(response);
        logprobs::generate(answer, &mut value["meta_info"]);
        if self.batch {
            value["index"] = index.into();
        }
        value
    }
}

fn finish_reason(finish: &Finish) -> FinishReason {
    match finish {
        Finish::Token(id) => FinishReason::Stop { matched: (*id).into() },
        Finish::Text(text) => FinishReason::Stop { matched: text.clone().into() },
        Finish::Length(length) => FinishReason::Length { length: *length },
        Finish::Abort => FinishReason::Abort { message: Some("the request was cancelled".into()) },
    }
}

impl Dialect for Generate {
    fn whole(&self, answers: &[Answer]) -> Value {
        match answers {
            [answer] if !self.batch => self.so_far(0, answer),
            answers => answers.iter().enumerate().map(|(index, answer)| self.so_far(index, answer)).collect(),
        }
    }

    fn news(&self, answer: &Answer, delta: &Delta) -> Vec<Value> {
        vec![self.so_far(delta.index, answer)]
    }
}
