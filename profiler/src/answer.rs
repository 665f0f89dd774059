//! One answer of an engine, accepted only where it agrees with the request and the model.

use semmoe_engines::recording::{ReportedAnswer, decode};
use semmoe_tables::{ModelInfo, Provenance, TraceBuilder};
use semmoe_text::LinePrompt;

use crate::ProfilerError;

/// This many different tokens cannot all have the same experts in every layer.
const DIFFERENT_TOKENS: usize = 8;

const NO_PROMPT_IDS: &str = "the prompt's token ids are missing from the answer: send ids, with --tokenizer";
const NO_OUTPUT_IDS: &str = "the ids of the generated tokens are missing from the answer: record with --max-tokens 1, or \
                             send ids to SGLang's /generate, with --tokenizer and without --openai-routes";

/// A checked request for the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Routed {
    /// The prompt, then what was generated but for the last token, which no layer has seen.
    pub(crate) token_ids: Vec<u32>,
    pub(crate) prompt_len: u32,
    /// [n, L, k] of the MoE layers.
    pub(crate) experts: Vec<u16>,
}

/// A trace of the model that stays empty: it lends its checks. `model.num_hidden_layers` must be known, as answers have
/// a row for dense layers too.
pub(crate) fn rules(model: &ModelInfo) -> Result<TraceBuilder, ProfilerError> {
    let provenance = Provenance { source: String::new(), created: String::new() };
    Ok(TraceBuilder::new(model.clone(), provenance)?)
}

/// The routes of an answer, or in one sentence why it cannot be believed.
pub(crate) fn check(rules: &TraceBuilder, asked: &LinePrompt, reported: &ReportedAnswer) -> Result<Routed, String> {
    let (token_ids, prompt_len) = tokens(asked, reported)?;
    let text = reported.routed_experts.as_deref().ok_or("routed_experts is missing from the answer")?;
    let routes = decode(text, token_ids.len(), rules.model()).map_err(|error| error.to_string())?;
    let experts = routes.experts(rules.model()).map_err(|error| error.to_string())?;
    rules.check(&token_ids, prompt_len, &experts).map_err(|error| error.to_string())?;
    if routes.all_tokens_alike() && differ(&token_ids) {
        return Err("every token has the same experts in every layer, as no router gives them".into());
    }
    Ok(Routed { token_ids, prompt_len, experts })
}

fn differ(token_ids: &[u32]) -> bool {
    let mut sorted = token_ids.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    sorted.len() >= DIFFERENT_TOKENS
}

/// The tokens that routes are expected of, and how many of them are the prompt.
pub(crate) fn tokens(asked: &LinePrompt, reported: &ReportedAnswer) -> Result<(Vec<u32>, u32), String> {
    if let Some(reason) = &reported.aborted {
        return Err(format!("the engine aborted it: {reason}"));
    }
    let prompt = prompt(asked, reported)?;
    let prompt_len = u32::try_from(prompt.len()).map_err(|_| "the prompt is too long".to_owned())?;
    if let Some(counted) = reported.prompt_tokens.filter(|&counted| counted != u64::from(prompt_len)) {
        return Err(format!("prompt_tokens is {counted}, but the prompt has {prompt_len} tokens"));
    }
    let seen: &[u32] = match (&reported.output_ids, reported.output_tokens) {
        (Some(output), _) => match output.split_last() {
            Some((_, seen)) => seen,
            None => return Err("no token was generated, so the route of the prompt's last token is missing".into()),
        },
        // Of one generated token the id is not needed.
        (None, Some(1)) => &[],
        (None, _) => return Err(NO_OUTPUT_IDS.into()),
    };
    Ok(([prompt, seen].concat(), prompt_len))
}

/// The prompt's ids: those the engine says it saw, which must be those sent.
fn prompt<'a>(asked: &'a LinePrompt, reported: &'a ReportedAnswer) -> Result<&'a [u32], String> {
    match (asked, &reported.prompt_ids) {
        (LinePrompt::Ids(sent), None) => Ok(sent),
        (LinePrompt::Ids(sent), Some(seen)) if sent == seen => Ok(sent),
        (LinePrompt::Ids(sent), Some(seen)) => {
            let at = sent.iter().zip(seen).position(|(a, b)| a != b).unwrap_or(sent.len().min(seen.len()));
            Err(format!(
                "the engine saw another prompt: {} tokens instead of {}, the first difference at {at}",
                seen.len(),
                sent.len()
            ))
        }
        (_, Some(seen)) => Ok(seen),
        (_, None) => Err(NO_PROMPT_IDS.into()),
    }
}
