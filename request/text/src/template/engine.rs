//! Renders a chat in the same way as an engine.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::{ChatTemplate, Parsed, failed};
use crate::chat::PlainMessage;
use crate::jinja::{Budget, Input, Traits, Value as Jinja};
use crate::preparation::{self, Contents, Fields, Prepared};
use crate::{PlainChat, Preparation, TextError};

/// Maximum size in bytes of a template provided by a request.
const REQUEST_TEMPLATE_BYTES: usize = 256 << 10;
/// Tag that Transformers appends to a message that is to be continued.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A rendered chat.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rendered {
    pub(crate) text: String,
    /// A text whose ids are appended to those of the rendered text.
    pub(crate) prefix: Option<String>,
    /// Whether the tokenizer adds special tokens around the text.
    pub(crate) special: bool,
}

impl ChatTemplate {
    /// Renders the chat in a request body, given the fields that engines read before rendering.
    ///
    /// # Errors
    /// [`TextError`] if the engine or the template rejects the chat, or rendering exceeds `budget`.
    pub(crate) fn render_body(
        &self,
        preparation: &Preparation,
        body: &Map<String, Value>,
        budget: Budget,
    ) -> Result<Rendered, TextError> {
        let own = self.requested(preparation, body)?;
        let (parsed, mut prepared) = self.prepare(own.as_ref(), preparation, body)?;
        let continued = if prepared.continues { Some(mark(&mut prepared.messages, parsed)?) } else { None };
        let text = match self.render_prepared(parsed, &prepared, budget) {
            Err(TextError::TemplateRender { .. }) if preparation.tries_functions && !prepared.tools.is_null() => {
                prepared.tools = preparation::functions(&prepared.tools);
                self.render_prepared(parsed, &prepared, budget)?
            }
            rendered => rendered?,
        };
        let text = match continued {
            Some(last) => cut(text, &last)?,
            None => text,
        };
        Ok(Rendered { text, prefix: prepared.prefix, special: prepared.special })
    }

    /// Renders a plain chat.
    ///
    /// # Errors
    /// The errors of [`Self::render_body`].
    pub(crate) fn render_chat(
        &self,
        preparation: &Preparation,
        chat: &PlainChat<'_>,
        budget: Budget,
    ) -> Result<Rendered, TextError> {
        if !self.takes_plain(preparation, chat) {
            let body = Map::from_iter([("messages".to_owned(), json!(chat))]);
            return self.render_body(preparation, &body, budget);
        }
        let is_turned = |message: &PlainMessage<'_>| message.content_first;
        let text = if preparation.fields != Fields::Given && chat.messages.iter().any(is_turned) {
            let role_first = |PlainMessage { role, content, .. }: &PlainMessage<'_>| PlainMessage {
                role: Cow::Owned(role.clone().into_owned()),
                content: Cow::Owned(content.clone().into_owned()),
                content_first: false,
            };
            let chat = PlainChat { messages: chat.messages.iter().map(role_first).collect() };
            self.render_plain(&chat, budget)?
        } else {
            self.render_plain(chat, budget)?
        };
        Ok(Rendered { text, prefix: None, special: false })
    }

    /// Returns whether the engine passes the chat to its template unchanged.
    fn takes_plain(&self, preparation: &Preparation, chat: &PlainChat<'_>) -> bool {
        let traits = &self.default.traits;
        if !self.options.variables.is_empty()
            && (traits.has_low_effort || self.options.variables.contains_key("documents"))
        {
            return false;
        }
        match preparation.fields {
            Fields::Given => true,
            Fields::Vllm => {
                let is_cut = |message: &PlainMessage<'_>| {
                    preparation
                        .cut_line
                        .is_some_and(|line| message.role == "system" && message.content.starts_with(line))
                };
                !self.options.lists.unwrap_or(traits.loops_vllm)
                    && !chat.messages.iter().any(|message| message.role == "developer" || is_cut(message))
            }
            Fields::Sglang => {
                let is_lower = |message: &PlainMessage<'_>| !message.role.bytes().any(|byte| byte.is_ascii_uppercase());
                self.first.is_none()
                    && chat.messages.last().is_none_or(|last| last.role != "assistant")
                    && chat.messages.iter().all(is_lower)
            }
        }
    }

    /// Returns the template's source and variables for a body, to be rendered elsewhere.
    ///
    /// # Errors
    /// If the engine rejects the chat.
    pub fn prepared(&self, preparation: &Preparation, body: &Map<String, Value>) -> Result<Value, TextError> {
        let own = self.requested(preparation, body)?;
        let (parsed, prepared) = self.prepare(own.as_ref(), preparation, body)?;
        let mut variables = prepared.variables;
        if !prepared.documents.is_null() {
            variables.insert("documents".into(), prepared.documents);
        }
        Ok(json!({
            "template": parsed.template.source(),
            "special": self.special_tokens,
            "messages": prepared.messages,
            "tools": prepared.tools,
            "variables": variables,
            "add_generation_prompt": prepared.add_generation_prompt,
        }))
    }

    /// Returns the request's own template, if it has one.
    fn requested(&self, preparation: &Preparation, body: &Map<String, Value>) -> Result<Option<Parsed>, TextError> {
        let Some(source) = preparation::template(preparation, body, &self.options)? else { return Ok(None) };
        if source.len() > REQUEST_TEMPLATE_BYTES {
            let limit = REQUEST_TEMPLATE_BYTES as u64;
            return Err(TextError::TemplateBudget { what: "bytes for a template in a request", limit });
        }
        Parsed::new(source).map(Some)
    }

    /// Selects the template and prepares the chat for it.
    fn prepare<'t>(
        &'t self,
        own: Option<&'t Parsed>,
        preparation: &Preparation,
        body: &Map<String, Value>,
    ) -> Result<(&'t Parsed, Prepared), TextError> {
        let parsed = own.unwrap_or_else(|| self.chosen(preparation, body));
        let traits = self.traits(preparation, body, parsed);
        let prepared = preparation::prepare(preparation, body, &traits, &self.options)?;
        Ok((parsed, prepared))
    }

    fn chosen(&self, preparation: &Preparation, body: &Map<String, Value>) -> &Parsed {
        if preparation.first_template {
            return self.first.as_ref().unwrap_or(&self.default);
        }
        self.parsed(preparation::has_tools(preparation, body, &self.options))
    }

    /// Returns the traits of the template that the engine inspects. SGLang inspects its own template even if the
    /// request provides one.
    fn traits(&self, preparation: &Preparation, body: &Map<String, Value>, parsed: &Parsed) -> Traits {
        let own = preparation.contents == Contents::GivenLists;
        if own { self.chosen(preparation, body).traits } else { parsed.traits }
    }

    fn render_prepared(&self, parsed: &Parsed, prepared: &Prepared, budget: Budget) -> Result<String, TextError> {
        let input = Input {
            messages: Jinja::json(&prepared.messages),
            tools: Jinja::json(&prepared.tools),
            documents: Jinja::json(&prepared.documents),
            add_generation_prompt: Jinja::Bool(prepared.add_generation_prompt),
            variables: Some(&prepared.variables),
            special: &self.special_tokens,
            clock: self.clock,
            zone_seconds: self.zone_seconds,
        };
        parsed.template.render(&input, budget).map_err(failed)
    }
}

fn not_continued<T>(reason: &str) -> Result<T, TextError> {
    Err(TextError::TemplateRender { reason: format!("the last message cannot be continued: {reason}") })
}

/// Marks the end of the last message's text, and returns that text.
fn mark(messages: &mut Value, parsed: &Parsed) -> Result<String, TextError> {
    let last = messages.as_array_mut().and_then(|messages| messages.last_mut());
    if !parsed.template.source().contains("content") {
        return not_continued("the template does not use the content of messages");
    }
    let text = match last.and_then(|last| last.get_mut("content")) {
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
        content => content,
    };
    let Some(Value::String(text)) = text else { return not_continued("it has no text") };
    let before = text.clone();
    text.push_str(TAG);
    Ok(before)
}

/// Returns the prompt up to the mark.
fn cut(mut text: String, last: &str) -> Result<String, TextError> {
    let Some(at) = text.rfind(TAG.trim_end()).filter(|_| text.contains(trimmed(last))) else {
        return not_continued("the template omits parts of it");
    };
    let is_whole = text[at..].starts_with(TAG);
    text.truncate(at);
    if !is_whole {
        text.truncate(text.trim_end_matches(is_space).len());
    }
    Ok(text)
}

/// Like Python's `str.strip`.
fn trimmed(text: &str) -> &str {
    text.trim_matches(is_space)
}

fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}
