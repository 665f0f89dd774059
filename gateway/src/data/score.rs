//! How local a prompt would be on each rank, its tokens and its blocks.
//!
//! What is plainly the client's fault is told (400); a prompt that merely cannot be scored is routed by load, counted by reason
//! and left to the engine to judge.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use semmoe_engines::Route;
use semmoe_routing::{Needs, block_hashes};
use semmoe_text::{Limits, Prompt, TextError};
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::error::RequestError;
use crate::snapshot::{Model, Text};

/// Tokens of a prompt that was not tokenized, as a share of its bytes.
const BYTES_PER_TOKEN: u64 = 4;
/// Fields that carry a prompt in a form that only the engine reads.
const OTHER_PROMPTS: [&str; 4] = ["input_embeds", "prompt_embeds", "input_ids", "image_data"];

/// Why a prompt was not scored.
pub(super) enum Unscored {
    /// The client's fault.
    Client(RequestError),
    /// Nobody waits for it any more: what is answered is thrown away.
    GivenUp,
    /// Nobody's, or ours: routed by load.
    Open { reason: &'static str, cause: String },
}

/// What a prompt says.
pub(super) struct Scored {
    pub(super) tokens: u64,
    pub(super) counted: Option<u64>,
    pub(super) share: Option<Vec<f64>>,
    pub(super) blocks: Vec<u64>,
}

impl Scored {
    /// Of a prompt that was not tokenized.
    pub(super) fn unseen(body: &[u8]) -> Self {
        Self { tokens: (body.len() as u64 / BYTES_PER_TOKEN).max(1), counted: None, share: None, blocks: Vec::new() }
    }
}

/// Whether a prompt is scored.
pub(super) enum Effort<'a> {
    /// As long as somebody wants it.
    Score(&'a mut dyn FnMut() -> bool),
    /// No more: it took too long.
    Skip { limit: Duration },
}

/// Tokens, the expected share per slot, and blocks. A body that no policy wants read is only checked to be JSON.
pub(super) fn score(
    model: &Model,
    route: Route,
    body: &[u8],
    block_tokens: u32,
    effort: Effort<'_>,
) -> Result<Scored, Unscored> {
    let not_json = |cause: String| Unscored::Client(RequestError::BodyJson { cause });
    // Values that are skipped are not looked at closely enough by the parser to see that they are no text.
    let body = std::str::from_utf8(body).map_err(|error| not_json(error.to_string()))?;
    let Needs { share, cached, .. } = model.plan.needs();
    let text = model.text.as_deref().filter(|_| share || cached);
    let check = || serde_json::from_str::<IgnoredAny>(body).map_err(|error| not_json(error.to_string()));
    let (Some(text), Some(route)) = (text, text_route(route)) else {
        return check().map(|_| Scored::unseen(body.as_bytes()));
    };
    let keep_on = match effort {
        Effort::Score(keep_on) => keep_on,
        Effort::Skip { limit } => {
            check()?;
            return Err(Unscored::Open { reason: "slow", cause: format!("no score within {limit:?}") });
        }
    };
    let value: Value = serde_json::from_str(body).map_err(|error| not_json(error.to_string()))?;
    // The libraries beneath see text of any kind; a panic in them must cost no more than the score.
    let scored = catch_unwind(AssertUnwindSafe(|| score_prompt(model, text, route, &value, block_tokens, keep_on)));
    match scored {
        Ok(Ok(scored)) => Ok(scored),
        Ok(Err(error)) => Err(unscored(error, &value)),
        Err(_) => Err(Unscored::Open { reason: "panic", cause: "the tokenizer or template panicked".to_owned() }),
    }
}

/// Routes whose prompts can be read.
pub(crate) fn text_route(route: Route) -> Option<semmoe_text::Route> {
    match route {
        Route::Chat => Some(semmoe_text::Route::Chat),
        Route::Completions => Some(semmoe_text::Route::Completions),
        Route::Generate => Some(semmoe_text::Route::Generate),
        Route::Responses | Route::Embeddings | Route::Tokenize | Route::Extra => None,
    }
}

fn score_prompt(
    model: &Model,
    text: &Text,
    route: semmoe_text::Route,
    body: &Value,
    block_tokens: u32,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Scored, TextError> {
    let prompt = Prompt::from_json(route, body)?;
    let template = text.template.as_ref();
    let prompts = semmoe_text::prompt_ids_while(&prompt, &text.tokenizer, template, Limits::default(), keep_on)?;
    // Several prompts of one request run on one rank: they are scored as one.
    let ids = prompts.concat();
    let tokens = ids.len() as u64;
    // Engines count the prompt once for each of several answers, and images by a rule of their own.
    let counted = Some(tokens).filter(|_| prompts.len() == 1 && prompt.is_text_only());
    let Needs { share, cached, .. } = model.plan.needs();
    let mut blocks = Vec::new();
    if cached {
        block_hashes(&ids, block_tokens, &mut blocks);
    }
    let share = if share { shares(model, &ids) } else { None };
    Ok(Scored { tokens: tokens.max(1), counted, share, blocks })
}

/// One share per slot, backend after backend; backends that run the same tables are scored once.
fn shares(model: &Model, ids: &[u32]) -> Option<Vec<f64>> {
    let mut scored: Vec<(&str, Vec<f64>)> = Vec::new();
    let mut all = Vec::new();
    for member in &model.members {
        let loaded = member.tables.as_ref()?;
        let digest = loaded.tables.digest();
        let known = scored.iter().position(|(other, _)| *other == digest);
        let at = match known {
            Some(at) => at,
            None => {
                scored.push((digest, loaded.scorer.score(ids).share()?));
                scored.len() - 1
            }
        };
        all.extend_from_slice(&scored[at].1);
    }
    Some(all)
}

fn unscored(error: TextError, body: &Value) -> Unscored {
    let reason = match &error {
        TextError::Field { .. } if !OTHER_PROMPTS.iter().any(|field| body.get(field).is_some()) => {
            return Unscored::Client(RequestError::Field { cause: error.to_string() });
        }
        TextError::Field { .. } => "other_prompt",
        TextError::TooLarge { .. } => "too_large",
        TextError::GivenUp { .. } => return Unscored::GivenUp,
        TextError::NoTemplate => "no_template",
        TextError::TemplateRender { .. } => "template",
        _ => "tokenizer",
    };
    Unscored::Open { reason, cause: error.to_string() }
}
