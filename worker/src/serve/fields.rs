//! Every request field of every route: honoured, inherently without effect, or rejected by name unless its value is
//! equivalent to omitting it. Unknown fields are also rejected, so that nothing is silently ignored. worker/FIELDS.md
//! contains the table.

mod table;

use std::fmt;

use serde_json::Value;

use super::error::ApiError;

/// Bit flags for the places where a field may occur.
pub(super) const CHAT: u8 = 1;
pub(super) const COMPLETIONS: u8 = 2;
pub(super) const GENERATE: u8 = 4;
/// `sampling_params` of `/generate`.
pub(super) const PARAMS: u8 = 8;
pub(super) const TOKENIZE: u8 = 16;
/// `stream_options` on the OpenAI routes.
pub(super) const STREAM: u8 = 32;
const OPENAI: u8 = CHAT | COMPLETIONS;

#[derive(Clone, Copy)]
enum Use {
    Honoured,
    /// Has no effect in this worker.
    NoEffect,
    /// Rejected unless its value has no effect.
    Unless(Harmless),
}

/// A value without effect. Null is always harmless.
#[derive(Clone, Copy)]
enum Harmless {
    NullOnly,
    Number(f64),
    Bool(bool),
    /// An empty string, list or object.
    Empty,
    /// One of these.
    Words(&'static [&'static str]),
    /// This list.
    List(&'static [&'static str]),
    /// An object with this `type`.
    Type(&'static str),
}

impl Harmless {
    fn holds(self, value: &Value) -> bool {
        match (self, value) {
            (Self::NullOnly, _) => false,
            (Self::Number(harmless), value) => value.as_f64() == Some(harmless),
            (Self::Bool(harmless), value) => value.as_bool() == Some(harmless),
            (Self::Empty, Value::String(text)) => text.is_empty(),
            (Self::Empty, Value::Object(map)) => map.is_empty(),
            (Self::Empty, Value::Array(list)) => list.is_empty(),
            (Self::Empty, _) => false,
            (Self::Words(words), value) => value.as_str().is_some_and(|found| words.contains(&found)),
            (Self::List(words), value) => value
                .as_array()
                .is_some_and(|found| found.iter().map(Value::as_str).eq(words.iter().copied().map(Some))),
            (Self::Type(name), value) => value["type"] == name,
        }
    }
}

/// Formats the value as JSON, for messages and worker/FIELDS.md.
impl fmt::Display for Harmless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NullOnly => f.write_str("null"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Empty => f.write_str("\"\", [] or {}"),
            Self::Words(words) => {
                for (index, word) in words.iter().enumerate() {
                    write!(f, "{}\"{word}\"", if index == 0 { "" } else { " or " })?;
                }
                Ok(())
            }
            Self::List(words) => write!(f, "[\"{}\"]", words.join("\",\"")),
            Self::Type(name) => write!(f, "{{\"type\":\"{name}\"}}"),
        }
    }
}

/// Rejects members of `body` that are unknown in `place` or request unsupported features. Null counts as absent.
pub(super) fn check(body: &Value, place: u8) -> Result<(), ApiError> {
    let members = body.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    for (name, value) in members {
        let known = table::ROWS.iter().find(|row| row.places & place != 0 && row.names.contains(&&name[..]));
        match known.map(|row| row.usage) {
            Some(Use::Honoured | Use::NoEffect) => {}
            Some(Use::Unless(harmless)) if harmless.holds(value) => {}
            Some(Use::Unless(harmless)) => {
                let found = shortened(&value.to_string());
                let message = format!("{name} {found} is not supported by this worker, only {harmless}");
                return Err(ApiError::param(name, message));
            }
            None => {
                let message = format!("{} is not a parameter of this route", shortened(name));
                return Err(ApiError::param(name, message));
            }
        }
    }
    Ok(())
}

/// Rejects messages with content other than text: this worker's models accept only text, and a chat template would
/// silently drop other content.
pub(super) fn check_contents(body: &Value) -> Result<(), ApiError> {
    let messages = body["messages"].as_array().into_iter().flatten().enumerate();
    let parts = messages.flat_map(|(message, value)| {
        value["content"].as_array().into_iter().flatten().enumerate().map(move |(part, value)| (message, part, value))
    });
    for (message, part, value) in parts {
        let found = match (&value["type"], value) {
            (_, Value::String(_)) => continue,
            (Value::String(kind), _) if kind == "text" && value["text"].is_string() => continue,
            (Value::String(kind), _) if kind == "text" => "text without a text".to_owned(),
            (Value::String(kind), _) => shortened(kind),
            _ => "without a type".to_owned(),
        };
        let message = format!(
            "messages[{message}].content[{part}] is {found}, which is not supported by this worker, only parts of type text"
        );
        return Err(ApiError::param("messages", message));
    }
    Ok(())
}

/// Shortens part of a request for use in a message.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
#[path = "fields/tests.rs"]
mod tests;
