//! How local a prompt would be on each rank, its tokens and its blocks.
//!
//! The client's plain faults are reported (400); a prompt that merely cannot be scored is routed by load, counted by
//! reason and left to the engine to judge.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::Utf8Error;
use std::time::Duration;

use semmoe_engines::Route;
use semmoe_routing::{Needs, block_hashes};
use semmoe_text::{Budget, Limits, PlainChat, Prompt, Shapes, TextError};
use serde::de::IgnoredAny;
use serde_json::Value;

use super::DataPlane;
use crate::backends::{Member, Model, RequestError, Text, text_route};
use crate::data::body_memory::{Held, tree_bytes};

/// Tokens of a prompt that was not tokenized, as a share of its bytes.
const BYTES_PER_TOKEN: u64 = 4;
/// Fields that carry a prompt in a form that only the engine reads.
const OTHER_PROMPTS: [&str; 4] = ["input_embeds", "prompt_embeds", "input_ids", "image_data"];

/// Why a prompt was not scored.
pub(super) enum Unscored {
    /// The client's fault.
    Client(RequestError),
    /// Its client is gone: the answer is discarded.
    GivenUp,
    /// Something has to be loaded first, which no network thread does.
    OracleAway,
    /// The chat template takes more than it may on a network thread.
    TemplateBudget { cause: String },
    /// No fault, or ours: routed by load.
    Open { reason: &'static str, cause: String },
}

/// A body, as far as it is read before its model is known.
pub(super) struct Whole<'a> {
    bytes: &'a [u8],
    /// Bytes that are not text are not JSON; this is the reason.
    text: Result<&'a str, Utf8Error>,
    /// The chat that it is, where that is plain to see, and where its messages stand.
    chat: Option<(PlainChat<'a>, Range<usize>)>,
}

impl<'a> Whole<'a> {
    /// Plain chats are read even where no policy scores them: that also shows that the body is JSON.
    pub(super) fn new(route: Route, bytes: &'a [u8], effort: &Effort<'_>) -> Self {
        // The standard library finds out where the error is.
        let text = simdutf8::basic::from_utf8(bytes).or_else(|_| std::str::from_utf8(bytes));
        let wanted = route == Route::Chat && !matches!(effort, Effort::Skip { .. });
        let chat = text.ok().filter(|_| wanted).and_then(PlainChat::quickly);
        Self { bytes, text, chat }
    }

    /// Where a part stands that was gone through.
    pub(super) fn known(&self) -> Option<Range<usize>> {
        self.chat.as_ref().map(|(_, at)| at.clone())
    }
}

/// The content of a prompt.
pub(crate) struct Scored {
    /// Prompt tokens, estimated where the prompt was not tokenized.
    pub(crate) tokens: u64,
    /// Prompt tokens where all of the prompt was tokenized, to compare with the engine's count.
    pub(crate) counted: Option<u64>,
    /// Expected local share per slot of the model's pool; `None` without evidence.
    pub(crate) share: Option<Vec<f64>>,
    /// Names of the prompt's whole blocks, where the model's policies want them.
    pub(crate) blocks: Vec<u64>,
    /// Whether its tokens are known, and not estimated.
    pub(crate) read: bool,
    /// Of a chat or a text that was read.
    pub(crate) shapes: Shapes,
}

impl Scored {
    /// Of a prompt that was not tokenized.
    pub(super) fn unseen(body: &[u8]) -> Self {
        let tokens = (body.len() as u64 / BYTES_PER_TOKEN).max(1);
        Self { tokens, counted: None, share: None, blocks: Vec::new(), read: false, shapes: Shapes::NONE }
    }
}

/// Whether a prompt is scored.
pub(super) enum Effort<'a> {
    /// On a network thread: at once, or not at all.
    Here,
    /// Off the network threads, until cancelled; loads what is missing.
    Away(&'a mut dyn FnMut() -> bool),
    /// No more: it took too long.
    Skip { limit: Duration },
}

/// Tokens, the expected share per slot, and blocks. A body that no policy wants read is only checked to be JSON.
pub(super) fn score(
    plane: &DataPlane,
    model: &Model,
    route: Route,
    whole: &Whole<'_>,
    block_tokens: u32,
    effort: Effort<'_>,
) -> Result<Scored, Unscored> {
    let not_json = |cause: String| Unscored::Client(RequestError::BodyJson { cause });
    // Values that are skipped are not looked at closely enough by the parser to see that they are no text.
    let body = whole.text.map_err(|error| not_json(error.to_string()))?;
    let text = model.scoring_text();
    // A plain chat was seen to be JSON.
    let check = || match whole.chat {
        Some(_) => Ok(IgnoredAny),
        None => serde_json::from_str::<IgnoredAny>(body).map_err(|error| not_json(error.to_string())),
    };
    let (Some(text), Some(route)) = (text, text_route(route)) else {
        return check().map(|_| Scored::unseen(whole.bytes));
    };
    let read = |budget: Budget, keep_on: &mut dyn FnMut() -> bool| {
        let limits = Limits { template: budget, ..Limits::default() };
        // The libraries beneath see text of any kind; a panic in them must cost no more than the score.
        let panicked = |_| Unscored::Open { reason: "panic", cause: "the tokenizer or template panicked".to_owned() };
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
                let failed = |error: TextError| Unscored::Open { reason: "tokenizer", cause: error.to_string() };
                text.tokenizer.load_oracle().map_err(failed)?;
                tracing::info!(
                    model = model.name,
                    "a prompt needs the slow library, which is now loaded and stays loaded"
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
            Err(Unscored::Open { reason: "slow", cause: format!("no score within {limit:?}") })
        }
    }
}

/// A prompt that was read.
struct Read {
    ids: Vec<u32>,
    /// Whether the engine counts them by the same rule: not several prompts at once, and not images.
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

/// A body to be read whole.
struct Body<'a> {
    text: &'a str,
    plane: &'a DataPlane,
    limits: Limits,
}

/// The ids of all prompts of a request.
fn prompt_ids(
    model: &Model,
    text: &Text,
    route: semmoe_text::Route,
    Body { text: body, plane, limits }: Body<'_>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Read, Unscored> {
    let not_json = |error: serde_json::Error| Unscored::Client(RequestError::BodyJson { cause: error.to_string() });
    let (tokenizer, template) = (&text.tokenizer, text.template.as_deref());
    // A hundred times the body, where that is all commas. One that is no JSON is refused whether or not there is room.
    let limit_bytes = plane.backends.current.load().config.limits.body_memory_bytes;
    let _held = Held::take(&plane.body_memory, tree_bytes(body.as_bytes()), limit_bytes).map_err(|error| {
        let open = |_| Unscored::Open { reason: "too_large", cause: error.to_string() };
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
        // Several prompts of one request run on one rank: they are scored as one.
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

/// One share per slot, backend after backend; backends that run the same tables are scored once. Any rank of a backend
/// that is not pinned may run the prompt: its slots have the mean.
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
        if share.len() == usize::from(fit.ranks) && fit.unpinned.is_none() {
            all.extend_from_slice(share);
        } else {
            all.extend(std::iter::repeat_n(mean(share), usize::from(fit.ranks)));
        }
    }
    Some(all)
}

fn unscored(text: &Text, error: TextError, body: &Value) -> Unscored {
    let reason = match &error {
        TextError::Field { .. } if !OTHER_PROMPTS.iter().any(|field| body.get(field).is_some()) => {
            return Unscored::Client(RequestError::Field { cause: error.to_string() });
        }
        TextError::Field { .. } => "other_prompt",
        TextError::Ids { .. } => "ids",
        TextError::TooLarge { .. } => "too_large",
        TextError::GivenUp { .. } => return Unscored::GivenUp,
        TextError::OracleAway => return Unscored::OracleAway,
        TextError::TemplateBudget { .. } => return Unscored::TemplateBudget { cause: error.to_string() },
        TextError::NoTemplate if let Some(cause) = &text.template_error => {
            return Unscored::Open { reason: "template_unreadable", cause: cause.clone() };
        }
        TextError::NoTemplate => "no_template",
        TextError::TemplateRender { .. } => "template",
        _ => "tokenizer",
    };
    Unscored::Open { reason, cause: error.to_string() }
}
