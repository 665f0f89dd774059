//! Chats as each engine's template gets them, by kind. `tests/engines/prompts.py` compares with real engines.

use serde_json::{Value, json};

use crate::{ChatOptions, ChatTemplate, Preparation};

const PLAIN: &str = "{{ messages[0].content }}";
const LOOPS: &str = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}";

const VLLM: (&str, Option<[u32; 3]>) = ("vllm", Some([0, 30, 0]));
const NEW_VLLM: (&str, Option<[u32; 3]>) = ("vllm", None);
const SGLANG: (&str, Option<[u32; 3]>) = ("sglang", Some([0, 5, 23]));
const OWN: (&str, Option<[u32; 3]>) = ("semmoe", None);

fn prepared(source: &str, (engine, version): (&str, Option<[u32; 3]>), body: Value, options: ChatOptions) -> Value {
    let template = ChatTemplate::from_source(source, &Value::Null, || 0).unwrap().with_options(options);
    let body = body.as_object().unwrap();
    template.prepared(Preparation::of(engine, version), body).unwrap_or_else(|error| json!(error.to_string()))
}

#[track_caller]
fn messages(source: &str, engine: (&str, Option<[u32; 3]>), given: Value, expected: Value) {
    let found = prepared(source, engine, json!({"messages": given}), ChatOptions::default());
    // The order of keys counts.
    assert_eq!(found["messages"].to_string(), expected.to_string());
}

#[test]
fn parts_become_texts_or_stay_lists() {
    let part = |text: &str| json!({"type": "text", "text": text});
    let given = json!([{"role": "user", "content": [part("A"), part("B")]}]);
    messages(PLAIN, OWN, given.clone(), json!([{"role": "user", "content": "A B"}]));
    messages(PLAIN, VLLM, given.clone(), json!([{"role": "user", "content": "A\nB"}]));
    messages(PLAIN, SGLANG, given.clone(), json!([{"role": "user", "content": "A B"}]));
    messages(LOOPS, OWN, given.clone(), json!([{"role": "user", "content": "A B"}]));
    messages(LOOPS, VLLM, given.clone(), given.clone());
    messages(LOOPS, SGLANG, given.clone(), given);
    let text = json!([{"role": "user", "content": "A"}]);
    messages(LOOPS, VLLM, text.clone(), json!([{"role": "user", "content": [part("A")]}]));
    messages(LOOPS, SGLANG, text.clone(), text);
    let extras = json!([{"role": "user", "content": [{"type": "text", "text": "A", "cache_control": 1}]}]);
    messages(LOOPS, VLLM, extras.clone(), extras.clone());
    messages(LOOPS, SGLANG, extras, json!([{"role": "user", "content": [part("A")]}]));
    let thinking = json!([{"role": "assistant", "content": [{"type": "thinking", "thinking": "T"}, part("A")]}, {"role": "user", "content": ""}]);
    let shown = |text: &str| json!([{"role": "assistant", "content": text}, {"role": "user", "content": ""}]);
    messages(PLAIN, VLLM, thinking.clone(), shown("T\nA"));
    messages(PLAIN, SGLANG, thinking, shown("A"));
    let options = ChatOptions { lists: Some(true), ..ChatOptions::default() };
    let found = prepared(PLAIN, VLLM, json!({"messages": [{"role": "user", "content": "A"}]}), options);
    assert_eq!(found["messages"][0]["content"], json!([part("A")]));
}

#[test]
fn messages_keep_the_keys_that_the_engine_knows() {
    let given = json!([
        {"content": "Hi", "name": "Ada", "x": 1, "role": "user"},
        {"role": "assistant", "content": null, "reasoning_content": "R", "refusal": null, "name": "B", "tool_calls": [
            {"function": {"name": "f", "arguments": "{\"a\": 1}"}, "type": "function", "id": "c", "index": 0}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "user", "content": "?"},
    ]);
    let call = json!([{"id": "c", "function": {"arguments": {"a": 1}, "name": "f"}, "type": "function", "index": 0}]);
    messages(
        PLAIN,
        VLLM,
        given.clone(),
        json!([
            {"role": "user", "content": "Hi", "name": "Ada"},
            {"role": "assistant", "content": "", "tool_calls": call, "reasoning": "R", "reasoning_content": "R", "name": "B"},
            {"role": "tool", "content": "A\nB", "tool_call_id": "c"},
            {"role": "user", "content": "?"},
        ]),
    );
    let call = json!([{"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]);
    messages(
        PLAIN,
        SGLANG,
        given,
        json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "name": "B", "reasoning_content": "R", "tool_calls": call},
            {"role": "tool", "content": "A B", "tool_call_id": "c"},
            {"role": "user", "content": "?"},
        ]),
    );
}

#[test]
fn a_last_message_of_the_assistant_is_the_users_for_sglang() {
    let given = json!([{"role": "assistant", "content": "A"}]);
    messages(PLAIN, VLLM, given.clone(), given.clone());
    messages(PLAIN, SGLANG, given, json!([{"role": "user", "content": "A"}]));
    let parts = json!([{"role": "assistant", "content": [{"type": "text", "text": "A"}]}]);
    messages(LOOPS, SGLANG, parts.clone(), parts);
}

#[test]
fn arguments_of_calls_become_objects() {
    for (arguments, vllm, sglang, own) in [
        ("{\"a\":1}", json!({"a": 1}), Some(json!({"a": 1})), json!({"a": 1})),
        ("[]", json!({}), None, json!([])),
        ("{", json!({}), None, json!("{")),
        ("", json!({}), None, json!("")),
    ] {
        let body = json!({"messages": [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]},
            {"role": "user", "content": ""},
        ]});
        let found = |engine| {
            let found = prepared(PLAIN, engine, body.clone(), ChatOptions::default());
            found.pointer("/messages/0/tool_calls/0/function/arguments").cloned()
        };
        assert_eq!((found(VLLM), found(SGLANG), found(OWN)), (Some(vllm), sglang, Some(own)));
    }
}

#[test]
fn developers_and_lines_of_clients() {
    let given = json!([
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "D"},
        {"role": "system", "content": "x-anthropic-billing-header: 1\nS"},
    ]);
    let merged = |system: &str| json!([{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]);
    messages(PLAIN, VLLM, given.clone(), merged("D\n\nx-anthropic-billing-header: 1\nS"));
    messages(PLAIN, NEW_VLLM, given.clone(), merged("D\n\nS"));
    messages(PLAIN, SGLANG, given.clone(), given);
    let known = "{% if messages[0].role == 'developer' %}{% endif %}";
    let first = json!([{"role": "developer", "content": "D"}]);
    messages(known, VLLM, first.clone(), json!([{"role": "developer", "content": "D", "tools": null}]));
    messages(PLAIN, VLLM, first, json!([{"role": "system", "content": "D"}]));
}

#[test]
fn tools_are_chosen_and_completed() {
    let tool =
        |name: &str| json!({"function": {"parameters": {"b": 1, "a": 2}, "name": name, "x": 1}, "type": "function"});
    let body = |choice: Value| json!({"messages": [], "tools": [tool("f"), tool("g")], "tool_choice": choice});
    let found = |engine, choice| prepared(PLAIN, engine, body(choice), ChatOptions::default())["tools"].to_string();
    let vllm = |name: &str| json!({"type": "function", "function": {"name": name, "description": null, "parameters": {"b": 1, "a": 2}}});
    let sglang = |name: &str| json!({"type": "function", "function": {"parameters": {"b": 1, "a": 2}, "name": name, "description": null}, "defer_loading": null});
    let named = json!({"type": "function", "function": {"name": "g"}});
    for choice in [json!("auto"), json!("none"), named.clone()] {
        assert_eq!(found(VLLM, choice), json!([vllm("f"), vllm("g")]).to_string());
    }
    assert_eq!(found(SGLANG, json!("auto")), json!([sglang("f"), sglang("g")]).to_string());
    assert_eq!(found(SGLANG, json!("none")), "null");
    assert_eq!(found(SGLANG, named), json!([sglang("g")]).to_string());
    let options = ChatOptions { no_tools_for_none: true, ..ChatOptions::default() };
    assert_eq!(prepared(PLAIN, VLLM, body(json!("none")), options)["tools"], Value::Null);
    assert_eq!(found(OWN, json!("none")), json!([tool("f"), tool("g")]).to_string());
}

#[test]
fn variables_come_from_the_request_then_from_the_defaults() {
    let body = json!({"messages": [], "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high", "a": null, "b": "auto"}});
    let options =
        || ChatOptions { variables: json!({"a": 1, "c": 2}).as_object().unwrap().clone(), ..ChatOptions::default() };
    let found = |engine, body: &Value| prepared(PLAIN, engine, body.clone(), options())["variables"].clone();
    assert_eq!(found(VLLM, &body), json!({"a": 1, "c": 2, "reasoning_effort": "low", "enable_thinking": true}));
    assert_eq!(
        found(SGLANG, &body),
        json!({"reasoning_effort": "high", "a": null, "b": "auto", "thinking": true, "enable_thinking": true, "c": 2})
    );
    assert_eq!(found(OWN, &body), json!({"reasoning_effort": "high", "a": null, "b": "auto", "c": 2}));
    let none = json!({"messages": [], "reasoning": {"effort": "none"}});
    assert_eq!(found(VLLM, &none), json!({"a": 1, "c": 2}));
    let expected = json!({"thinking": false, "enable_thinking": false, "a": 1, "c": 2, "reasoning_effort": "none"});
    assert_eq!(found(SGLANG, &none), expected);
}

#[test]
fn loops_over_contents_are_found_as_each_engine_finds_them() {
    for (source, vllm, sglang) in [
        (PLAIN, false, false),
        ("{% for message in messages %}{% for x in message['content'] %}{% endfor %}{% endfor %}", true, true),
        (
            "{% set l = messages[1:] %}{% for it in l %}{% for x in it.content | list %}{% endfor %}{% endfor %}",
            true,
            false,
        ),
        (
            "{% macro r(c) %}{% for x in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ r(m.content) }}{% endfor %}",
            true,
            false,
        ),
        (
            "{% macro r(c) %}{% for x in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ r(c=m.role) }}{% endfor %}",
            false,
            false,
        ),
        ("{% for x in content %}{% endfor %}", true, false),
        ("{% for x in msg.content %}{% endfor %}", false, true),
        ("{# an image #}{{ messages[0].content }}", false, true),
    ] {
        let traits = crate::jinja::Template::parse(source).unwrap().traits();
        assert_eq!((traits.loops_vllm, traits.loops_sglang), (vllm, sglang), "{source}");
    }
}

/// A pairwise search over these loops and calls would take minutes.
#[test]
fn a_template_of_many_loops_and_calls_is_searched_in_one_pass() {
    let sets = (0..400).map(|at| format!("{{% set a{} = a{at} %}}", at + 1)).collect::<String>();
    let messages = (0..400).map(|at| format!("{{% for m{at} in a{at} %}}{{% endfor %}}")).collect::<String>();
    let loops = "{% for x in c %}{% endfor %}".repeat(15_000);
    let calls = "{{ r(m1.role) }}{{ r(c=m2.role) }}".repeat(10_000);
    let source = format!("{{% set a0 = messages %}}{sets}{messages}{{% macro r(c) %}}{loops}{{% endmacro %}}{calls}");
    let traits = |source: &str| crate::jinja::Template::parse(source).unwrap().traits();
    assert!(!traits(&source).loops_vllm);
    assert!(traits(&(source + "{{ r(m399.content) }}")).loops_vllm);
}

#[test]
fn templates_of_requests_need_trust() {
    let body = json!({"messages": [], "chat_template": "T", "chat_template_kwargs": {"chat_template": "U"}});
    let source = |engine, trusts_templates| {
        let options = ChatOptions { trusts_templates, ..ChatOptions::default() };
        prepared(PLAIN, engine, body.clone(), options)["template"].as_str().map(str::to_owned)
    };
    assert_eq!([source(VLLM, true), source(SGLANG, true)].map(Option::unwrap), ["T", "U"]);
    assert_eq!([source(VLLM, false), source(SGLANG, false)], [None, None]);
    assert_eq!(source(OWN, false).as_deref(), Some(PLAIN));
}
