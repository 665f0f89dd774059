//! Prepares messages for the template.

use serde_json::{Map, Value, json};

use super::contents::{content, texts};
use super::{Arguments, Fields, Preparation, tools};
use crate::TextError;
use crate::error::field;
use crate::jinja::Traits;

type Message = Map<String, Value>;

/// Members of a message that SGLang passes to the template after the role, in its order. For user messages it passes
/// only role and content.
const SGLANG: [&str; 8] =
    ["tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix", "content"];

/// Prepares the messages of a chat; `lists` is whether the template receives lists of parts.
pub(super) fn messages(
    preparation: &Preparation,
    messages: &Value,
    traits: &Traits,
    lists: bool,
) -> Result<Vec<Value>, TextError> {
    let list = messages.as_array().ok_or_else(|| field("messages", "a list of messages", messages))?;
    let prepare = |(index, message)| one(preparation, index, message, lists);
    let mut prepared = list.iter().enumerate().map(prepare).collect::<Result<Vec<_>, _>>()?;
    let has_developer = || list.iter().any(|message| message["role"] == "developer");
    if preparation.developer_is_system && !traits.names_developer && has_developer() {
        prepared = with_one_system(prepared);
    }
    Ok(prepared.into_iter().map(Value::Object).collect())
}

fn one(preparation: &Preparation, index: usize, message: &Value, lists: bool) -> Result<Message, TextError> {
    let Value::Object(message) = message else {
        return Err(field(&format!("messages[{index}]"), "an object", message));
    };
    let Some(role) = message.get("role").and_then(Value::as_str) else {
        let found = message.get("role").unwrap_or(&Value::Null);
        return Err(field(&format!("messages[{index}].role"), "a string", found));
    };
    let cut = preparation.cut_line.filter(|_| role == "system");
    let shown = cut.and_then(|cut| without_line(message.get("content")?, cut));
    let content = content(preparation, shown.as_ref().or(message.get("content")), lists, index)?;
    let mut prepared = match preparation.fields {
        Fields::Given => {
            let mut all = message.clone();
            all.insert("content".into(), content);
            all
        }
        Fields::Vllm => vllm(message, role, content),
        Fields::Sglang => sglang(message, role, content),
    };
    arguments(preparation.arguments, role, &mut prepared, index)?;
    Ok(prepared)
}

fn vllm(message: &Message, role: &str, content: Value) -> Message {
    let mut prepared = Message::new();
    prepared.insert("role".into(), role.into());
    prepared.insert("content".into(), if role == "tool" { joined(content, "\n") } else { content });
    let given = |key: &str| message.get(key).filter(|value| !value.is_null());
    match role {
        "assistant" => {
            if let Some(Value::Array(calls)) = given("tool_calls")
                && !calls.is_empty()
            {
                let order = |call| with_function(call, &["id", "function", "type"], &["arguments", "name"]);
                prepared.insert("tool_calls".into(), calls.iter().map(order).collect());
            }
            if let Some(reasoning) = given("reasoning").or_else(|| given("reasoning_content")) {
                prepared.insert("reasoning".into(), reasoning.clone());
                prepared.insert("reasoning_content".into(), reasoning.clone());
            }
        }
        "tool" => {
            if let Some(id) = message.get("tool_call_id") {
                prepared.insert("tool_call_id".into(), id.clone());
            }
        }
        _ => {}
    }
    for key in ["name", "task"] {
        if let Some(text) = message.get(key).filter(|value| value.is_string()) {
            prepared.insert(key.into(), text.clone());
        }
    }
    if role == "developer" {
        let tools = message.get("tools").cloned().unwrap_or_default();
        let members = ["name", "description", "parameters", "strict"];
        let order = |tool| with_function(tool, &["function", "type"], &members);
        let tools = tools.as_array().map(|tools| tools.iter().map(order).collect()).unwrap_or(Value::Null);
        prepared.insert("tools".into(), tools);
    }
    prepared
}

/// Reorders a tool or a tool call, and its function, so that these members come first.
fn with_function(tool: &Value, first: &[&str], first_of_function: &[&str]) -> Value {
    let mut tool = ordered(tool, first);
    if let Some(function) = tool.get_mut("function") {
        *function = ordered(function, first_of_function);
    }
    tool
}

/// Returns the content of a tool result; if all parts are text, they are joined.
fn joined(content: Value, separator: &str) -> Value {
    match &content {
        Value::Array(parts) if parts.iter().all(|part| part["type"] == "text") => {
            texts(&content).join(separator).into()
        }
        _ => content,
    }
}

/// Reorders an object so that these members come first.
fn ordered(object: &Value, first: &[&str]) -> Value {
    let Value::Object(object) = object else { return object.clone() };
    let mut ordered = Message::new();
    let rest = object.keys().map(String::as_str).filter(|key| !first.contains(key));
    for key in first.iter().copied().chain(rest) {
        if let Some(value) = object.get(key) {
            ordered.insert(key.into(), value.clone());
        }
    }
    Value::Object(ordered)
}

fn sglang(message: &Message, role: &str, content: Value) -> Message {
    let role = role.to_lowercase();
    let mut prepared = Message::new();
    let content = if role == "tool" { joined(content, " ") } else { content };
    let is_user = role == "user";
    prepared.insert("role".into(), role.into());
    // Content that is a list is moved after the other members.
    let is_list = message.get("content").is_some_and(Value::is_array) && content.is_array();
    if !is_list {
        prepared.insert("content".into(), content.clone());
    }
    for key in SGLANG.into_iter().filter(|_| !is_user) {
        let Some(value) = message.get(key).filter(|value| !value.is_null() && key != "content") else { continue };
        let value = match (key, value) {
            ("tool_calls", Value::Array(calls)) => calls.iter().map(sglang_call).collect(),
            ("tools", value) => tools::sglang(value),
            (_, value) => value.clone(),
        };
        prepared.insert(key.into(), value);
    }
    if is_list {
        prepared.insert("content".into(), content);
    }
    prepared
}

fn sglang_call(call: &Value) -> Value {
    let function = &call["function"];
    json!({
        "id": call["id"],
        "index": call["index"],
        "type": call.get("type").cloned().unwrap_or_else(|| "function".into()),
        "function": {"name": function["name"], "arguments": function["arguments"]},
    })
}

/// Parses the arguments of tool calls into objects.
fn arguments(rule: Arguments, role: &str, message: &mut Message, index: usize) -> Result<(), TextError> {
    let Some(Value::Array(calls)) = message.get_mut("tool_calls") else { return Ok(()) };
    if role != "assistant" && rule != Arguments::AnyJson {
        return Ok(());
    }
    for function in calls.iter_mut().filter_map(|call| call.get_mut("function")?.as_object_mut()) {
        let given = function.get("arguments");
        let parsed = given.and_then(Value::as_str).and_then(|text| serde_json::from_str::<Value>(text).ok());
        let object = parsed.clone().filter(Value::is_object);
        let arguments = match rule {
            Arguments::AnyJson => parsed,
            Arguments::ObjectOrEmpty if given.is_some_and(Value::is_object) => None,
            Arguments::ObjectOrEmpty => Some(object.unwrap_or_else(|| json!({}))),
            Arguments::Object if given.is_some_and(Value::is_string) && object.is_none() => {
                let reason = format!("messages[{index}] has a tool call whose arguments are not a JSON object");
                return Err(TextError::TemplateRender { reason });
            }
            Arguments::Object => object,
        };
        if let Some(arguments) = arguments {
            function.insert("arguments".into(), arguments);
        }
    }
    Ok(())
}

/// Returns the content without a first line that begins with `line`; `None` if there is no such line.
fn without_line(content: &Value, line: &str) -> Option<Value> {
    let cut =
        |text: &str| text.starts_with(line).then(|| text.split_once('\n').map_or("", |(_, rest)| rest).to_owned());
    match content {
        Value::String(text) => cut(text).map(|rest| if rest.is_empty() { json!([]) } else { rest.into() }),
        Value::Array(parts) => {
            let mut shown = Vec::new();
            for part in parts {
                let text = part.as_str().or_else(|| part["text"].as_str().filter(|_| part["type"] == "text"));
                match text.and_then(cut) {
                    None => shown.push(part.clone()),
                    Some(rest) if rest.is_empty() => {}
                    Some(rest) if part.is_string() => shown.push(rest.into()),
                    Some(rest) => {
                        let mut part = part.clone();
                        part["text"] = rest.into();
                        shown.push(part);
                    }
                }
            }
            Some(Value::Array(shown))
        }
        _ => None,
    }
}

/// Turns developer messages into system messages. If one appears later on, merges all of them into one at the
/// beginning.
fn with_one_system(messages: Vec<Message>) -> Vec<Message> {
    let is_system = |message: &Message| message["role"] == "system";
    let mut converted = messages;
    for message in converted.iter_mut().filter(|message| message["role"] == "developer") {
        message.insert("role".into(), "system".into());
        message.shift_remove("tools");
    }
    if !converted.iter().skip(1).any(is_system) {
        return converted;
    }
    let contents =
        converted.iter().filter(|message| is_system(message)).map(|message| texts(&message["content"]).join("\n"));
    let merged = contents.filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n\n");
    let mut all = vec![Message::new()];
    all[0].insert("role".into(), "system".into());
    all[0].insert("content".into(), merged.into());
    all.extend(converted.into_iter().filter(|message| !is_system(message)));
    all
}
