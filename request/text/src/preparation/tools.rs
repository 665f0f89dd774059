//! Prepares tools for the template.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::Tools;

pub(super) fn tools(rule: Tools, tools: Cow<'_, Value>) -> Value {
    match rule {
        Tools::Given => tools.into_owned(),
        Tools::Vllm => each(&tools, vllm_tool),
        Tools::Sglang => sglang(&tools),
    }
}

pub(super) fn sglang(tools: &Value) -> Value {
    each(tools, sglang_tool)
}

/// Returns the functions of tools, without their wrappers.
pub(crate) fn functions(tools: &Value) -> Value {
    each(tools, |tool| tool.get("function").unwrap_or(tool).clone())
}

fn each(tools: &Value, one: impl Fn(&Value) -> Value) -> Value {
    match tools {
        Value::Array(tools) => tools.iter().map(one).collect(),
        tools => tools.clone(),
    }
}

/// Returns a function's members by name, in this order; missing members are null if listed in `always`, otherwise
/// omitted.
fn members<'a>(from: &Value, names: impl Iterator<Item = &'a str>, always: &[&str]) -> Map<String, Value> {
    let mut members = Map::new();
    for name in names {
        let value = from.get(name).cloned().unwrap_or_default();
        if !value.is_null() || always.contains(&name) {
            members.insert(name.to_owned(), value);
        }
    }
    members
}

const MAY_BE_NULL: [&str; 3] = ["name", "description", "parameters"];

fn vllm_tool(tool: &Value) -> Value {
    let names = ["name", "description", "parameters", "strict", "defer_loading"];
    let mut function = members(&tool["function"], names.into_iter(), &MAY_BE_NULL);
    put(tool, function_of_defer(tool, &mut function), true)
}

fn sglang_tool(tool: &Value) -> Value {
    let known = ["description", "name", "parameters", "strict", "defer_loading"];
    let function = &tool["function"];
    let given = function.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
    let given: Vec<&str> = given.filter(|name| known.contains(name)).collect();
    let rest = known.into_iter().filter(|name| !given.contains(name));
    let mut members = members(function, given.iter().copied().chain(rest), &MAY_BE_NULL);
    put(tool, function_of_defer(tool, &mut members), false)
}

/// Copies a tool's `defer_loading` to its function, and returns the function.
fn function_of_defer(tool: &Value, function: &mut Map<String, Value>) -> Value {
    if let Some(defer) = tool.get("defer_loading").filter(|defer| !defer.is_null()) {
        function.entry("defer_loading").or_insert_with(|| defer.clone());
    }
    Value::Object(std::mem::take(function))
}

fn put(tool: &Value, function: Value, leaves_null_out: bool) -> Value {
    let mut put = Map::new();
    put.insert("type".into(), tool.get("type").cloned().unwrap_or_else(|| "function".into()));
    put.insert("function".into(), function);
    let defer = tool.get("defer_loading").cloned().unwrap_or_default();
    if !(leaves_null_out && defer.is_null()) {
        put.insert("defer_loading".into(), defer);
    }
    Value::Object(put)
}
