//! Validates an engine's response against the request and the model.

use std::collections::BTreeSet;

use semmoe_engines::http::HttpError;
use semmoe_engines::recording::{RecordingError, ReportedAnswer, decode};
use semmoe_tables::{FormatError, ModelInfo, Provenance, TraceBuilder};
use semmoe_text::LinePrompt;

/// It is implausible that this many distinct tokens all have the same experts in every layer.
const DIFFERENT_TOKENS: usize = 8;

const NO_PROMPT_IDS: &str = "the response lacks the prompt's token ids: send ids, with --tokenizer";
const NO_OUTPUT_IDS: &str = "the response lacks the ids of the generated tokens: record with --max-tokens 1, or \
                             send ids to SGLang's /generate, with --tokenizer and without --openai-routes";

/// Reasons to reject the response to a prompt.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AnswerError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error(transparent)]
    Recording(#[from] RecordingError),
    /// The trace format rejects the request.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Part of the response is missing or too large.
    #[error("{0}")]
    Unusable(&'static str),
    #[error("the engine aborted the request: {0}")]
    Aborted(String),
    #[error("prompt_tokens is {counted}, but the prompt has {sent} tokens")]
    PromptCount { counted: u64, sent: u32 },
    #[error("the engine saw a different prompt: {found} tokens instead of {sent}, first difference at {at}")]
    OtherPrompt { found: usize, sent: usize, at: usize },
    /// All tokens of this kind have the same route.
    #[error("every {0} has the same experts in every layer, which is implausible")]
    OneRoute(&'static str),
}

impl AnswerError {
    /// Whether the engine rejected this prompt only, for example because it is too long, so others may still succeed.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Http(HttpError::Status { status: 400 | 413 | 422, .. }))
    }

    /// Whether to retry. Generating twice is harmless, so all failures that may be transient are retried, except
    /// timeouts.
    pub(crate) fn worth_retrying(&self) -> bool {
        match self {
            Self::Http(HttpError::Connect { .. } | HttpError::Exchange { .. } | HttpError::Body { .. }) => true,
            Self::Http(HttpError::Status { status, .. }) => *status >= 500 || matches!(status, 408 | 429),
            _ => false,
        }
    }
}

/// A validated request, ready for the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Routed {
    /// The prompt, then all generated tokens except the last, which was never an input to the model.
    pub(crate) token_ids: Vec<u32>,
    pub(crate) prompt_len: u32,
    /// [n, L, k] over the MoE layers.
    pub(crate) experts: Vec<u16>,
}

/// Creates an empty trace of the model, whose checks validate responses. Requires `model.num_hidden_layers`, as
/// responses contain a row for dense layers too.
pub(crate) fn rules(model: &ModelInfo) -> Result<TraceBuilder, FormatError> {
    TraceBuilder::new(model.clone(), Provenance { source: String::new(), created: String::new() })
}

/// Extracts the routes from a response and rejects implausible ones.
pub(crate) fn check(
    rules: &TraceBuilder,
    asked: &LinePrompt,
    reported: &ReportedAnswer,
) -> Result<Routed, AnswerError> {
    let (token_ids, prompt_len) = tokens(asked, reported)?;
    let text = reported.routed_experts.as_deref().ok_or(AnswerError::Unusable("the response has no routed_experts"))?;
    let routes = decode(text, token_ids.len(), rules.model())?;
    let experts = routes.experts(rules.model())?;
    rules.check(&token_ids, prompt_len, &experts)?;
    let routed = Routed { token_ids, prompt_len, experts };
    let mut alike = Alike::default();
    alike.add(&routed);
    alike.one_route().map_or(Ok(routed), |kind| Err(AnswerError::OneRoute(kind)))
}

/// Detects that all prompt tokens or all generated tokens have the same experts in every layer.
#[derive(Debug, Default)]
pub(crate) struct Alike([OneRoute; 2]);

#[derive(Debug, Default)]
struct OneRoute {
    row: Vec<u16>,
    /// Distinct tokens with this row, up to the number needed.
    tokens: BTreeSet<u32>,
    /// Whether some token has a different row.
    differs: bool,
}

impl Alike {
    /// Adds the tokens of another response.
    pub(crate) fn add(&mut self, routed: &Routed) {
        let row = (routed.experts.len() / routed.token_ids.len().max(1)).max(1);
        let prompt = routed.prompt_len as usize;
        let tokens = routed.token_ids.iter().zip(routed.experts.chunks_exact(row)).enumerate();
        for (at, (&token, experts)) in tokens {
            let seen = &mut self.0[usize::from(at >= prompt)];
            if seen.row.is_empty() {
                seen.row = experts.to_vec();
            }
            seen.differs |= seen.row != experts;
            if !seen.differs && seen.tokens.len() < DIFFERENT_TOKENS {
                seen.tokens.insert(token);
            }
        }
    }

    /// Returns the kind of token, if any, whose routes are implausible.
    pub(crate) fn one_route(&self) -> Option<&'static str> {
        let one_route = |seen: &OneRoute| !seen.differs && seen.tokens.len() >= DIFFERENT_TOKENS;
        match self.0.each_ref().map(one_route) {
            [true, _] => Some("token"),
            [_, true] => Some("generated token"),
            _ => None,
        }
    }
}

/// Returns the tokens that need routes, and how many of them are prompt tokens.
pub(crate) fn tokens(asked: &LinePrompt, reported: &ReportedAnswer) -> Result<(Vec<u32>, u32), AnswerError> {
    if let Some(reason) = &reported.aborted {
        return Err(AnswerError::Aborted(reason.clone()));
    }
    let prompt = prompt(asked, reported)?;
    let prompt_len = u32::try_from(prompt.len()).map_err(|_| AnswerError::Unusable("the prompt is too long"))?;
    if let Some(counted) = reported.prompt_tokens.filter(|&counted| counted != u64::from(prompt_len)) {
        return Err(AnswerError::PromptCount { counted, sent: prompt_len });
    }
    let seen: &[u32] = match (&reported.output_ids, reported.output_tokens) {
        (Some(output), _) => match output.split_last() {
            Some((_, seen)) => seen,
            None => {
                return Err(AnswerError::Unusable(
                    "no token was generated, so the route of the prompt's last token is missing",
                ));
            }
        },
        // A single generated token has no route, so its id is not needed.
        (None, Some(1)) => &[],
        (None, _) => return Err(AnswerError::Unusable(NO_OUTPUT_IDS)),
    };
    Ok(([prompt, seen].concat(), prompt_len))
}

/// Returns the prompt's ids as reported by the engine, which must match the ids that were sent.
fn prompt<'a>(asked: &'a LinePrompt, reported: &'a ReportedAnswer) -> Result<&'a [u32], AnswerError> {
    match (asked, &reported.prompt_ids) {
        (LinePrompt::Ids(sent), None) => Ok(sent),
        (LinePrompt::Ids(sent), Some(seen)) if sent == seen => Ok(sent),
        (LinePrompt::Ids(sent), Some(seen)) => {
            let at = sent.iter().zip(seen).position(|(a, b)| a != b).unwrap_or(sent.len().min(seen.len()));
            Err(AnswerError::OtherPrompt { found: seen.len(), sent: sent.len(), at })
        }
        (_, Some(seen)) => Ok(seen),
        (_, None) => Err(AnswerError::Unusable(NO_PROMPT_IDS)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers of two prompt tokens and one generated one each, with a layer of one expert.
    fn judged(answers: u32, prompt: impl Fn(u32) -> u16, generated: impl Fn(u32) -> u16) -> Option<&'static str> {
        let mut alike = Alike::default();
        for token in 0..answers {
            let experts = vec![prompt(token), prompt(token + 1), generated(token)];
            alike.add(&Routed { token_ids: vec![token, token + 1, token], prompt_len: 2, experts });
        }
        alike.one_route()
    }

    #[test]
    fn one_route_for_all_tokens_of_a_kind_is_refused_over_all_answers() {
        assert_eq!(judged(20, |token| token as u16, |token| token as u16 % 2), None);
        assert_eq!(judged(20, |token| token as u16, |_| 3), Some("generated token"));
        assert_eq!(judged(20, |_| 3, |token| token as u16), Some("token"));
        assert_eq!(judged(7, |token| token as u16, |_| 3), None, "chance");
    }
}
