//! Prepares a complete chat for its template.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::{ChatOptions, Contents, Effort, Ending, Options, Preparation, messages, tools};
use crate::TextError;
use crate::error::field;
use crate::jinja::Traits;

/// A chat as passed to its template.
#[derive(Debug, PartialEq)]
pub(crate) struct Prepared {
    pub(crate) messages: Value,
    pub(crate) tools: Value,
    pub(crate) documents: Value,
    pub(crate) add_generation_prompt: bool,
    pub(crate) variables: Map<String, Value>,
    /// Whether the last message is to be continued, as in Transformers.
    pub(crate) continues: bool,
    /// A text whose ids are appended to the prompt.
    pub(crate) prefix: Option<String>,
    /// Whether the tokenizer adds special tokens around the prompt.
    pub(crate) special: bool,
}

/// Returns the request's own template, if it has one.
pub(crate) fn template<'b>(
    preparation: &Preparation,
    body: &'b Map<String, Value>,
    options: &ChatOptions,
) -> Result<Option<&'b str>, TextError> {
    let place = match preparation.options {
        Options::Own => None,
        Options::Vllm => body.get("chat_template"),
        Options::Sglang => body.get("chat_template_kwargs").and_then(|variables| variables.get("chat_template")),
    };
    let given = place.and_then(Value::as_str);
    if given.is_some() && !options.trusts_templates {
        return refused("the request has a chat template, which the engine does not trust");
    }
    Ok(given)
}

impl Preparation {
    /// Returns whether no special tokens are added to a completion's text.
    pub(crate) fn is_bare(&self, body: &Value) -> bool {
        let special = body.as_object().map(|body| flag(body, "add_special_tokens", true));
        self.options == Options::Vllm && matches!(special, Some(Ok(false)))
    }
}

fn refused<T>(reason: &str) -> Result<T, TextError> {
    Err(TextError::TemplateRender { reason: reason.to_owned() })
}

/// Returns whether the chat has tools, which affects the choice of template.
pub(crate) fn has_tools(preparation: &Preparation, body: &Map<String, Value>, options: &ChatOptions) -> bool {
    !chosen_tools(preparation, body, options).is_null()
}

pub(crate) fn prepare(
    preparation: &Preparation,
    body: &Map<String, Value>,
    traits: &Traits,
    options: &ChatOptions,
) -> Result<Prepared, TextError> {
    let looped = match preparation.contents {
        Contents::Texts => false,
        Contents::AllLists => options.lists.unwrap_or(traits.loops_vllm),
        Contents::GivenLists => options.lists.unwrap_or(traits.loops_sglang),
    };
    let list = body.get("messages").unwrap_or(&Value::Null);
    let mut messages = messages::messages(preparation, list, traits, looped)?;
    let flag = |name: &str, default: bool| flag(body, name, default);
    let is_vllm = preparation.options == Options::Vllm;
    let add_generation_prompt = match preparation.options {
        Options::Sglang => true,
        Options::Own | Options::Vllm => flag("add_generation_prompt", true)?,
    };
    let continues = preparation.options != Options::Own && flag("continue_final_message", false)?;
    if continues && is_vllm && add_generation_prompt {
        return refused("continue_final_message and add_generation_prompt cannot both be true");
    }
    let prefix = if preparation.ending == Ending::Sglang { end(&mut messages, continues) } else { None };
    let mut variables = variables(preparation, body, traits, options);
    // `documents` and the names below are arguments of `apply_chat_template` itself.
    let documents = variables.shift_remove("documents").unwrap_or_default();
    let documents = body.get("documents").filter(|given| is_vllm && !given.is_null()).cloned().unwrap_or(documents);
    for name in ["messages", "tools", "add_generation_prompt", "continue_final_message"] {
        variables.shift_remove(name);
    }
    Ok(Prepared {
        messages: Value::Array(messages),
        tools: tools::tools(preparation.tools, chosen_tools(preparation, body, options)),
        documents,
        add_generation_prompt,
        variables,
        continues: continues && preparation.ending == Ending::Given,
        prefix,
        special: is_vllm && flag("add_special_tokens", false)?,
    })
}

/// Parses a boolean like pydantic.
pub(super) fn flag(body: &Map<String, Value>, name: &str, default: bool) -> Result<bool, TextError> {
    let value = match body.get(name) {
        None | Some(Value::Null) => return Ok(default),
        Some(value) => value,
    };
    let word = match value {
        Value::Bool(flag) => return Ok(*flag),
        Value::Number(number) => Cow::Owned(number.to_string()),
        Value::String(word) => Cow::Borrowed(word.as_str()),
        _ => Cow::Borrowed(""),
    };
    match word.to_lowercase().as_str() {
        "1" | "1.0" | "true" | "t" | "yes" | "y" | "on" => Ok(true),
        "0" | "0.0" | "false" | "f" | "no" | "n" | "off" => Ok(false),
        _ => Err(field(name, "a boolean", value)),
    }
}

/// Applies SGLang's handling of a final assistant message, which becomes a user message or the text to continue.
fn end(messages: &mut Vec<Value>, continues: bool) -> Option<String> {
    let last = messages.last_mut().filter(|last| last["role"] == "assistant")?;
    let text = last["content"].as_str()?.to_owned();
    if continues {
        messages.pop();
        return Some(text);
    }
    *last = serde_json::json!({"role": "user", "content": text});
    None
}

fn chosen_tools<'b>(preparation: &Preparation, body: &'b Map<String, Value>, options: &ChatOptions) -> Cow<'b, Value> {
    let (tools, choice) = (body.get("tools").unwrap_or(&Value::Null), body.get("tool_choice"));
    let Some(list) = tools.as_array() else { return Cow::Borrowed(tools) };
    let none = choice.is_some_and(|choice| choice == "none");
    if list.is_empty() || none && (preparation.tool_choice || options.no_tools_for_none) {
        return Cow::Owned(Value::Null);
    }
    match choice.and_then(|choice| choice.pointer("/function/name")) {
        Some(name) if preparation.tool_choice => {
            let named: Vec<Value> =
                list.iter().filter(|tool| tool.pointer("/function/name") == Some(name)).cloned().collect();
            Cow::Owned(if named.is_empty() { Value::Null } else { Value::Array(named) })
        }
        _ => Cow::Borrowed(tools),
    }
}

fn variables(
    preparation: &Preparation,
    body: &Map<String, Value>,
    traits: &Traits,
    options: &ChatOptions,
) -> Map<String, Value> {
    let given = body.get("chat_template_kwargs").and_then(Value::as_object).cloned().unwrap_or_default();
    let with = |first: Map<String, Value>, second: Map<String, Value>| -> Map<String, Value> {
        first.into_iter().chain(second).collect()
    };
    let effort = body.get("reasoning_effort").filter(|effort| !effort.is_null());
    match preparation.effort {
        Effort::Ignored => with(options.variables.clone(), given),
        Effort::Vllm => {
            let mut set = given;
            if let Some(effort) = effort {
                set.entry("enable_thinking").or_insert_with(|| (effort != "none").into());
                set.insert("reasoning_effort".into(), effort.clone());
            }
            set.retain(|_, value| !value.is_null() && value != "auto");
            with(options.variables.clone(), set)
        }
        Effort::Sglang => sglang(given, effort, body.get("reasoning"), traits, options),
    }
}

fn sglang(
    mut given: Map<String, Value>,
    effort: Option<&Value>,
    reasoning: Option<&Value>,
    traits: &Traits,
    options: &ChatOptions,
) -> Map<String, Value> {
    let reasoning = reasoning.and_then(Value::as_object);
    let of = |name: &str| reasoning?.get(name).filter(|value| !value.is_null());
    let mut effort = of("effort").or_else(|| of("reasoning_effort")).or(effort).map(number);
    let enabled = of("enabled").or_else(|| of("enable")).is_some_and(|enabled| match enabled {
        Value::String(word) => ["1", "true", "yes", "y", "on"].contains(&word.trim().to_lowercase().as_str()),
        Value::Number(number) => number.as_f64() != Some(0.0),
        enabled => enabled == true,
    });
    let thinking = effort.as_ref().map_or(enabled.then_some(true), |effort| Some(effort != "none"));
    if let Some(thinking) = thinking {
        for name in ["thinking", "enable_thinking"] {
            given.entry(name).or_insert_with(|| thinking.into());
        }
    }
    for (name, value) in &options.variables {
        given.entry(name.as_str()).or_insert_with(|| value.clone());
    }
    if !options.variables.is_empty() && effort.is_none() {
        effort = given.get("reasoning_effort").filter(|effort| !effort.is_null()).cloned();
    }
    if traits.has_low_effort && effort.as_ref().is_some_and(|effort| effort == "low") {
        given.entry("low_effort").or_insert_with(|| true.into());
    }
    if let Some(effort) = effort {
        given.entry("reasoning_effort").or_insert(effort);
    }
    given
}

/// Converts numbers to floats, including numbers in strings.
fn number(effort: &Value) -> Value {
    let number = effort.as_f64().or_else(|| effort.as_str()?.parse().ok().filter(|number: &f64| number.is_finite()));
    number.map_or_else(|| effort.clone(), Value::from)
}
