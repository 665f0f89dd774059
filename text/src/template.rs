//! Chat templates, rendered as Hugging Face and the engines render them.

use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::value::{Kwargs, Value as Jinja};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use serde_json::{Map, Value};

use crate::encoder::{one_line, read_limited};
use crate::own_template::{OwnTemplate, probes};
use crate::{PlainChat, TextError};

/// The largest `tokenizer_config.json` or template file taken, in bytes.
const FILE_LIMIT_BYTES: u64 = 32 << 20;
const NAME: &str = "chat_template";
const TOOL_NAME: &str = "tool_use";
/// Tokens that templates refer to by these names.
const SPECIAL_TOKENS: [&str; 6] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"];

/// A parsed chat template with the special tokens that it may write.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Map<String, Value>,
    /// Why not, in a few words, where the library renders everything.
    own: Result<OwnTemplate, String>,
    left_to_library: AtomicU64,
}

/// The renderer of plain chats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renderer<'a> {
    /// This crate: it equalled the template library on the probes when the template was loaded.
    Own,
    /// The template library, several times slower.
    Library {
        /// Why not this crate.
        reason: &'a str,
    },
}

impl ChatTemplate {
    /// Reads `chat_template` and the special tokens from a `tokenizer_config.json`; without the field, a
    /// `chat_template.jinja` beside it is taken. [`TextError::NoTemplate`] if there is neither.
    ///
    /// # Errors
    /// `TextError`: no file, no template, or one that does not parse.
    pub fn from_config_file(path: &Path) -> Result<Self, TextError> {
        let bytes = read_limited(path, FILE_LIMIT_BYTES)?;
        let config: Value =
            serde_json::from_slice(&bytes).map_err(|error| unusable(format!("{}: {error}", path.display())))?;
        let beside = path.with_file_name("chat_template.jinja");
        let template = match config.get("chat_template") {
            None | Some(Value::Null) if beside.exists() => {
                let bytes = read_limited(&beside, FILE_LIMIT_BYTES)?;
                let text = String::from_utf8(bytes);
                Value::String(text.map_err(|_| unusable(format!("{} is not UTF-8", beside.display())))?)
            }
            None | Some(Value::Null) => return Err(TextError::NoTemplate),
            Some(template) => template.clone(),
        };
        Self::from_parts(&template, &config)
    }

    /// A template from its source, without special tokens.
    ///
    /// # Errors
    /// `TextError::TemplateSyntax` where the template does not parse.
    pub fn from_source(source: &str) -> Result<Self, TextError> {
        Self::from_parts(&Value::String(source.to_owned()), &Value::Null)
    }

    /// `template` is a string or a list of `{name, template}`; "default" is used, and "tool_use" when there are tools.
    fn from_parts(template: &Value, config: &Value) -> Result<Self, TextError> {
        let mut chat = Self {
            environment: environment(),
            special_tokens: special_tokens(config),
            own: Err("not tried yet".to_owned()),
            left_to_library: AtomicU64::new(0),
        };
        match template {
            Value::String(source) => chat.add(NAME, source)?,
            Value::Array(named) => {
                for entry in named {
                    match (entry.get("name").and_then(Value::as_str), entry.get("template").and_then(Value::as_str)) {
                        (Some("default"), Some(source)) => chat.add(NAME, source)?,
                        (Some(TOOL_NAME), Some(source)) => chat.add(TOOL_NAME, source)?,
                        _ => {}
                    }
                }
            }
            _ => return Err(unusable("chat_template is neither a string nor a list".into())),
        }
        if chat.environment.get_template(NAME).is_err() {
            return Err(unusable("chat_template has no entry named default".into()));
        }
        chat.own = chat.try_own();
        Ok(chat)
    }

    /// The template for plain chats, if it gives what the library gives.
    fn try_own(&self) -> Result<OwnTemplate, String> {
        let template = self.environment.get_template(NAME).map_err(|error| error.to_string())?;
        let own = OwnTemplate::new(template.source(), &self.environment, &self.special_tokens)?;
        let mut equal = 0;
        for chat in probes(&own.texts) {
            let Some(text) = own.render(&chat) else { continue };
            if !self.render_by_library(&chat).is_ok_and(|expected| expected == text) {
                return Err("the library renders a probe differently".to_owned());
            }
            equal += 1;
        }
        if equal == 0 { Err("no probe could be rendered without the library".to_owned()) } else { Ok(own) }
    }

    /// The renderer of plain chats.
    pub fn renderer(&self) -> Renderer<'_> {
        match &self.own {
            Ok(_) => Renderer::Own,
            Err(reason) => Renderer::Library { reason },
        }
    }

    /// Plain chats so far that the library rendered, as they came to a part of the template that only it knows.
    pub fn left_to_library(&self) -> u64 {
        self.left_to_library.load(Ordering::Relaxed)
    }

    fn add(&mut self, name: &'static str, source: &str) -> Result<(), TextError> {
        self.environment
            .add_template_owned(name, source.to_owned())
            .map_err(|error| TextError::TemplateSyntax { reason: one_line(&error.to_string()) })
    }

    /// Renders OpenAI-style `messages` (a list), ready to be encoded. Content that is a list of parts is reduced to its
    /// text parts, joined by a space as SGLang does for templates that take strings.
    ///
    /// # Errors
    /// `TextError`: messages of another form, or that the template rejects.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        self.render_with(messages, tools, add_generation_prompt, &Map::new())
    }

    /// As [`Self::render`], with further variables for the template (`chat_template_kwargs` of a request).
    ///
    /// # Errors
    /// As `Self::render`.
    pub fn render_with(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let tools =
            tools.filter(|tools| !matches!(tools, Value::Null) && tools.as_array().is_none_or(|list| !list.is_empty()));
        let mut context = self.special_tokens.clone();
        context.extend(variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        context.insert("messages".into(), normalise(messages)?);
        context.insert("tools".into(), tools.cloned().unwrap_or(Value::Null));
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        let name = if tools.is_some() && self.environment.get_template(TOOL_NAME).is_ok() { TOOL_NAME } else { NAME };
        self.render_from(name, Jinja::from_serialize(&context))
    }

    /// The output of [`Self::render`] for the same messages, without tools, and with the assistant's turn opened.
    ///
    /// # Errors
    /// When the template refuses the messages.
    pub fn render_plain(&self, chat: &PlainChat<'_>) -> Result<String, TextError> {
        if let Ok(own) = &self.own {
            if let Some(text) = own.render(chat) {
                return Ok(text);
            }
            self.left_to_library.fetch_add(1, Ordering::Relaxed);
        }
        self.render_by_library(chat)
    }

    fn render_by_library(&self, chat: &PlainChat<'_>) -> Result<String, TextError> {
        let context =
            PlainContext { special: &self.special_tokens, messages: chat, tools: None, add_generation_prompt: true };
        self.render_from(NAME, Jinja::from_serialize(context))
    }

    fn render_from(&self, name: &str, context: Jinja) -> Result<String, TextError> {
        self.environment
            .get_template(name)
            .and_then(|template| template.render(context))
            .map_err(|error| TextError::TemplateRender { reason: one_line(&root_cause(&error)) })
    }
}

#[cfg(test)]
mod tests;

fn unusable(reason: String) -> TextError {
    TextError::TemplateConfig { reason }
}

/// A [`PlainChat`] as a template's context.
#[derive(Serialize)]
struct PlainContext<'a> {
    #[serde(flatten)]
    special: &'a Map<String, Value>,
    messages: &'a PlainChat<'a>,
    tools: Option<()>,
    add_generation_prompt: bool,
}

/// The message of the error itself, without minijinja's source excerpt.
fn root_cause(error: &Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{detail} (template line {line})"),
        None => detail,
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<Jinja, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment
}

fn special_tokens(config: &Value) -> Map<String, Value> {
    let content = |name| match config.get(name)? {
        Value::String(token) => Some(token.clone()),
        Value::Object(token) => token.get("content")?.as_str().map(str::to_owned),
        _ => None,
    };
    SPECIAL_TOKENS.iter().filter_map(|name| Some(((*name).to_owned(), Value::String(content(name)?)))).collect()
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

/// Python's `json.dumps(ensure_ascii=False)`: ", " and ": " between items unless indented, nothing escaped for HTML.
fn to_json(value: &Jinja, options: Kwargs) -> Result<String, Error> {
    let failed = |error: serde_json::Error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}"));
    let indent: Option<usize> = options.get("indent")?;
    let value = serde_json::to_value(value).map_err(failed)?;
    let mut out = Vec::new();
    match indent {
        Some(width) => {
            let spaces = " ".repeat(width.min(16));
            let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, pretty))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, PythonFormatter)),
    }
    .map_err(failed)?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// Python's separators.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.begin_array_value(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
