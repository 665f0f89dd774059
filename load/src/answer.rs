//! One event or one whole answer: whether it carries text, its token counts, and whether it is an error.
//!
//! Only what is needed is kept, so that reading an event allocates nothing.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The content of a document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    /// Some text, reasoning or tool call is in it.
    pub(crate) content: bool,
    /// It has the form of an answer, with or without content.
    pub(crate) is_answer: bool,
    /// It is an error.
    pub(crate) is_error: bool,
    /// Tokens generated so far, as the engine counts.
    pub(crate) output_tokens: Option<u64>,
}

/// Reads an event's data or a whole body; `None` if it is no JSON object of the expected types.
pub(crate) fn read(json: &[u8]) -> Option<Said> {
    let document: Document = serde_json::from_slice(json).ok()?;
    let usage = document.usage.or(document.meta_info);
    let has_text = document.text.0 || document.output_ids.0;
    Some(Said {
        content: has_text || document.choices.is_some_and(|choices| choices.0),
        is_answer: has_text || document.choices.is_some() || usage.is_some(),
        is_error: document.error.0 || document.object.0,
        output_tokens: usage.and_then(|usage| usage.completion_tokens),
    })
}

#[derive(Deserialize)]
struct Document {
    choices: Option<Choices>,
    #[serde(default)]
    text: Filled,
    #[serde(default)]
    output_ids: Filled,
    usage: Option<Usage>,
    meta_info: Option<Usage>,
    #[serde(default)]
    error: Filled,
    #[serde(default)]
    object: NamesError,
}

#[derive(Clone, Copy, Deserialize)]
struct Usage {
    completion_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Message>,
    message: Option<Message>,
    #[serde(default)]
    text: Filled,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Message {
    content: Filled,
    reasoning_content: Filled,
    reasoning: Filled,
    tool_calls: Filled,
}

impl Message {
    fn is_filled(&self) -> bool {
        self.content.0 || self.reasoning_content.0 || self.reasoning.0 || self.tool_calls.0
    }
}

/// A list of choices, folded into whether one has content.
#[derive(Clone, Copy)]
struct Choices(bool);

impl<'de> Deserialize<'de> for Choices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fold;
        impl<'de> Visitor<'de> for Fold {
            type Value = Choices;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Choices, A::Error> {
                let mut content = false;
                while let Some(choice) = list.next_element::<Choice>()? {
                    let in_message = [choice.delta, choice.message].iter().flatten().any(Message::is_filled);
                    content |= choice.text.0 || in_message;
                }
                Ok(Choices(content))
            }
        }
        deserializer.deserialize_seq(Fold)
    }
}

/// Any value, folded into whether there is something in it.
#[derive(Clone, Copy, Default)]
struct Filled(bool);

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Look(|text: &str| !text.is_empty())).map(Self)
    }
}

/// Whether a value is the text `error`.
#[derive(Clone, Copy, Default)]
struct NamesError(bool);

impl<'de> Deserialize<'de> for NamesError {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Look(|text: &str| text == "error")).map(Self)
    }
}

/// Looks at a text with a function; numbers and filled lists and objects are something, null is nothing.
struct Look<F>(F);

impl<'de, F: Fn(&str) -> bool> Visitor<'de> for Look<F> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<bool, E> {
        Ok(self.0(text))
    }

    fn visit_bool<E>(self, value: bool) -> Result<bool, E> {
        Ok(value)
    }

    fn visit_u64<E>(self, _: u64) -> Result<bool, E> {
        Ok(true)
    }

    fn visit_i64<E>(self, _: i64) -> Result<bool, E> {
        Ok(true)
    }

    fn visit_f64<E>(self, _: f64) -> Result<bool, E> {
        Ok(true)
    }

    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<bool, A::Error> {
        let mut any = false;
        while list.next_element::<IgnoredAny>()?.is_some() {
            any = true;
        }
        Ok(any)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut any = false;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            any = true;
        }
        Ok(any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_and_answers() {
        let content = Said { content: true, is_answer: true, ..Said::default() };
        let empty = Said { content: false, ..content };
        let error = Said { is_error: true, ..Said::default() };
        let counted = |said: Said, tokens| Said { output_tokens: Some(tokens), ..said };
        for (json, expected) in [
            (r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#, Some(empty)),
            (r#"{"choices":[{"delta":{"content":"a\n\u00e4"},"logprobs":null}],"usage":null}"#, Some(content)),
            (r#"{"choices":[{"delta":{"content":null,"reasoning_content":"a"}}]}"#, Some(content)),
            (r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#, Some(content)),
            (r#"{"choices":[{"delta":{"tool_calls":[]}},{"delta":{"content":"b"}}]}"#, Some(content)),
            (r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}"#, Some(counted(empty, 7))),
            (r#"{"choices":[{"text":"a"}]}"#, Some(content)),
            (r#"{"choices":[{"text":""}]}"#, Some(empty)),
            (r#"{"choices":[{"message":{"content":"a"}}],"usage":{"completion_tokens":1}}"#, Some(counted(content, 1))),
            (r#"{"text":"a","meta_info":{"completion_tokens":2,"dp_rank":1}}"#, Some(counted(content, 2))),
            (r#"{"text":"","output_ids":[1],"meta_info":{"completion_tokens":1}}"#, Some(counted(content, 1))),
            (r#"{"error":{"message":"no","code":500}}"#, Some(error)),
            (r#"{"object":"error","message":"no"}"#, Some(error)),
            (r#"{"object":"list"}"#, Some(Said::default())),
            (r#"{"choices":[],"error":null}"#, Some(empty)),
            (r#"{"choices":1}"#, None),
            (r#"{"choices":[{"delta":{"content":"a"}}]"#, None),
            ("[]", None),
            ("", None),
            ("[DONE]", None),
        ] {
            assert_eq!(read(json.as_bytes()), expected, "{json}");
        }
    }
}
