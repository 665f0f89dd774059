//! One answer of an engine, accepted only if it agrees with the request and the model.

use std::collections::BTreeSet;

use semmoe_engines::recording::{ReportedAnswer, decode};
use semmoe_tables::{ModelInfo, Provenance, TraceBuilder};
use semmoe_text::LinePrompt;

use crate::ProfilerError;

/// This many distinct tokens cannot all have the same experts in every layer.
const DIFFERENT_TOKENS: usize = 8;

const NO_PROMPT_IDS: &str = "the prompt's token ids are missing from the answer: send ids, with --tokenizer";
const NO_OUTPUT_IDS: &str = "the ids of the generated tokens are missing from the answer: record with --max-tokens 1, or \
                             send ids to SGLang's /generate, with --tokenizer and without --openai-routes";

/// A checked request for the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Routed {
    /// The prompt, then the generated tokens except the last, which no layer has seen.
    pub(crate) token_ids: Vec<u32>,
    pub(crate) prompt_len: u32,
    /// [n, L, k] over the MoE layers.
    pub(crate) experts: Vec<u16>,
}

/// An empty trace of the model, used for its checks. `model.num_hidden_layers` must be known, as answers have a row for
/// dense layers too.
pub(crate) fn rules(model: &ModelInfo) -> Result<TraceBuilder, ProfilerError> {
    let provenance = Provenance { source: String::new(), created: String::new() };
    Ok(TraceBuilder::new(model.clone(), provenance)?)
}

/// The routes of an answer, or one sentence on why it is not trusted.
pub(crate) fn check(rules: &TraceBuilder, asked: &LinePrompt, reported: &ReportedAnswer) -> Result<Routed, String> {
    let (token_ids, prompt_len) = tokens(asked, reported)?;
    let text = reported.routed_experts.as_deref().ok_or("routed_experts is missing from the answer")?;
    let routes = decode(text, token_ids.len(), rules.model()).map_err(|error| error.to_string())?;
    let experts = routes.experts(rules.model()).map_err(|error| error.to_string())?;
    rules.check(&token_ids, prompt_len, &experts).map_err(|error| error.to_string())?;
    let routed = Routed { token_ids, prompt_len, experts };
    let mut alike = Alike::default();
    alike.add(&routed);
    alike.refuse().map(|()| routed)
}

/// Whether prompt tokens, or generated ones, all have the same experts in every layer.
#[derive(Debug, Default)]
pub(crate) struct Alike([OneRoute; 2]);

#[derive(Debug, Default)]
struct OneRoute {
    row: Vec<u16>,
    /// Distinct tokens with this row, as many as needed.
    tokens: BTreeSet<u32>,
    /// Some token has another row.
    differs: bool,
}

impl Alike {
    /// Takes another answer into account.
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

    /// Fails if the routes cannot be trusted.
    pub(crate) fn refuse(&self) -> Result<(), String> {
        let one_route = |seen: &OneRoute| !seen.differs && seen.tokens.len() >= DIFFERENT_TOKENS;
        match self.0.each_ref().map(one_route) {
            [true, _] => Err("every token has the same experts in every layer, which no router would choose".into()),
            [_, true] => {
                Err("every generated token has the same experts in every layer, which no router would choose".into())
            }
            _ => Ok(()),
        }
    }
}

/// The tokens for which routes are expected, and how many of them are the prompt.
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
        // If only one token was generated, its id is not needed.
        (None, Some(1)) => &[],
        (None, _) => return Err(NO_OUTPUT_IDS.into()),
    };
    Ok(([prompt, seen].concat(), prompt_len))
}

/// The prompt's ids according to the engine, which must match those sent.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers of two prompt tokens and one generated one each, with a layer of one expert.
    fn judged(answers: u32, prompt: impl Fn(u32) -> u16, generated: impl Fn(u32) -> u16) -> Result<(), String> {
        let mut alike = Alike::default();
        for token in 0..answers {
            let experts = vec![prompt(token), prompt(token + 1), generated(token)];
            alike.add(&Routed { token_ids: vec![token, token + 1, token], prompt_len: 2, experts });
        }
        alike.refuse()
    }

    #[test]
    fn one_route_for_all_tokens_of_a_kind_is_refused_over_all_answers() {
        assert_eq!(judged(20, |token| token as u16, |token| token as u16 % 2), Ok(()));
        assert!(judged(20, |token| token as u16, |_| 3).unwrap_err().starts_with("every generated token"));
        assert!(judged(20, |_| 3, |token| token as u16).unwrap_err().starts_with("every token"));
        assert_eq!(judged(7, |token| token as u16, |_| 3), Ok(()), "chance");
    }
}
