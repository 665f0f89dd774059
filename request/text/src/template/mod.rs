//! Chat templates: finds the templates of a model, and renders chats like Transformers and the engines.

mod engine;

use std::path::Path;

use serde_json::{Map, Value};

use crate::encoder::{one_line, read_limited};
use crate::jinja::{Budget, Failure, Input, List, Template, Traits, Value as Jinja};
use crate::preparation::ChatOptions;
use crate::{PlainChat, TextError};

pub(crate) use engine::Rendered;

/// Maximum size of a `tokenizer_config.json` or template file, in bytes.
const FILE_LIMIT_BYTES: u64 = 32 << 20;
const TOOL_NAME: &str = "tool_use";
/// Names of the template variables for special tokens.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];
const MORE_TOKENS: [&str; 2] = ["extra_special_tokens", "model_specific_special_tokens"];

/// The clock that `strftime_now` reads, in Unix seconds.
pub type Clock = fn() -> i64;

/// A parsed chat template with the special tokens that it may use.
#[derive(Debug)]
pub struct ChatTemplate {
    default: Parsed,
    /// Used instead of the default if there are tools.
    tool_use: Option<Parsed>,
    /// The first of several templates, if it is not the default.
    first: Option<Parsed>,
    special_tokens: Map<String, Value>,
    clock: Clock,
    zone_seconds: i32,
    options: ChatOptions,
}

/// A template, and the properties that engines detect in it.
#[derive(Debug)]
struct Parsed {
    template: Template,
    traits: Traits,
}

impl Parsed {
    fn new(source: &str) -> Result<Self, TextError> {
        let template = Template::parse(source).map_err(|reason| TextError::TemplateSyntax { reason })?;
        let traits = template.traits();
        Ok(Self { template, traits })
    }
}

/// The variables of a template other than the messages.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The tools; an empty list counts as none.
    pub tools: Option<&'a Value>,
    /// Whether to add a generation prompt for the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs` of a request).
    pub variables: Option<&'a Map<String, Value>>,
}

impl Default for Given<'_> {
    /// Returns options that only add the generation prompt for the assistant's turn.
    fn default() -> Self {
        Self { tools: None, add_generation_prompt: true, variables: None }
    }
}

impl ChatTemplate {
    /// Finds the template in a model's directory, given any file in it: `chat_template.jinja` with the templates in
    /// `additional_chat_templates`, else `chat_template.json`, else the field in `tokenizer_config.json`, which also
    /// has the special tokens. [`TextError::NoTemplate`] if there is none.
    ///
    /// # Errors
    /// [`TextError`] if a file cannot be read, or a template has a syntax error.
    pub fn beside(file: &Path, clock: Clock) -> Result<Self, TextError> {
        let config = config_beside(file)?;
        let (jinja, json) = (file.with_file_name("chat_template.jinja"), file.with_file_name("chat_template.json"));
        let more = more_templates(file)?;
        let template = if jinja.exists() && more.is_empty() {
            Value::String(read_text(&jinja)?)
        } else if !more.is_empty() {
            let default = if jinja.exists() { Some(named("default", read_text(&jinja)?)) } else { None };
            default.into_iter().chain(more).collect()
        } else if json.exists() {
            template_of(read_json(&json)?)
        } else {
            template_of(config.clone())
        };
        Self::from_parts(&template, &config, clock)
    }

    /// Loads a given template: either a `.json` file with its own special tokens, or a source file, combined with the
    /// special tokens of the `tokenizer_config.json` next to `tokenizer`.
    ///
    /// # Errors
    /// The errors of [`ChatTemplate::beside`].
    pub fn from_file(template: &Path, tokenizer: &Path, clock: Clock) -> Result<Self, TextError> {
        if template.extension().is_some_and(|extension| extension == "json") {
            let config = read_json(template)?;
            return Self::from_parts(&template_of(config.clone()), &config, clock);
        }
        Self::from_parts(&Value::String(read_text(template)?), &config_beside(tokenizer)?, clock)
    }

    /// Parses a template's source, with these special tokens (as in a `tokenizer_config.json`).
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] if the template has a syntax error.
    pub fn from_source(source: &str, config: &Value, clock: Clock) -> Result<Self, TextError> {
        Self::from_parts(&Value::String(source.to_owned()), config, clock)
    }

    /// Creates a template from `template`, which is a string or a list of `{name, template}`. From a list, uses
    /// "default", or "tool_use" if there are tools.
    fn from_parts(template: &Value, config: &Value, clock: Clock) -> Result<Self, TextError> {
        let (mut default, mut tool_use, mut first) = (None, None, None);
        match template {
            Value::Null => return Err(TextError::NoTemplate),
            Value::String(source) => default = Some(Parsed::new(source)?),
            Value::Array(named) => {
                for (at, entry) in named.iter().enumerate() {
                    let (name, source) = (entry["name"].as_str(), entry["template"].as_str());
                    let Some(source) = source else { continue };
                    match name {
                        Some("default") => default = Some(Parsed::new(source)?),
                        Some(TOOL_NAME) => tool_use = Some(Parsed::new(source)?),
                        _ => {}
                    }
                    if at == 0 && name != Some("default") {
                        first = Some(Parsed::new(source)?);
                    }
                }
            }
            _ => return Err(unusable("chat_template is neither a string nor a list".into())),
        }
        let Some(default) = default else { return Err(unusable("chat_template has no entry named default".into())) };
        let (special_tokens, options) = (special_tokens(config), ChatOptions::default());
        Ok(Self { default, tool_use, first, special_tokens, clock, zone_seconds: 0, options })
    }

    /// Sets the options of the engine that renders the template.
    #[must_use]
    pub fn with_options(self, options: ChatOptions) -> Self {
        Self { options, ..self }
    }

    /// Sets the engine's offset from UTC, in seconds.
    #[must_use]
    pub fn in_zone(self, zone_seconds: i32) -> Self {
        Self { zone_seconds, ..self }
    }

    /// Returns the tags, filters, tests, methods and functions that the template uses, sorted and without duplicates.
    pub fn features(&self) -> Vec<String> {
        let all = [Some(&self.default), self.tool_use.as_ref()].into_iter().flatten();
        let features: std::collections::BTreeSet<String> = all.flat_map(|one| one.template.features()).collect();
        features.into_iter().collect()
    }

    /// Returns whether the output depends on the date.
    pub fn writes_date(&self) -> bool {
        self.features().iter().any(|feature| feature.contains("strftime_now"))
    }

    /// Returns the variables that contain special tokens.
    pub fn special_tokens(&self) -> &Map<String, Value> {
        &self.special_tokens
    }

    fn parsed(&self, with_tools: bool) -> &Parsed {
        self.tool_use.as_ref().filter(|_| with_tools).unwrap_or(&self.default)
    }

    /// Renders OpenAI-style `messages` (a list) like semmoe's worker, ready to be encoded. If content is a list of
    /// parts, only its text parts are rendered, joined by a space.
    ///
    /// # Errors
    /// [`TextError`] if the messages have another form, the template rejects them, or rendering exceeds `budget`.
    pub fn render(&self, messages: &Value, given: Given<'_>, budget: Budget) -> Result<String, TextError> {
        let prepared = crate::preparation::own_messages(messages)?;
        self.render_as_given(&prepared, given, budget)
    }

    /// Renders `messages` like Transformers' `apply_chat_template`, without an engine's preparation.
    ///
    /// # Errors
    /// The errors of [`ChatTemplate::render`].
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
        self.parsed(tools.is_some()).template.render(&input, budget).map_err(failed)
    }

    /// Renders a plain chat with the same result as [`Self::render`], without tools and with a generation prompt for
    /// the assistant's turn.
    ///
    /// # Errors
    /// If the template rejects the messages.
    pub fn render_plain(&self, chat: &PlainChat<'_>, budget: Budget) -> Result<String, TextError> {
        let input = Input {
            messages: Jinja::List(List::messages(&chat.messages)),
            tools: Jinja::None,
            documents: Jinja::None,
            add_generation_prompt: Jinja::Bool(true),
            variables: Some(&self.options.variables),
            special: &self.special_tokens,
            clock: self.clock,
            zone_seconds: self.zone_seconds,
        };
        self.default.template.render(&input, budget).map_err(failed)
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

/// The settings of a tokenizer; null if it has none. Older ones keep their special tokens in a separate file.
fn config_beside(file: &Path) -> Result<Value, TextError> {
    let config = file.with_file_name("tokenizer_config.json");
    let mut config = if config.exists() { read_json(&config)? } else { Value::Null };
    let tokens = file.with_file_name("special_tokens_map.json");
    if config.get("added_tokens_decoder").is_none() && tokens.exists() {
        let config = config.as_object_mut().map(std::mem::take).unwrap_or_default();
        let tokens = read_json(&tokens)?.as_object_mut().map(std::mem::take).unwrap_or_default();
        return Ok(Value::Object(config.into_iter().chain(tokens).collect()));
    }
    Ok(config)
}

fn named(name: &str, template: String) -> Value {
    serde_json::json!({"name": name, "template": template})
}

/// The templates in the directory of additional ones, by name.
fn more_templates(file: &Path) -> Result<Vec<Value>, TextError> {
    let folder = file.with_file_name("additional_chat_templates");
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let unread = |source| TextError::Read { path: folder.clone(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(unread)? {
        let path = entry.map_err(unread)?.path();
        if path.extension().is_some_and(|extension| extension == "jinja") {
            paths.push(path);
        }
    }
    paths.sort();
    let name = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    paths.iter().map(|path| Ok(named(&name(path), read_text(path)?))).collect()
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

/// Special tokens by name: the usual ones, any others with that suffix, and those that the model adds.
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
