//! One answer of `/generate`, believed only as far as it agrees with what was asked and with the model.

use semmoe_engines::sglang::{FinishReason, GenerateResponse, decode_routes};
use semmoe_tables::{ModelInfo, Provenance, TraceBuilder};

use crate::ProfilerError;
use crate::prompts::Input;

/// A checked request for the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Routed {
    /// The prompt, then what was generated but for the last token, which no layer has seen.
    pub(crate) token_ids: Vec<u32>,
    pub(crate) prompt_len: u32,
    /// [n, L, k] of the MoE layers.
    pub(crate) experts: Vec<u16>,
}

/// Checks answers of one model.
#[derive(Debug)]
pub(crate) struct Checker {
    /// Stays empty: it lends its checks.
    rules: TraceBuilder,
}

impl Checker {
    /// `model.num_hidden_layers` must be known, as answers have a row for dense layers too.
    pub(crate) fn new(model: &ModelInfo) -> Result<Self, ProfilerError> {
        let provenance = Provenance { source: String::new(), created: String::new() };
        Ok(Checker { rules: TraceBuilder::new(model.clone(), provenance)? })
    }

    /// The routes of an answer, or in one sentence why it cannot be believed.
    pub(crate) fn check(&self, asked: &Input, answer: GenerateResponse) -> Result<Routed, String> {
        if let Some(FinishReason::Abort { message }) = &answer.meta_info.finish_reason {
            return Err(format!("the engine aborted it: {}", message.as_deref().unwrap_or("no reason given")));
        }
        let prompt = prompt(asked, &answer)?;
        let prompt_len = u32::try_from(prompt.len()).map_err(|_| "the prompt is too long".to_owned())?;
        let counted = answer.meta_info.prompt_tokens;
        if counted != 0 && counted != u64::from(prompt_len) {
            return Err(format!("meta_info.prompt_tokens is {counted}, but the prompt has {prompt_len} tokens"));
        }
        let Some((_, seen)) = answer.output_ids.split_last() else {
            return Err("no token was generated, so the route of the prompt's last token is missing".into());
        };
        let token_ids = [prompt, seen].concat();
        let Some(data) = answer.meta_info.routed_experts.as_deref() else {
            return Err("meta_info.routed_experts is missing".into());
        };
        let experts = decode_routes(data, token_ids.len(), self.rules.model()).map_err(|error| error.to_string())?;
        self.rules.check(&token_ids, prompt_len, &experts).map_err(|error| error.to_string())?;
        Ok(Routed { token_ids, prompt_len, experts })
    }
}

/// The prompt's ids: those the engine says it saw, which must be those sent.
fn prompt<'a>(asked: &'a Input, answer: &'a GenerateResponse) -> Result<&'a [u32], String> {
    match (asked, answer.prompt_ids()) {
        (Input::Ids(sent), None) => Ok(sent),
        (Input::Ids(sent), Some(seen)) if sent == seen => Ok(sent),
        (Input::Ids(sent), Some(seen)) => {
            let at = sent.iter().zip(seen).position(|(a, b)| a != b).unwrap_or(sent.len().min(seen.len()));
            Err(format!(
                "the engine saw another prompt: {} tokens instead of {}, the first difference at {at}",
                seen.len(),
                sent.len()
            ))
        }
        (Input::Text(_), Some(seen)) => Ok(seen),
        (Input::Text(_), None) => Err("the prompt's token ids are missing".into()),
    }
}
