//! Parses an event or a complete response: whether it contains text, how many tokens it reports, and whether it is an
//! error.
//!
//! Only these facts are extracted, so that parsing an event does not allocate.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// The relevant content of a document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    /// Whether the document contains text, reasoning or a tool call.
    pub(crate) content: bool,
    /// Whether the document has the form of a response, with or without content.
    pub(crate) is_answer: bool,
    /// Whether the document is an error.
    pub(crate) is_error: bool,
    /// Number of tokens generated so far, according to the engine.
    pub(crate) output_tokens: Option<u64>,
}

/// Parses an event's data or an entire body; `None` unless it is a JSON object of the expected types.
pub(crate) fn read(json: &[u8]) -> Option<Said> {
    let document: Document<'_> = serde_json::from_slice(json).ok()?;
    let usage = document.usage.or(document.meta_info);
    let has_text = is_filled(document.text) || is_filled(document.output_ids);
    Some(Said {
        content: has_text || document.choices.is_some_and(|choices| choices.0),
        is_answer: has_text || document.choices.is_some() || usage.is_some(),
        is_error: is_filled(document.error) || document.object.is_some_and(|kind| kind.get() == "\"error\""),
        output_tokens: usage.and_then(|usage| usage.completion_tokens),
    })
}

#[derive(Deserialize)]
struct Document<'a> {
    choices: Option<Choices>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    output_ids: Option<&'a RawValue>,
    usage: Option<Usage>,
    meta_info: Option<Usage>,
    error: Option<&'a RawValue>,
    object: Option<&'a RawValue>,
}

#[derive(Clone, Copy, Deserialize)]
struct Usage {
    completion_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    delta: Option<Message<'a>>,
    message: Option<Message<'a>>,
    text: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    reasoning_content: Option<&'a RawValue>,
    reasoning: Option<&'a RawValue>,
    tool_calls: Option<&'a RawValue>,
}

impl Message<'_> {
    fn is_filled(&self) -> bool {
        [self.content, self.reasoning_content, self.reasoning, self.tool_calls].into_iter().any(is_filled)
    }
}

/// A list of choices, reduced to whether any of them has content.
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
                while let Some(choice) = list.next_element::<Choice<'_>>()? {
                    let in_message = [choice.delta, choice.message].iter().flatten().any(Message::is_filled);
                    content |= is_filled(choice.text) || in_message;
                }
                Ok(Choices(content))
            }
        }
        deserializer.deserialize_seq(Fold)
    }
}

/// Whether a value has content, which numbers and non-empty strings, lists and objects do.
fn is_filled(value: Option<&RawValue>) -> bool {
    value.is_some_and(|value| match value.get().as_bytes() {
        b"null" | b"false" | b"\"\"" => false,
        [b'[' | b'{', inside @ ..] => !matches!(inside.trim_ascii_start(), b"]" | b"}"),
        _ => true,
    })
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
