//! Scores a prompt: its expected locality on each rank, its tokens and its blocks.
//!
//! Unambiguous client errors are reported (400). A prompt that merely cannot be scored is counted by reason and routed
//! by load, so that the engine can judge it.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::Utf8Error;
use std::time::Duration;

use semmoe_engines::Route;
use semmoe_engines::SharedError;
use semmoe_routing::{Needs, block_hashes};
use semmoe_text::{Budget, Limits, PlainChat, Prompt, Shapes, TextError};
use serde::de::IgnoredAny;
use serde_json::Value;

use super::DataPlane;
use crate::backends::{Member, Model, RequestError, Text, text_route};
use crate::data::body_memory::{Held, tree_bytes};

/// Assumed bytes per token of a prompt that was not tokenized.
const BYTES_PER_TOKEN: u64 = 4;
/// Fields that carry a prompt in a form that only the engine reads.
const OTHER_PROMPTS: [&str; 4] = ["input_embeds", "prompt_embeds", "input_ids", "image_data"];

/// Why a prompt was not scored.
pub(super) enum Unscored {
    /// The request is invalid.
    Client(RequestError),
    /// The client is gone: discard the result.
    GivenUp,
    /// The slow tokenizer must be loaded first, which must not happen on a network thread.
    OracleAway,
    /// The chat template exceeds its budget on a network thread.
    TemplateBudget { cause: SharedError },
    /// The request is valid but cannot be scored: it is routed by load.
    Open { reason: &'static str, cause: SharedError },
}

/// The parts of a body that are read before its model is known.
pub(super) struct Whole<'a> {
    bytes: &'a [u8],
    /// The text, or why the bytes cannot be JSON.
    text: Result<&'a str, Utf8Error>,
    /// The chat, if it is a plain one, and the position of its messages.
    chat: Option<(PlainChat<'a>, Range<usize>)>,
}

impl<'a> Whole<'a> {
    /// Parses plain chats even if no policy scores them, because that also validates the JSON.
    pub(super) fn new(route: Route, bytes: &'a [u8], effort: &Effort<'_>) -> Self {
        // Fall back to the standard library, whose error has a position.
        let text = simdutf8::basic::from_utf8(bytes).or_else(|_| std::str::from_utf8(bytes));
        let wanted = route == Route::Chat && !matches!(effort, Effort::Skip { .. });
        let chat = text.ok().filter(|_| wanted).and_then(PlainChat::quickly);
        Self { bytes, text, chat }
    }

    /// Returns the part of the body that has already been parsed.
    pub(super) fn known(&self) -> Option<Range<usize>> {
        self.chat.as_ref().map(|(_, at)| at.clone())
    }
}

/// The results of scoring a prompt.
pub(crate) struct Scored {
    /// Number of prompt tokens, estimated if the prompt was not tokenized.
    pub(crate) tokens: u64,
    /// Number of prompt tokens if the whole prompt was tokenized, for comparison with the engine's count.
    pub(crate) counted: Option<u64>,
    /// Expected local share for each slot of the model's pool; `None` without evidence.
    pub(crate) share: Option<Vec<f64>>,
    /// Hashes of the prompt's complete blocks, if the model's policies need them.
    pub(crate) blocks: Vec<u64>,
    /// Whether the tokens are known rather than estimated.
    pub(crate) read: bool,
    /// Shapes of the chat or text that was read.
    pub(crate) shapes: Shapes,
}

impl Scored {
    /// Describes a prompt that was not tokenized.
    pub(super) fn unseen(body: &[u8]) -> Self {
        let tokens = (body.len() as u64 / BYTES_PER_TOKEN).max(1);
        Self { tokens, counted: None, share: None, blocks: Vec::new(), read: false, shapes: Shapes::NONE }
    }
}

/// How much work scoring a prompt may take.
pub(super) enum Effort<'a> {
    /// Runs on a network thread: immediately, or not at all.
    Here,
    /// Runs on a blocking thread until cancelled, and loads whatever is missing.
    Away(&'a mut dyn FnMut() -> bool),
    /// No scoring, because it took too long.
    Skip { limit: Duration },
}

/// Computes the tokens, the expected share per slot, and the blocks. If no policy needs a body, it is only checked to
/// be JSON.
pub(super) fn score(
    plane: &DataPlane,
    model: &Model,
    route: Route,
    whole: &Whole<'_>,
    block_tokens: u32,
    effort: Effort<'_>,
) -> Result<Scored, Unscored> {
    let not_json = |source| Unscored::Client(RequestError::BodyJson { source });
    // The parser does not inspect skipped values closely enough to notice invalid UTF-8.
    let body = whole.text.map_err(|error| not_json(error.into()))?;
    let text = model.scoring_text();
    // A plain chat is known to be JSON.
    let check = || match whole.chat {
        Some(_) => Ok(IgnoredAny),
        None => serde_json::from_str::<IgnoredAny>(body).map_err(|error| not_json(error.into())),
    };
    let (Some(text), Some(route)) = (text, text_route(route)) else {
        return check().map(|_| Scored::unseen(whole.bytes));
    };
    let read = |budget: Budget, keep_on: &mut dyn FnMut() -> bool| {
        let limits = Limits { template: budget, ..Limits::default() };
        // The libraries receive arbitrary text; a panic in them must cost no more than the score.
        let panicked = |_| Unscored::Open { reason: "panic", cause: "the tokenizer or template panicked".into() };
        catch_unwind(AssertUnwindSafe(|| {
            let chat = whole.chat.as_ref().map(|(chat, _)| chat);
            let read = match chat {
                Some(chat) => plain_ids(model, text, chat, limits, keep_on)?,
                None => prompt_ids(model, text, route, Body { text: body, plane, limits }, keep_on)?,
            };
            Ok(of_ids(model, &read, block_tokens))
        }))
        .map_err(panicked)
        .flatten()
    };
    match effort {
        Effort::Here => read(Budget::BRIEF, &mut || true),
        Effort::Away(keep_on) => {
            let mut scored = read(Budget::default(), keep_on);
            if matches!(scored, Err(Unscored::OracleAway)) {
                let failed = |error: TextError| Unscored::Open { reason: "tokenizer", cause: error.into() };
                text.tokenizer.load_oracle().map_err(failed)?;
                tracing::info!(
                    model = model.name,
                    "a prompt requires the slow tokenizer library, which stays loaded from now on"
                );
                scored = read(Budget::default(), keep_on);
            }
            scored.map_err(|unscored| match unscored {
                Unscored::TemplateBudget { cause } => Unscored::Open { reason: "template_budget", cause },
                unscored => unscored,
            })
        }
        Effort::Skip { limit } => {
            check()?;
            Err(Unscored::Open { reason: "slow", cause: format!("no score within {limit:?}").into() })
        }
    }
}

/// A tokenized prompt.
struct Read {
    ids: Vec<u32>,
    /// Whether the engine counts tokens by the same rule, which it does not for multiple prompts or for images.
    countable: bool,
    shapes: Shapes,
}

fn plain_ids(
    model: &Model,
    text: &Text,
    chat: &PlainChat<'_>,
    limits: Limits,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Read, Unscored> {
    let (tokenizer, template) = (&text.tokenizer, text.template.as_deref());
    let ids = semmoe_text::chat_ids_while(chat, model.preparation(), tokenizer, template, limits, keep_on);
    let ids = ids.map_err(|error| unscored(text, error, &Value::Null))?;
    Ok(Read { ids, countable: true, shapes: chat.shapes() })
}

/// A body to be parsed as a whole.
struct Body<'a> {
    text: &'a str,
    plane: &'a DataPlane,
    limits: Limits,
}

/// Returns the token ids of all of a request's prompts.
fn prompt_ids(
    model: &Model,
    text: &Text,
    route: semmoe_text::Route,
    Body { text: body, plane, limits }: Body<'_>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Read, Unscored> {
    let not_json = |error: serde_json::Error| Unscored::Client(RequestError::BodyJson { source: error.into() });
    let (tokenizer, template) = (&text.tokenizer, text.template.as_deref());
    // Parsing a body made only of commas takes a hundred times its size. A body that is not JSON is rejected in any
    // case.
    let limit_bytes = plane.backends.current.load().config.limits.body_memory_bytes;
    let _held = Held::take(&plane.body_memory, tree_bytes(body.as_bytes()), limit_bytes).map_err(|error| {
        let open = |_| Unscored::Open { reason: "too_large", cause: error.into() };
        serde_json::from_str::<IgnoredAny>(body).map_or_else(not_json, open)
    })?;
    if route == semmoe_text::Route::Chat
        && let Some(chat) = PlainChat::read(body).map_err(not_json)?
    {
        return plain_ids(model, text, &chat, limits, keep_on);
    }
    let value: Value = serde_json::from_str(body).map_err(not_json)?;
    let mut read = || {
        let prompt = Prompt::read(model.preparation(), route, &value)?;
        let prompts = semmoe_text::prompt_ids_while(&prompt, tokenizer, template, limits, keep_on)?;
        // All prompts of a request run on one rank and are scored as one.
        let shapes = match &prompt {
            Prompt::Texts(_) => Shapes::TEXT,
            Prompt::Ids(_) => Shapes::NONE,
            _ => Shapes::of(&value),
        };
        Ok(Read { ids: prompts.concat(), countable: prompts.len() == 1 && prompt.is_text_only(), shapes })
    };
    read().map_err(|error| unscored(text, error, &value))
}

fn of_ids(model: &Model, read: &Read, block_tokens: u32) -> Scored {
    let Read { ids, countable, shapes } = read;
    let tokens = ids.len() as u64;
    let Needs { share, cached, .. } = model.plan.needs;
    let mut blocks = Vec::new();
    if cached {
        block_hashes(ids, block_tokens, &mut blocks);
    }
    let share = if share { shares(model, ids) } else { None };
    let (counted, tokens) = (countable.then_some(tokens), tokens.max(1));
    Scored { tokens, counted, share, blocks, read: true, shapes: *shapes }
}

/// Returns one share per slot, backend by backend; backends with equal tables are scored once. Any rank of an unpinned
/// backend may run the prompt, so all of its slots get the mean.
fn shares(model: &Model, ids: &[u32]) -> Option<Vec<f64>> {
    let mut scored: Vec<(&str, Vec<f64>)> = Vec::new();
    for member in model.members.iter().filter(|member| member.fit.unpinned.is_none()) {
        let loaded = member.tables.as_ref()?;
        let digest = loaded.tables.digest();
        if scored.iter().all(|(other, _)| *other != digest) {
            scored.push((digest, loaded.scorer.score(ids).share()?));
        }
    }
    let mean = |share: &[f64]| share.iter().sum::<f64>() / share.len().max(1) as f64;
    let (_, first) = scored.first()?;
    let mut all = Vec::new();
    for Member { tables, fit, .. } in &model.members {
        let digest = tables.as_ref().map(|loaded| loaded.tables.digest());
        let share = scored.iter().find(|(other, _)| Some(*other) == digest).map_or(first, |(_, share)| share);
        let group_ranks = usize::from(fit.group_ranks);
        if share.len() * group_ranks == usize::from(fit.ranks) && fit.unpinned.is_none() {
            all.extend(share.iter().flat_map(|share| std::iter::repeat_n(*share, group_ranks)));
        } else {
            all.extend(std::iter::repeat_n(mean(share), usize::from(fit.ranks)));
        }
    }
    Some(all)
}

fn unscored(text: &Text, error: TextError, body: &Value) -> Unscored {
    let reason = match &error {
        TextError::Field { .. } if !OTHER_PROMPTS.iter().any(|field| body.get(field).is_some()) => {
            return Unscored::Client(RequestError::Field { source: error.into() });
        }
        TextError::Field { .. } => "other_prompt",
        TextError::Ids { .. } => "ids",
        TextError::TooLarge { .. } => "too_large",
        TextError::GivenUp { .. } => return Unscored::GivenUp,
        TextError::OracleAway => return Unscored::OracleAway,
        TextError::TemplateBudget { .. } => return Unscored::TemplateBudget { cause: error.into() },
        TextError::NoTemplate if let Some(cause) = &text.template_error => {
            return Unscored::Open { reason: "template_unreadable", cause: cause.clone() };
        }
        TextError::NoTemplate => "no_template",
        TextError::TemplateRender { .. } => "template",
        _ => "tokenizer",
    };
    Unscored::Open { reason, cause: error.into() }
}
