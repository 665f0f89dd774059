//! Token log-probabilities in each dialect's format.

use semmoe_text::Tokenizer;
use serde_json::{Map, Value, json};

use super::answer::Answer;
use super::error::ApiError;

/// Maximum number of alternatives, as in the OpenAI API.
const MAX_TOP: u64 = 20;

/// Returns the requested number of alternatives, or `None` without logprobs. Chat requests use two fields, completions
/// a single number.
pub(super) fn requested(chat: bool, logprobs: Option<&Value>, top: Option<u64>) -> Result<Option<u8>, ApiError> {
    let wrong = |expected: &str| Err(ApiError::param("logprobs", format!("logprobs must be {expected}")));
    match (logprobs, chat) {
        (None | Some(Value::Null | Value::Bool(false)), _) => match top {
            None | Some(0) => Ok(None),
            Some(_) => Err(ApiError::param("top_logprobs", "top_logprobs requires logprobs to be true")),
        },
        (Some(Value::Bool(true)), true) => bounded("top_logprobs", top.unwrap_or(0)),
        (Some(_), true) => wrong("true or false"),
        (Some(value), false) => match value.as_u64() {
            Some(top) => bounded("logprobs", top),
            None => wrong("a number of alternatives"),
        },
    }
}

/// SGLang's two fields.
pub(super) fn requested_by_generate(wanted: bool, top: Option<u64>) -> Result<Option<u8>, ApiError> {
    if wanted { bounded("top_logprobs_num", top.unwrap_or(0)) } else { Ok(None) }
}

fn bounded(name: &str, top: u64) -> Result<Option<u8>, ApiError> {
    match u8::try_from(top) {
        Ok(count) if top <= MAX_TOP => Ok(Some(count)),
        _ => Err(ApiError::param(name, format!("{name} must be from 0 to {MAX_TOP}, found {top}"))),
    }
}

/// The answer's tokens from index `first` on with their logprobs, if logprobs were requested.
fn pairs(answer: &Answer, first: usize) -> Option<impl Iterator<Item = (u32, &crate::engine::TokenLogprobs)>> {
    let reported = answer.logprobs.len() == answer.output.len() && !answer.logprobs.is_empty();
    reported.then(|| answer.output.iter().copied().zip(&answer.logprobs).skip(first))
}

/// Formats a chat's `logprobs`; null if they were not requested.
pub(super) fn chat(tokenizer: &Tokenizer, answer: &Answer, first: usize) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id);
        json!({"token": String::from_utf8_lossy(&bytes), "logprob": logprob, "bytes": bytes})
    };
    let Some(pairs) = pairs(answer, first) else { return Value::Null };
    let content = pairs.map(|(id, logprobs)| {
        let mut choice = entry(id, logprobs.logprob);
        choice["top_logprobs"] = logprobs.top.iter().map(|(id, logprob)| entry(*id, *logprob)).collect();
        choice
    });
    let content: Vec<Value> = content.collect();
    json!({"content": content, "refusal": null})
}

/// Formats a completion's `logprobs`; null if they were not requested.
pub(super) fn completion(tokenizer: &Tokenizer, answer: &Answer, first: usize) -> Value {
    let text = |id: u32| String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned();
    let Some(pairs) = pairs(answer, first) else { return Value::Null };
    let mut offset: usize = answer.output[..first].iter().map(|id| text(*id).chars().count()).sum();
    let (mut tokens, mut logprobs, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (id, of) in pairs {
        let token = text(id);
        offsets.push(offset);
        offset += token.chars().count();
        tokens.push(token);
        logprobs.push(of.logprob);
        tops.push(of.top.iter().map(|(id, logprob)| (text(*id), json!(logprob))).collect::<Map<_, _>>());
    }
    json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
}

/// Adds SGLang's logprob fields to `meta_info`. The prompt's fields are empty, as with SGLang's default
/// `logprob_start_len`.
pub(super) fn generate(answer: &Answer, meta_info: &mut Value) {
    let Some(pairs) = pairs(answer, 0) else { return };
    let (tokens, tops): (Vec<Value>, Vec<Value>) = pairs
        .map(|(id, of)| {
            let top: Value = of.top.iter().map(|(id, logprob)| json!([logprob, id, null])).collect();
            (json!([of.logprob, id, null]), top)
        })
        .unzip();
    let length = tokens.len();
    meta_info["input_token_logprobs"] = json!([]);
    meta_info["output_token_logprobs"] = json!(tokens);
    meta_info["output_token_logprobs_length"] = json!(length);
    if answer.logprobs.iter().any(|of| !of.top.is_empty()) {
        meta_info["input_top_logprobs"] = json!([]);
        meta_info["output_top_logprobs"] = json!(tops);
    }
}
