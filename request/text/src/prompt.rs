//! Extracts the prompt from a request body as token ids, for each route that carries one.

use serde_json::{Map, Value};

use crate::chat::LOOKED_AT;
use crate::error::field;
use crate::template::Rendered;
use crate::{Budget, ChatTemplate, PlainChat, Preparation, PromptEncoder, TextError};

/// The routes whose bodies carry a prompt.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Route {
    /// `/v1/chat/completions`: `messages`, rendered by the chat template.
    Chat,
    /// `/v1/completions`: `prompt`.
    Completions,
    /// SGLang's `/generate`: `text` or `input_ids`.
    Generate,
}

/// Limits on one request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// Bytes of text over all prompts of the request, after rendering.
    pub text_bytes: usize,
    /// Number of prompts in the request.
    pub prompts: usize,
    /// Number of ids over all prompts of the request.
    pub ids: usize,
    /// Limits on rendering the chat template.
    pub template: Budget,
}

impl Default for Limits {
    fn default() -> Self {
        Self { text_bytes: 4 << 20, prompts: 1024, ids: 1 << 20, template: Budget::default() }
    }
}

/// The prompt of a request, before tokenization.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// A chat to be rendered by the template.
    Chat {
        /// The fields that an engine may read before rendering, such as the messages.
        body: Map<String, Value>,
        /// How the engine prepares chats.
        preparation: &'static Preparation,
    },
    /// Texts, one per prompt.
    Texts(Vec<String>),
    /// Texts to which no special tokens are added, one per prompt.
    BareTexts(Vec<String>),
    /// Token ids, one list per prompt.
    Ids(Vec<Vec<u32>>),
}

impl Prompt {
    /// Finds the prompt in a parsed body in the same way as semmoe's worker.
    ///
    /// # Errors
    /// The errors of [`Prompt::read`].
    pub fn from_json(route: Route, body: &Value) -> Result<Self, TextError> {
        Self::read(Preparation::OWN, route, body)
    }

    /// Finds the prompt in a parsed body in the same way as an engine. Never copies more than the body contains; wrong
    /// types are the client's fault.
    ///
    /// # Errors
    /// [`TextError::Field`] if a field is missing or has the wrong type, [`TextError::Ids`] if an engine might accept
    /// it.
    pub fn read(preparation: &'static Preparation, route: Route, body: &Value) -> Result<Self, TextError> {
        match route {
            Route::Chat => chat(preparation, body),
            Route::Completions => {
                let prompt = texts_or_ids("prompt", body.get("prompt").unwrap_or(&Value::Null))?;
                Ok(match prompt {
                    Prompt::Texts(texts) if preparation.is_bare(body) => Prompt::BareTexts(texts),
                    prompt => prompt,
                })
            }
            Route::Generate => match (present(body, "text"), present(body, "input_ids")) {
                (Some(text), None) => texts_or_ids("text", text),
                (None, Some(ids)) => texts_or_ids("input_ids", ids),
                (None, None) => Err(field("text or input_ids", "given", &Value::Null)),
                (Some(_), Some(_)) => Err(TextError::Field {
                    field: "text and input_ids".into(),
                    expected: "one of the two",
                    found: "both".into(),
                }),
            },
        }
    }

    /// Returns whether the prompt consists only of text or ids, without images, audio or other parts.
    pub fn is_text_only(&self) -> bool {
        let Prompt::Chat { body, .. } = self else { return true };
        let messages = body.get("messages").and_then(Value::as_array);
        let mut parts = messages.into_iter().flatten().filter_map(|message| message["content"].as_array());
        parts.all(|parts| parts.iter().all(|part| part.is_string() || part["text"].is_string()))
    }
}

fn present<'a>(body: &'a Value, name: &str) -> Option<&'a Value> {
    body.get(name).filter(|value| !value.is_null())
}

fn chat(preparation: &'static Preparation, body: &Value) -> Result<Prompt, TextError> {
    let messages = body.get("messages").unwrap_or(&Value::Null);
    if messages.as_array().is_none_or(Vec::is_empty) {
        return Err(field("messages", "a list of messages", messages));
    }
    if let Some(other) = present(body, "chat_template_kwargs").filter(|variables| !variables.is_object()) {
        return Err(field("chat_template_kwargs", "an object", other));
    }
    if let Some(ids) = present(body, "input_ids").filter(|_| preparation.reads_ids()) {
        return texts_or_ids("input_ids", ids);
    }
    let read = ["messages", "tool_choice"].into_iter().chain(LOOKED_AT);
    let read = read.filter_map(|name| Some((name.to_owned(), present(body, name)?.clone())));
    Ok(Prompt::Chat { body: read.collect(), preparation })
}

/// Parses a string, a list of strings, a list of ids or a list of lists of ids. `text` accepts no ids, and `input_ids`
/// no strings.
fn texts_or_ids(name: &'static str, value: &Value) -> Result<Prompt, TextError> {
    plain_texts_or_ids(name, value).map_err(|error| match error {
        TextError::Field { field, expected, found } if name != "text" && value.is_array() && may_be_ids(value) => {
            TextError::Ids { field, expected, found }
        }
        error => error,
    })
}

/// Returns whether an engine's validation might convert the value to token ids: pydantic accepts `true`, `"7"` and
/// `7.0` as numbers.
fn may_be_ids(value: &Value) -> bool {
    match value {
        Value::Number(_) | Value::Bool(_) | Value::String(_) => true,
        Value::Array(items) => items.iter().all(may_be_ids),
        Value::Null | Value::Object(_) => false,
    }
}

fn plain_texts_or_ids(name: &'static str, value: &Value) -> Result<Prompt, TextError> {
    let expected = match name {
        "text" => "a string or a list of strings",
        "input_ids" => "a list of token ids or a list of such lists",
        _ => "a string, a list of strings, or a list of token ids",
    };
    let wrong = || field(name, expected, value);
    match value {
        Value::String(text) if name != "input_ids" => Ok(Prompt::Texts(vec![text.clone()])),
        Value::Array(items) => match items.first().ok_or_else(wrong)? {
            Value::String(_) if name != "input_ids" => {
                let text = |item: &Value| item.as_str().map(str::to_owned).ok_or_else(|| field(name, expected, item));
                Ok(Prompt::Texts(items.iter().map(text).collect::<Result<_, _>>()?))
            }
            Value::Number(_) if name != "text" => Ok(Prompt::Ids(vec![ids(name, items)?])),
            Value::Array(_) if name != "text" => {
                let list = |item: &Value| ids(name, item.as_array().ok_or_else(wrong)?);
                Ok(Prompt::Ids(items.iter().map(list).collect::<Result<_, _>>()?))
            }
            other => Err(field(&format!("{name}[0]"), expected, other)),
        },
        _ => Err(wrong()),
    }
}

fn ids(name: &str, items: &[Value]) -> Result<Vec<u32>, TextError> {
    let id = |(index, item): (usize, &Value)| {
        item.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| TextError::Field {
            field: format!("{name}[{index}]"),
            expected: "a token id",
            found: match item {
                Value::Number(number) => number.to_string(),
                _ => "another type".into(),
            },
        })
    };
    items.iter().enumerate().map(id).collect()
}

/// Returns the token ids of each prompt, as the engine will compute them.
///
/// # Errors
/// [`TextError`] if the template or the tokenizer rejects the prompt, or a limit is exceeded.
pub fn prompt_ids(
    prompt: &Prompt,
    tokenizer: &PromptEncoder,
    template: Option<&ChatTemplate>,
    limits: Limits,
) -> Result<Vec<Vec<u32>>, TextError> {
    prompt_ids_while(prompt, tokenizer, template, limits, &mut || true)
}

/// Returns the token ids of each prompt, like [`prompt_ids`], but stops when `keep_on` returns false.
///
/// # Errors
/// The errors of [`prompt_ids`], and [`TextError::GivenUp`] if stopped.
pub fn prompt_ids_while(
    prompt: &Prompt,
    tokenizer: &PromptEncoder,
    template: Option<&ChatTemplate>,
    limits: Limits,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Vec<Vec<u32>>, TextError> {
    let bytes_within = |bytes| check("the prompt", bytes, "bytes", limits.text_bytes);
    match prompt {
        Prompt::Chat { body, preparation } => {
            let template = template.ok_or(TextError::NoTemplate)?;
            let rendered = template.render_body(preparation, body, limits.template)?;
            rendered_ids(&rendered, template, tokenizer, limits, keep_on).map(|ids| vec![ids])
        }
        Prompt::Texts(texts) | Prompt::BareTexts(texts) => {
            check("the request", texts.len(), "prompts", limits.prompts)?;
            bytes_within(texts.iter().map(String::len).sum())?;
            let special = matches!(prompt, Prompt::Texts(_));
            texts.iter().map(|text| tokenizer.encode_while(text, special, keep_on)).collect()
        }
        Prompt::Ids(lists) => {
            check("the request", lists.len(), "prompts", limits.prompts)?;
            check("the prompt", lists.iter().map(Vec::len).sum(), "token ids", limits.ids)?;
            Ok(lists.clone())
        }
    }
}

/// Returns the token ids of a [`PlainChat`], which equal those of [`prompt_ids_while`] for the same messages.
///
/// # Errors
/// The errors of [`prompt_ids_while`].
pub fn chat_ids_while(
    chat: &PlainChat<'_>,
    preparation: &Preparation,
    tokenizer: &PromptEncoder,
    template: Option<&ChatTemplate>,
    limits: Limits,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Vec<u32>, TextError> {
    let template = template.ok_or(TextError::NoTemplate)?;
    let rendered = template.render_chat(preparation, chat, limits.template)?;
    rendered_ids(&rendered, template, tokenizer, limits, keep_on)
}

fn rendered_ids(
    rendered: &Rendered,
    template: &ChatTemplate,
    tokenizer: &PromptEncoder,
    limits: Limits,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Vec<u32>, TextError> {
    let Rendered { text, prefix, special } = rendered;
    let bytes = text.len() + prefix.as_ref().map_or(0, String::len);
    check("the prompt", bytes, "bytes", limits.text_bytes)?;
    let mut ids = tokenizer.encode_while(text, *special, keep_on)?;
    if let Some(prefix) = prefix {
        let more = tokenizer.encode_while(prefix, true, keep_on)?;
        let begin = template.special_tokens().get("bos_token").and_then(Value::as_str);
        let begin = begin.map(|token| tokenizer.encode(token)).transpose()?;
        let begins = begin.is_some_and(|begin| begin.len() == 1 && more.first() == begin.first());
        ids.extend_from_slice(&more[usize::from(begins)..]);
    }
    Ok(ids)
}

/// Returns the token ids of the body of a chat or completion, which is parsed like a request.
///
/// # Errors
/// The errors of [`Prompt::read`] and [`prompt_ids`].
pub fn chat_body_ids(
    preparation: &'static Preparation,
    body: &Value,
    tokenizer: &PromptEncoder,
    template: Option<&ChatTemplate>,
    limits: Limits,
) -> Result<Vec<u32>, TextError> {
    if let Ok(Some(chat)) = PlainChat::read(&body.to_string()) {
        return chat_ids_while(&chat, preparation, tokenizer, template, limits, &mut || true);
    }
    let route = if body.get("prompt").is_some() { Route::Completions } else { Route::Chat };
    let prompt = Prompt::read(preparation, route, body)?;
    Ok(prompt_ids(&prompt, tokenizer, template, limits)?.concat())
}

fn check(field: &'static str, found: usize, unit: &'static str, limit: usize) -> Result<(), TextError> {
    if found > limit { Err(TextError::TooLarge { field, found, unit, limit }) } else { Ok(()) }
}
