//! Chat templates: where a model has them, and a chat rendered as Transformers and the engines render it.

use std::path::Path;

use serde_json::{Map, Value};

use crate::encoder::{one_line, read_limited};
use crate::jinja::{Budget, Failure, Input, List, Template, Value as Jinja};
use crate::{PlainChat, TextError};

/// The largest `tokenizer_config.json` or template file taken, in bytes.
const FILE_LIMIT_BYTES: u64 = 32 << 20;
const TOOL_NAME: &str = "tool_use";
/// Tokens that templates refer to by these names, and where the others stand.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];
const MORE_TOKENS: [&str; 2] = ["extra_special_tokens", "model_specific_special_tokens"];

/// The clock that `strftime_now` reads, in seconds since 1970.
pub type Clock = fn() -> i64;

/// A parsed chat template with the special tokens that it may write.
#[derive(Debug)]
pub struct ChatTemplate {
    default: Template,
    /// Takes the place of the other one where there are tools.
    tool_use: Option<Template>,
    special_tokens: Map<String, Value>,
    clock: Clock,
    zone_seconds: i32,
}

/// The variables of a template beside the messages.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The tools; an empty list is as none.
    pub tools: Option<&'a Value>,
    /// Whether the assistant's turn is opened.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs` of a request).
    pub variables: Option<&'a Map<String, Value>>,
}

impl Default for Given<'_> {
    /// Nothing, and the assistant's turn is opened.
    fn default() -> Self {
        Self { tools: None, add_generation_prompt: true, variables: None }
    }
}

impl ChatTemplate {
    /// The template of a model's folder, from any file in it: `chat_template.jinja`, else `chat_template.json`, else
    /// the field of `tokenizer_config.json`, which has the special tokens. [`TextError::NoTemplate`] if there is
    /// none.
    ///
    /// # Errors
    /// `TextError`: a file that cannot be read, or a template that does not parse.
    pub fn beside(file: &Path, clock: Clock) -> Result<Self, TextError> {
        let config = config_beside(file)?;
        let (jinja, json) = (file.with_file_name("chat_template.jinja"), file.with_file_name("chat_template.json"));
        let template = if jinja.exists() {
            Value::String(read_text(&jinja)?)
        } else if json.exists() {
            template_of(read_json(&json)?)
        } else {
            template_of(config.clone())
        };
        Self::from_parts(&template, &config, clock)
    }

    /// A template that was chosen: a `.json` file with its own special tokens, or a source, with those of the
    /// `tokenizer_config.json` beside `tokenizer`.
    ///
    /// # Errors
    /// As [`ChatTemplate::beside`].
    pub fn from_file(template: &Path, tokenizer: &Path, clock: Clock) -> Result<Self, TextError> {
        if template.extension().is_some_and(|extension| extension == "json") {
            let config = read_json(template)?;
            return Self::from_parts(&template_of(config.clone()), &config, clock);
        }
        Self::from_parts(&Value::String(read_text(template)?), &config_beside(tokenizer)?, clock)
    }

    /// A template from its source, with these special tokens (as in a `tokenizer_config.json`).
    ///
    /// # Errors
    /// `TextError::TemplateSyntax` where the template does not parse.
    pub fn from_source(source: &str, config: &Value, clock: Clock) -> Result<Self, TextError> {
        Self::from_parts(&Value::String(source.to_owned()), config, clock)
    }

    /// `template` is a string or a list of `{name, template}`; "default" is used, and "tool_use" when there are tools.
    fn from_parts(template: &Value, config: &Value, clock: Clock) -> Result<Self, TextError> {
        let parse = |source: &str| Template::parse(source).map_err(|reason| TextError::TemplateSyntax { reason });
        let (mut default, mut tool_use) = (None, None);
        match template {
            Value::Null => return Err(TextError::NoTemplate),
            Value::String(source) => default = Some(parse(source)?),
            Value::Array(named) => {
                for entry in named {
                    match (entry.get("name").and_then(Value::as_str), entry.get("template").and_then(Value::as_str)) {
                        (Some("default"), Some(source)) => default = Some(parse(source)?),
                        (Some(TOOL_NAME), Some(source)) => tool_use = Some(parse(source)?),
                        _ => {}
                    }
                }
            }
            _ => return Err(unusable("chat_template is neither a string nor a list".into())),
        }
        let Some(default) = default else { return Err(unusable("chat_template has no entry named default".into())) };
        Ok(Self { default, tool_use, special_tokens: special_tokens(config), clock, zone_seconds: 0 })
    }

    /// The same, where the engine's clock is so many seconds ahead of UTC.
    #[must_use]
    pub fn in_zone(self, zone_seconds: i32) -> Self {
        Self { zone_seconds, ..self }
    }

    /// Tags, filters, tests, methods and functions that it uses, each once, in order.
    pub fn features(&self) -> Vec<String> {
        let all = [Some(&self.default), self.tool_use.as_ref()].into_iter().flatten();
        let features: std::collections::BTreeSet<String> = all.flat_map(Template::features).collect();
        features.into_iter().collect()
    }

    /// Whether what it writes depends on the day.
    pub fn writes_date(&self) -> bool {
        self.features().iter().any(|feature| feature.contains("strftime_now"))
    }

    /// The template's text where there are tools, or where there are none.
    pub fn source(&self, with_tools: bool) -> &str {
        self.template(with_tools).source()
    }

    /// The variables that hold special tokens.
    pub fn special_tokens(&self) -> &Map<String, Value> {
        &self.special_tokens
    }

    fn template(&self, with_tools: bool) -> &Template {
        self.tool_use.as_ref().filter(|_| with_tools).unwrap_or(&self.default)
    }

    /// Renders OpenAI-style `messages` (a list), ready to be encoded. Content that is a list of parts is reduced to its
    /// text parts, joined by a space as SGLang does for templates that take strings.
    ///
    /// # Errors
    /// `TextError`: messages of another form, that the template rejects, or that take more than `budget` allows.
    pub fn render(&self, messages: &Value, given: Given<'_>, budget: Budget) -> Result<String, TextError> {
        self.render_as_given(&normalise(messages)?, given, budget)
    }

    /// Messages as [`ChatTemplate::render`] gives them to the template: after what engines do before.
    ///
    /// # Errors
    /// `TextError::Field`: messages of another form.
    pub fn prepared(messages: &Value) -> Result<Value, TextError> {
        normalise(messages)
    }

    /// Renders `messages` as `apply_chat_template` of Transformers does, without what an engine does before.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_as_given(&self, messages: &Value, given: Given<'_>, budget: Budget) -> Result<String, TextError> {
        let is_given = |tools: &&Value| !tools.is_null() && tools.as_array().is_none_or(|list| !list.is_empty());
        let tools = given.tools.filter(is_given);
        let input = Input {
            messages: Jinja::json(messages),
            tools: tools.map_or(Jinja::None, Jinja::json),
            documents: Jinja::None,
            add_generation_prompt: Jinja::Bool(given.add_generation_prompt),
            variables: given.variables,
            special: &self.special_tokens,
            clock: self.clock,
            zone_seconds: self.zone_seconds,
        };
        self.template(tools.is_some()).render(&input, budget).map_err(failed)
    }

    /// The output of [`Self::render`] for the same messages, without tools, and with the assistant's turn opened.
    ///
    /// # Errors
    /// When the template refuses the messages.
    pub fn render_plain(&self, chat: &PlainChat<'_>, budget: Budget) -> Result<String, TextError> {
        let input = Input {
            messages: Jinja::List(List::messages(&chat.messages)),
            tools: Jinja::None,
            documents: Jinja::None,
            add_generation_prompt: Jinja::Bool(true),
            variables: None,
            special: &self.special_tokens,
            clock: self.clock,
            zone_seconds: self.zone_seconds,
        };
        self.default.render(&input, budget).map_err(failed)
    }
}

#[cfg(test)]
mod tests;

fn failed(failure: Failure) -> TextError {
    match failure {
        Failure::Refused(reason) => TextError::TemplateRender { reason: one_line(&reason) },
        Failure::TooMuch { what, limit } => TextError::TemplateBudget { what, limit },
    }
}

fn unusable(reason: String) -> TextError {
    TextError::TemplateConfig { reason }
}

/// The settings of a tokenizer; null where it has none.
fn config_beside(file: &Path) -> Result<Value, TextError> {
    let config = file.with_file_name("tokenizer_config.json");
    if config.exists() { read_json(&config) } else { Ok(Value::Null) }
}

fn template_of(mut config: Value) -> Value {
    config.get_mut("chat_template").map(Value::take).unwrap_or_default()
}

fn read_json(path: &Path) -> Result<Value, TextError> {
    let bytes = read_limited(path, FILE_LIMIT_BYTES)?;
    serde_json::from_slice(&bytes).map_err(|error| unusable(format!("{}: {error}", path.display())))
}

fn read_text(path: &Path) -> Result<String, TextError> {
    let text = String::from_utf8(read_limited(path, FILE_LIMIT_BYTES)?);
    text.map_err(|_| unusable(format!("{} is not UTF-8", path.display())))
}

/// Special tokens by name: the usual ones, all others whose names end so, and those that the model adds.
fn special_tokens(config: &Value) -> Map<String, Value> {
    let content = |token: &Value| match token {
        Value::String(_) => Some(token.clone()),
        Value::Object(token) => token.get("content").filter(|content| content.is_string()).cloned(),
        _ => None,
    };
    let mut tokens = Map::new();
    let mut add = |object: &Map<String, Value>, all: bool| {
        for (name, token) in object {
            let is_token = all || SPECIAL_TOKENS.contains(&name.as_str()) || name.ends_with("_token");
            if let Some(content) = content(token).filter(|_| is_token) {
                tokens.insert(name.clone(), content);
            }
        }
    };
    if let Some(config) = config.as_object() {
        add(config, false);
        MORE_TOKENS.iter().filter_map(|name| config.get(*name)?.as_object()).for_each(|more| add(more, true));
    }
    tokens
}

/// Prepares messages as the engines do before a template sees them: parts become text, no content becomes an empty one,
/// and tool call arguments become objects where they are JSON.
fn normalise(messages: &Value) -> Result<Value, TextError> {
    let list = messages.as_array().ok_or_else(|| field("messages", "a list of messages", messages))?;
    list.iter().enumerate().map(|(index, message)| normalise_message(index, message)).collect()
}

fn normalise_message(index: usize, message: &Value) -> Result<Value, TextError> {
    let Value::Object(message) = message else {
        return Err(field(&format!("messages[{index}]"), "an object", message));
    };
    let mut message = message.clone();
    if !message.get("role").is_some_and(Value::is_string) {
        let found = message.get("role").unwrap_or(&Value::Null);
        return Err(field(&format!("messages[{index}].role"), "a string", found));
    }
    let content = match message.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| match part {
                Value::String(text) => Some(text.clone()),
                part => part.get("text").and_then(Value::as_str).map(str::to_owned),
            };
            parts.iter().filter_map(text).collect::<Vec<_>>().join(" ")
        }
        Some(other) => return Err(field(&format!("messages[{index}].content"), "a string or a list of parts", other)),
    };
    message.insert("content".into(), content.into());
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        for arguments in calls.iter_mut().filter_map(|call| call.get_mut("function")?.get_mut("arguments")) {
            if let Some(parsed) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()) {
                *arguments = parsed;
            }
        }
    }
    Ok(Value::Object(message))
}

/// A [`TextError::Field`] that names the JSON type found.
pub(crate) fn field(field: &str, expected: &'static str, found: &Value) -> TextError {
    let found = match found {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(items) if items.is_empty() => "an empty list",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    TextError::Field { field: field.to_owned(), expected, found: found.to_owned() }
}
