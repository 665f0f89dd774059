use std::path::Path;

use serde_json::json;

use super::*;

/// 2024-02-29 13:05:09.
fn clock() -> i64 {
    1_709_211_909
}

fn render_within(budget: Budget, source: &str, messages: &Value) -> Result<String, TextError> {
    let template = ChatTemplate::from_source(source, &json!({"bos_token": "<s>"}), clock)?;
    template.render_as_given(messages, Given::default(), budget)
}

fn render(source: &str, messages: &Value) -> Result<String, TextError> {
    render_within(Budget::default(), source, messages)
}

fn user() -> Value {
    json!([{"role": "user", "content": "Hi", "x": ["a", null, {"k": true}], "y": 1e-7}])
}

/// The template's text, with or without tools.
fn source(template: &ChatTemplate, with_tools: bool) -> &str {
    template.parsed(with_tools).template.source()
}

/// These were once rendered wrongly in templates of published models.
#[test]
fn templates_are_rendered_as_by_transformers() {
    for (source, expected) in [
        ("{% if tools is iterable and tools | length > 0 %}T{% endif %}{{ messages[0].content }}", "Hi"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "Hi"),
        ("{{ 'Today ' + strftime_now('%Y-%m-%d') }}", "Today 2024-02-29"),
        (
            "{{ messages[0].x | string }}{{ messages[0].x ~ messages[0].y }}",
            "['a', None, {'k': True}]['a', None, {'k': True}]1e-07",
        ),
        ("{{ {'b': 'é', 'a': 1} | tojson(sort_keys=true, ensure_ascii=true) }}", r#"{"a": 1, "b": "\u00e9"}"#),
        (
            "{{ 'a,b,c'.rsplit(',', 1) | last }}{{ 'text' is sequence }}{{ \"it's\" | title }}{{ '\"' | e }}",
            "cTrueIt's&#34;",
        ),
        ("a\r\nb\rc\r\n", "a\nb\nc"),
        ("{{ bos_token }}{{ documents is none }}", "<s>True"),
    ] {
        assert_eq!(render(source, &user()).unwrap(), expected, "{source}");
    }
    for source in ["{% for x in none %}{% endfor %}", "{{ none | length }}", "{{ missing.x }}", "{{ 'a' + 1 }}"] {
        assert!(matches!(render(source, &user()), Err(TextError::TemplateRender { .. })), "{source}");
    }
}

#[test]
fn plain_chats_are_rendered_as_whole_ones() {
    let body = r#"{"messages":[{"role":"user","content":"a\nb"},{"content":"c","role":"assistant"}]}"#;
    let (chat, _) = PlainChat::quickly(body).unwrap();
    let messages = &serde_json::from_str::<Value>(body).unwrap()["messages"];
    for source in [
        "{{ messages }}",
        "{{ messages | tojson }}",
        "{% for m in messages[::-1] %}{{ m.role ~ m['content'] ~ m.x }}{% endfor %}",
    ] {
        let template = ChatTemplate::from_source(source, &Value::Null, clock).unwrap();
        let whole = template.render(messages, Given::default(), Budget::default()).unwrap();
        assert_eq!(template.render_plain(&chat, Budget::default()).unwrap(), whole);
    }
}

/// None of them takes much time, memory or stack.
#[test]
fn templates_that_would_never_end_are_stopped() {
    let deep = format!("{{{{ x{} }}}}", ".a".repeat(10_000));
    let brackets = format!("{{{{ {}1{} }}}}", "(".repeat(10_000), ")".repeat(10_000));
    let sum = format!("{{{{ 1{} }}}}", " + 1".repeat(10_000));
    let nots = format!("{{{{ {}1 }}}}", "not ".repeat(100_000));
    let signs = format!("{{{{ {}1 }}}}", "-".repeat(100_000));
    let ifs = format!("{}x{}", "{% if 1 %}".repeat(10_000), "{% endif %}".repeat(10_000));
    let long = format!("{{{{ 1{} }}}}", " + 1".repeat(900));
    assert_eq!(render(&long, &user()).unwrap(), "901");
    let elifs = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(10_000));
    for source in [deep, brackets, sum, nots, signs, ifs, "x".repeat(2 << 20)] {
        assert!(matches!(render(&source, &user()), Err(TextError::TemplateSyntax { .. })), "{}", &source[..20]);
    }
    assert_eq!(render(&elifs, &user()).unwrap(), "");
    for source in [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == [[]] + ns.x }}{{ ns.x == ns.x }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ 'a' * 10 ** 15 }}",
        "{{ [1] * 10 ** 15 }}",
        "{{ 'a'.center(10 ** 12) }}",
        "{{ 'a' | indent(10 ** 15) }}",
        "{{ '\t'.expandtabs(10 ** 15) }}",
        "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
        "{{ ([1] * 99) | slice(10 ** 9) | list }}",
        "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    ] {
        // In debug builds the full budget would take too long.
        let budget = Budget { steps: 500_000, bytes: 16 << 20 };
        let stopped = render_within(budget, source, &user());
        assert!(matches!(stopped, Err(TextError::TemplateBudget { .. })), "{source}");
    }
    for source in [
        "{{ 2 ** 1000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:9999999}'.format(1) }}",
        "{{ [] | tojson(indent=99999) }}",
    ] {
        assert!(render(source, &user()).is_err(), "{source}");
    }
}

#[test]
fn messages_of_any_json_are_rendered_or_refused() {
    let odd = [json!(null), json!(true), json!(1e300), json!("x"), json!([[], {}]), json!({"a": [null]})];
    let deep = (0..100).fold(json!(1), |inner, _| json!([inner]));
    for source in [
        "{% for m in messages %}{{ m.role }}{{ m.content | trim }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}",
        "{{ messages | tojson(indent=1) }}{{ messages }}{{ messages | map(attribute='content') | list }}{{ messages[0].content | string | length }}",
    ] {
        for value in odd.iter().chain([&deep]) {
            let _ = render(source, &json!([{"role": value, "content": value, "tool_calls": value}]));
            let _ = render(source, value);
        }
    }
    assert!(render("{{ messages | tojson }}", &json!([deep])).is_ok());
}

/// A template that writes the date uses the engine's time zone.
#[test]
fn dates_are_those_of_the_zone() {
    let source = "{{ strftime_now('%Y-%m-%d %H:%M') }}";
    for (zone_seconds, date) in
        [(0, "2024-02-29 13:05"), (11 * 3600, "2024-03-01 00:05"), (-14 * 3600, "2024-02-28 23:05")]
    {
        let template = ChatTemplate::from_source(source, &Value::Null, clock).unwrap().in_zone(zone_seconds);
        assert!(template.writes_date());
        assert_eq!(template.render(&user(), Given::default(), Budget::default()).unwrap(), date);
    }
    assert!(!ChatTemplate::from_source("{{ messages }}", &Value::Null, clock).unwrap().writes_date());
}

#[test]
fn many_tools_are_rendered_within_the_budget() {
    let tools = json!(vec![json!({"type": "function", "function": {"name": "f"}}); 100_000]);
    let template = ChatTemplate::from_source(
        "{% for tool in tools %}{{ tool | tojson }}{{ tool.function.name }}{% endfor %}",
        &Value::Null,
        clock,
    );
    let template = template.unwrap();
    let given = Given { tools: Some(&tools), ..Given::default() };
    assert!(template.render(&user(), given, Budget::default()).is_ok());
    let small = Budget { steps: 50_000, bytes: 2 << 20 };
    assert!(matches!(template.render(&user(), given, small), Err(TextError::TemplateBudget { .. })));
}

#[test]
fn a_folder_has_its_template_in_one_of_three_files() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = folder.path().join("tokenizer.json");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let read = |path: &Path| ChatTemplate::beside(path, clock).map(|template| source(&template, false).to_owned());
    assert!(matches!(read(&tokenizer), Err(TextError::NoTemplate)));
    let config = json!({
        "chat_template": [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "tools"}],
        "eos_token": {"content": "</s>"}, "image_token": "<i>", "pad_token": null,
        "extra_special_tokens": {"boi_token": "<b>", "think": {"content": "<t>"}},
    });
    write("tokenizer_config.json", &config.to_string());
    assert_eq!(read(&tokenizer).unwrap(), "config");
    assert_eq!(source(&ChatTemplate::beside(&tokenizer, clock).unwrap(), true), "tools");
    write("chat_template.json", r#"{"chat_template": "json"}"#);
    assert_eq!(read(&tokenizer).unwrap(), "json");
    write("chat_template.jinja", "{{ eos_token ~ image_token ~ boi_token ~ think ~ pad_token }}\r\n");
    let template = ChatTemplate::beside(&tokenizer, clock).unwrap();
    assert_eq!(template.render(&user(), Given::default(), Budget::default()).unwrap(), "</s><i><b><t>");
    let chosen = ChatTemplate::from_file(&folder.path().join("chat_template.jinja"), &tokenizer, clock).unwrap();
    assert_eq!(chosen.render(&user(), Given::default(), Budget::default()).unwrap(), "</s><i><b><t>");
    std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
    write("additional_chat_templates/tool_use.jinja", "named");
    let template = ChatTemplate::beside(&tokenizer, clock).unwrap();
    assert_eq!((source(&template, true), source(&template, false).contains("boi_token")), ("named", true));
    // Used only if the other file has no added tokens.
    write("special_tokens_map.json", r#"{"eos_token": {"content": "<e>"}}"#);
    let token = || ChatTemplate::beside(&tokenizer, clock).unwrap().special_tokens()["eos_token"].clone();
    assert_eq!(token(), "<e>");
    write("tokenizer_config.json", r#"{"eos_token": "</s>", "added_tokens_decoder": {}}"#);
    assert_eq!(token(), "</s>");
    std::fs::write(folder.path().join("chat_template.jinja"), b"\xff").unwrap();
    assert!(read(&tokenizer).unwrap_err().to_string().contains("is not UTF-8"));
}

#[test]
fn features_are_named() {
    let source =
        "{% for m in messages if m is not none %}{{ m.content.strip() | upper }}{% endfor %}{{ strftime_now('%Y') }}";
    let template = ChatTemplate::from_source(source, &Value::Null, clock).unwrap();
    assert_eq!(template.features(), ["filter upper", "function strftime_now", "method strip", "tag for", "test none"]);
}
