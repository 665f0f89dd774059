//! The content of a message: a string, or a list of parts.

use serde_json::{Map, Value, json};

use super::{Contents, Preparation};
use crate::TextError;
use crate::error::field;

/// Members of parts that vLLM recognizes but does not pass to the template.
const KNOWN: [&str; 18] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// Returns the content as passed to the template; `lists` is whether the template iterates over lists of parts.
pub(super) fn content(
    preparation: &Preparation,
    content: Option<&Value>,
    lists: bool,
    index: usize,
) -> Result<Value, TextError> {
    let one = |text: &str| vec![json!({"type": "text", "text": text})];
    let all = preparation.contents == Contents::AllLists && lists;
    match content {
        None | Some(Value::Null) => Ok(if all { Value::Array(Vec::new()) } else { "".into() }),
        Some(Value::String(text)) if all => Ok(Value::Array(one(text))),
        Some(Value::String(text)) => Ok(Value::String(text.clone())),
        Some(Value::Array(parts)) if lists => {
            Ok(parts.iter().filter_map(|part| listed(part, preparation.contents)).collect())
        }
        Some(Value::Array(parts)) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| text_of(part, preparation.contents)).collect();
            Ok(texts.join(preparation.separator).into())
        }
        Some(other) => Err(field(&format!("messages[{index}].content"), "a string or a list of parts", other)),
    }
}

/// Returns the text of a part, if the engine treats the part as text.
fn text_of(part: &Value, contents: Contents) -> Option<&str> {
    let text = |key: &str| part.get(key)?.as_str();
    match contents {
        Contents::Texts => part.as_str().or_else(|| text("text")),
        Contents::AllLists => part.as_str().or_else(|| ["text", "refusal", "thinking"].into_iter().find_map(text)),
        Contents::GivenLists => text("text").filter(|_| part["type"] == "text" || part["type"] == "input_text"),
    }
}

/// Returns a part as a list item; a part that is not text is passed without its data.
fn listed(part: &Value, contents: Contents) -> Option<Value> {
    let kind = part["type"].as_str().unwrap_or("text");
    let mut listed = Map::new();
    if kind == "tool_reference" {
        return Some(json!({"type": kind, "name": part["name"]}));
    } else if let Some(text) = text_of(part, contents) {
        listed.insert("type".into(), "text".into());
        listed.insert("text".into(), text.into());
    } else {
        let kind = ["image", "audio", "video"].into_iter().find(|medium| kind.contains(medium))?;
        listed.insert("type".into(), kind.into());
    }
    if contents == Contents::AllLists {
        let more = part.as_object().into_iter().flatten().filter(|(key, _)| !KNOWN.contains(&key.as_str()));
        listed.extend(more.map(|(key, value)| (key.clone(), value.clone())));
    }
    Some(Value::Object(listed))
}

/// Returns the texts in a list of parts, or a string as the only text.
pub(super) fn texts(content: &Value) -> Vec<&str> {
    match content {
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        content => content.as_str().into_iter().collect(),
    }
}
