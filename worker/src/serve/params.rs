//! Validation of the sampling fields of both dialects.

use semmoe_engines::sglang::StopStrings;
use serde::Deserialize;

use super::app::{App, Defaults};
use super::error::ApiError;
use crate::engine::{Sampling, SequenceRequest, StopRules};

/// Limits on a request's stop texts and stop tokens, because every generated token is checked against them.
const MAX_STOP_TEXTS: usize = 32;
const MAX_STOP_TEXT_BYTES: usize = 1024;
const MAX_STOP_TOKENS: usize = 1024;
/// Temperatures below this select greedy sampling, as in SGLang.
const MIN_TEMPERATURE: f64 = 1e-6;

/// The fields shared by both dialects, under each dialect's names.
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
    /// `seed` is OpenAI's name, `sampling_seed` SGLang's.
    #[serde(alias = "sampling_seed")]
    seed: Option<i64>,
}

impl SamplingFields {
    /// Validates the fields and returns a request without a prompt and token limit, which are set per prompt.
    pub(super) fn check(&self, app: &App, defaults: Defaults) -> Result<SequenceRequest, ApiError> {
        let temperature = self.temperature.unwrap_or(defaults.temperature);
        if !(0.0..=100.0).contains(&temperature) {
            let message = format!("temperature must be from 0 to 100, found {temperature}");
            return Err(ApiError::param("temperature", message));
        }
        let top_p = self.top_p.unwrap_or(defaults.top_p);
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(ApiError::param("top_p", format!("top_p must be above 0 and at most 1, found {top_p}")));
        }
        let top_k = match self.top_k {
            None => defaults.top_k,
            Some(-1) => 0,
            Some(k) => u32::try_from(k).map_err(|_| {
                ApiError::param("top_k", format!("top_k must be -1 (all) or a positive number, found {k}"))
            })?,
        };
        let greedy = temperature < MIN_TEMPERATURE;
        Ok(SequenceRequest {
            min_new_tokens: self.min_new_tokens.unwrap_or(0),
            sampling: Sampling {
                temperature: if greedy { 0.0 } else { temperature as f32 },
                // The cast loses only precision; a tiny value must not become 0.
                top_p: (top_p as f32).max(f32::MIN_POSITIVE),
                top_k,
                seed: self.seed.map_or_else(|| fastrand::u64(..), i64::cast_unsigned),
            },
            stop: self.stop_rules(app)?,
            ..SequenceRequest::default()
        })
    }

    fn stop_rules(&self, app: &App) -> Result<StopRules, ApiError> {
        let texts = self.stop.as_ref().map_or(&[][..], StopStrings::as_slice);
        let longest = texts.iter().map(String::len).max().unwrap_or(0);
        let mut token_ids = self.stop_token_ids.clone().unwrap_or_default();
        for (param, holds, found, limit, of) in [
            ("stop", "stop contains", texts.len(), MAX_STOP_TEXTS, "texts"),
            ("stop", "a stop text has", longest, MAX_STOP_TEXT_BYTES, "bytes"),
            ("stop_token_ids", "stop_token_ids contains", token_ids.len(), MAX_STOP_TOKENS, "ids"),
        ] {
            if found > limit {
                return Err(ApiError::param(param, format!("{holds} {found} {of}, at most {limit} are allowed")));
            }
        }
        if !self.ignore_eos.unwrap_or(false) {
            token_ids.extend(&app.served.eos);
        }
        Ok(StopRules { token_ids, texts: texts.to_vec(), skip_special: self.skip_special_tokens.unwrap_or(true) })
    }
}
