//! Sampling fields of both dialects, checked.

use semmoe_engines::sglang::StopStrings;
use serde::Deserialize;
use serde_json::Value;

use super::app::{App, Defaults};
use super::error::ApiError;
use crate::engine::{Sampling, SequenceRequest, StopRules};

/// Bounds on what a request may ask to be looked for in every token.
const MAX_STOP_TEXTS: usize = 32;
const MAX_STOP_TEXT_BYTES: usize = 1024;
const MAX_STOP_TOKENS: usize = 1024;
/// Below this a temperature is greedy, as in SGLang.
const MIN_TEMPERATURE: f64 = 1e-6;

/// Fields that this worker does not have, with the value that asks for nothing; any other is refused rather than ignored.
const UNSUPPORTED: [(&str, Neutral); 14] = [
    ("n", Neutral::Number(1.0)),
    ("best_of", Neutral::Number(1.0)),
    ("frequency_penalty", Neutral::Number(0.0)),
    ("presence_penalty", Neutral::Number(0.0)),
    ("repetition_penalty", Neutral::Number(1.0)),
    ("min_p", Neutral::Number(0.0)),
    ("logprobs", Neutral::False),
    ("return_logprob", Neutral::False),
    ("echo", Neutral::False),
    ("logit_bias", Neutral::Empty),
    ("suffix", Neutral::Empty),
    ("json_schema", Neutral::Empty),
    ("regex", Neutral::Empty),
    ("ebnf", Neutral::Empty),
];

#[derive(Clone, Copy)]
enum Neutral {
    Number(f64),
    False,
    /// An empty string or object.
    Empty,
}

impl Neutral {
    fn holds(self, value: &Value) -> bool {
        match (self, value) {
            (_, Value::Null) => true,
            (Self::Number(neutral), value) => value.as_f64() == Some(neutral),
            (Self::False, value) => value == &Value::Bool(false),
            (Self::Empty, Value::String(text)) => text.is_empty(),
            (Self::Empty, Value::Object(map)) => map.is_empty(),
            (Self::Empty, _) => false,
        }
    }
}

/// Refuses fields of `body` that ask for what this worker does not do.
pub(super) fn refuse_unsupported(body: &Value) -> Result<(), ApiError> {
    for (name, neutral) in UNSUPPORTED {
        if let Some(value) = body.get(name).filter(|value| !neutral.holds(value)) {
            return Err(ApiError::bad(format!("{name} {} is not supported by this worker", shortened(value))));
        }
    }
    Ok(())
}

/// A value of a request, short enough for a message.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

/// The fields that both dialects have, under their various names.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SamplingFields {
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    stop: Option<StopStrings>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    skip_special_tokens: Option<bool>,
    #[serde(alias = "min_tokens")]
    min_new_tokens: Option<u32>,
    /// OpenAI's name first, SGLang's second.
    #[serde(alias = "sampling_seed")]
    seed: Option<i64>,
}

impl SamplingFields {
    /// A request without prompt; the limit on new tokens is set per prompt.
    pub(super) fn check(&self, app: &App, defaults: Defaults) -> Result<SequenceRequest, ApiError> {
        let temperature = self.temperature.unwrap_or(defaults.temperature);
        if !(0.0..=100.0).contains(&temperature) {
            return Err(ApiError::bad(format!("temperature must be from 0 to 100, found {temperature}")));
        }
        let top_p = self.top_p.unwrap_or(defaults.top_p);
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(ApiError::bad(format!("top_p must be above 0 and at most 1, found {top_p}")));
        }
        let top_k = match self.top_k {
            None => defaults.top_k,
            Some(-1) => 0,
            Some(k) => u32::try_from(k)
                .map_err(|_| ApiError::bad(format!("top_k must be -1 (all) or a positive number, found {k}")))?,
        };
        let greedy = temperature < MIN_TEMPERATURE;
        Ok(SequenceRequest {
            id: 0,
            tokens: Vec::new(),
            max_new_tokens: 0,
            min_new_tokens: self.min_new_tokens.unwrap_or(0),
            sampling: Sampling {
                temperature: if greedy { 0.0 } else { temperature as f32 },
                // Lossy only in digits that f32 does not have; never 0.
                top_p: (top_p as f32).max(f32::MIN_POSITIVE),
                top_k,
                seed: self.seed.map_or_else(|| fastrand::u64(..), i64::cast_unsigned),
            },
            stop: self.stop_rules(app)?,
            routes_from: None,
        })
    }

    fn stop_rules(&self, app: &App) -> Result<StopRules, ApiError> {
        let texts = self.stop.as_ref().map_or(&[][..], StopStrings::as_slice);
        if texts.len() > MAX_STOP_TEXTS {
            return Err(ApiError::bad(format!("stop holds {} texts, at most {MAX_STOP_TEXTS} are taken", texts.len())));
        }
        if let Some(long) = texts.iter().find(|text| text.len() > MAX_STOP_TEXT_BYTES) {
            let found = long.len();
            return Err(ApiError::bad(format!(
                "a stop text has {found} bytes, at most {MAX_STOP_TEXT_BYTES} are taken"
            )));
        }
        let mut token_ids = self.stop_token_ids.clone().unwrap_or_default();
        if token_ids.len() > MAX_STOP_TOKENS {
            let found = token_ids.len();
            return Err(ApiError::bad(format!(
                "stop_token_ids holds {found} ids, at most {MAX_STOP_TOKENS} are taken"
            )));
        }
        if !self.ignore_eos.unwrap_or(false) {
            token_ids.extend(&app.eos);
        }
        Ok(StopRules { token_ids, texts: texts.to_vec(), skip_special: self.skip_special_tokens.unwrap_or(true) })
    }
}
