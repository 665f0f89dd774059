//! Whether an engine tokenizes chats as the gateway does. The gateway requests the engine's ids for built-in chats at
//! start, when the engine returns and when it changes, and compares them with its own. It also compares the token
//! counts in responses ([`counts`]).
//!
//! A chat has [`Shapes`]. If the engine tokenizes a shape differently, scores would describe a different prompt, so
//! chats with that shape are routed by load. An engine that reveals nothing is unproven, and keeps its affinity.

pub(crate) mod counts;
pub(crate) mod known;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use semmoe_engines::SharedError;
use semmoe_engines::probe::Probe;
use semmoe_engines::rendering::{Rendering, Shown};
use semmoe_engines::unix_seconds;
use semmoe_text::{
    Budget, BuiltInChat, ChatTemplate, Limits, Preparation, PromptEncoder, Shapes, TextError, built_in_chats,
    chat_body_ids,
};
use serde_json::Value;

/// Seconds per day. Days matter because prompts may contain the date.
const DAY: i64 = 86_400;

/// Tokenizes a model's chats.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) tokenizer: &'a PromptEncoder,
    pub(crate) template: Option<&'a ChatTemplate>,
    pub(crate) preparation: &'static Preparation,
    /// Whether the template writes the current date.
    pub(crate) writes_date: bool,
    /// UTC offset of the engines' clocks.
    pub(crate) zone_seconds: i32,
}

/// Chat shapes, grouped by how the engine was seen to tokenize them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parity {
    pub(crate) equal: Shapes,
    pub(crate) differs: Shapes,
    /// Describes the first difference, or else the first chat that could not be compared.
    pub(crate) detail: Option<Arc<str>>,
}

/// Whether to query an engine again: it gave no answer, a new day began, or something differs, which may be due to a
/// change behind a proxy or to midnight.
pub(crate) fn is_open(probe: &Probe, parity: &Parity, reader: Option<&Reader<'_>>) -> bool {
    let Some(before) = &probe.rendering else { return true };
    let is_dated = reader.is_some_and(|reader| reader.is_of_another_day(before));
    before.failed || is_dated || !parity.differs.is_empty()
}

/// Compares the engine's ids for the built-in chats with the gateway's.
pub(crate) fn compare(rendering: Option<&Rendering>, reader: Option<&Reader<'_>>) -> Parity {
    let (Some(rendering), Some(reader)) = (rendering, reader) else { return Parity::default() };
    let mut parity = Parity::default();
    if reader.is_of_another_day(rendering) {
        parity.detail = Some("the chat template writes the date, and the engine was queried on another day".into());
        return parity;
    }
    let (mut difference, mut open) = (None, None);
    for (BuiltInChat { shows, body }, shown) in built_in_chats().iter().zip(&rendering.shown) {
        match shown {
            Shown::Ids(theirs) => match reader.differs(body, theirs) {
                Ok(None) => parity.equal = parity.equal | *shows,
                Err(error) => drop(open.get_or_insert(error.to_string())),
                Ok(Some(how)) => {
                    parity.differs = parity.differs | *shows;
                    difference.get_or_insert_with(|| format!("the {shows} chat: {how}"));
                }
            },
            Shown::Refused { status } => {
                open.get_or_insert_with(|| format!("the engine returned {status} for the {shows} chat"));
            }
            Shown::NotAsked => {}
        }
    }
    parity.equal = parity.equal.without(parity.differs);
    parity.detail = difference.or(open).map(Arc::from);
    parity
}

impl Reader<'_> {
    /// Describes how the gateway's ids differ from the engine's, if they do.
    ///
    /// # Errors
    /// Why the ids cannot be compared now.
    fn differs(&self, chat: &Value, theirs: &[u32]) -> Result<Option<String>, SharedError> {
        // Be brief: other state changes are waiting.
        let limits = Limits { template: Budget::BRIEF, ..Limits::default() };
        // Catch panics: the template libraries receive arbitrary templates.
        let read = || chat_body_ids(self.preparation, chat, self.tokenizer, self.template, limits);
        let ours = catch_unwind(AssertUnwindSafe(read)).map_err(|_| "tokenizing a chat panicked")?;
        let ours = match ours {
            Ok(ours) => ours,
            Err(error @ (TextError::OracleAway | TextError::TemplateBudget { .. })) => return Err(error.into()),
            Err(error) => {
                return Ok(Some(format!("the engine produces {} tokens, the gateway none: {error}", theirs.len())));
            }
        };
        let first = ours.iter().zip(theirs).position(|(ours, theirs)| ours != theirs);
        let (ours, theirs) = (ours.len(), theirs.len());
        if first.is_none() && ours == theirs {
            return Ok(None);
        }
        let at = first.unwrap_or(ours.min(theirs));
        Ok(Some(format!("{ours} tokens here, {theirs} in the engine, differing from token {at} on")))
    }

    /// Whether a chat rendered today would have a different date.
    fn is_of_another_day(&self, rendering: &Rendering) -> bool {
        let day = |seconds: i64| (seconds + i64::from(self.zone_seconds)).div_euclid(DAY);
        self.writes_date && day(rendering.unix_seconds) != day(unix_seconds())
    }
}
