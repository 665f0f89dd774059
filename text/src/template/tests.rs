use proptest::prelude::*;

use super::*;
use crate::chat::PlainMessage;

/// As models have them, from what is released with them; shortened where what is left out is about tools.
const TEMPLATES: [(&str, &str); 7] = [
    (
        "chatml",
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\
         {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
    (
        "instructions",
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
         {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
         {% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
         {% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}\
         {% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    ),
    (
        "headers",
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + \
         message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}\
         {% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ),
    (
        "turns",
        "{{ bos_token }}\n{% if messages[0]['role'] == 'system' %}\n{% set first = messages[0].content + '\n\n' %}\n\
         {% set loop_messages = messages[1:] %}\n{% else %}\n{% set first = '' %}{% set loop_messages = messages %}\n{% endif %}\n\
         {%- for message in loop_messages -%}\n{%- set role = 'model' if message.role == 'assistant' else message.role -%}\n\
         {{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}{{ message.content | trim }}{{ '<end_of_turn>\n' }}\n\
         {%- if loop.last and message.role is not none %}last {{ loop.length }}{% endif %}\n\
         {%- else %}empty{% endfor -%}",
    ),
    (
        "namespace",
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
         {% set ns = namespace(is_tool=false, system_prompt='', is_first_sp=true) %}\
         {%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}\
         {% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}\
         {%- else %}{% set ns.system_prompt = ns.system_prompt + '\n\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}\
         {{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}\
         {%- set ns.is_tool = false -%}{{'<User>' + message['content']}}{%- endif %}\
         {%- if message['role'] == 'assistant' and message['content'] is not none %}{{'<Assistant>' + message['content'] + '<end>'}}{%- endif %}\
         {%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{'<out>' + message['content']}}{%- endif %}{%- endfor -%}\
         {% if add_generation_prompt and not ns.is_tool %}{{'<Assistant>'}}{% endif %}",
    ),
    (
        "thinking",
        "{%- if tools %}{{ tools | tojson }}{%- elif messages[0].role == 'system' %}{{- 'S ' + messages[0].content }}{%- endif %}\
         {%- set ns = namespace(found=true, last=messages|length - 1) %}\
         {%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}\
         {%- if ns.found and message.role == \"user\" and not(message.content.startswith('<r>') and message.content.endswith('</r>')) %}\
         {%- set ns.found = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}\
         {%- for message in messages %}{%- if (message.role == \"user\") or (message.role == \"system\" and not loop.first) %}\
         {{- '<u>' + message.role + message.content }}\
         {%- elif message.role == \"assistant\" %}{%- set content = message.content %}{%- set thought = '' %}\
         {%- if message.reasoning_content is defined and message.reasoning_content is not none %}{%- set thought = message.reasoning_content %}\
         {%- elif '</think>' in message.content %}{%- set content = message.content.split('</think>')[-1].lstrip('\n') %}\
         {%- set thought = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}{%- endif %}\
         {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thought)) %}{{- '<a>' + thought.strip('\n') + '|' + content.lstrip('\n') }}\
         {%- else %}{{- '<a>' + content }}{%- endif %}{%- if message.tool_calls %}{{ message.tool_calls[0] }}{%- endif %}\
         {%- elif message.role == \"tool\" %}{%- if loop.first or (messages[loop.index0 - 1].role != \"tool\") %}{{- '<u>' }}{%- endif %}\
         {{- message.content }}{%- if loop.last or (messages[loop.index0 + 1].role != \"tool\") %}{{- '</u>' }}{%- endif %}{%- endif %}{%- endfor %}\
         {%- if add_generation_prompt %}{{- '<a>' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- 'no' }}{%- endif %}{%- endif %}",
    ),
    (
        "scopes",
        "{% set a = 'x' %}{% for m in messages %}{% if loop.index > 1 %}{{ a }}{% endif %}{% set a = a + m.role %}{{ a }}\
         {% for n in messages[1:] %}{% set a = n.content.strip() %}{{ a ~ '' if false else a }}{{ loop.index }}{{ '' if loop.index < 3 }}\
         {% endfor %}{{ a or 'none' }}{{ (m.content and a) or m.role }}{% endfor %}{{ a }}{{ m }}{{ messages[7].x if messages[7] }}",
    ),
];

fn chats() -> impl Strategy<Value = Vec<(String, String, bool)>> {
    let role = prop_oneof!["user", "assistant", "system", "tool", "[a-z]{0,3}"];
    let content = prop_oneof!["[ \na-c]{0,6}", r"(<think>|</think>|<r>|</r>|\n| |a|é){0,6}"];
    prop::collection::vec((role, content, any::<bool>()), 1..6)
}

/// Of roles, texts, and whether the text is written before the role.
fn plain(messages: Vec<(&str, &str, bool)>) -> PlainChat<'static> {
    let message = |(role, content, content_first): (&str, &str, bool)| PlainMessage {
        role: role.to_owned().into(),
        content: content.to_owned().into(),
        content_first,
    };
    PlainChat { messages: messages.into_iter().map(message).collect() }
}

fn load(source: &str) -> ChatTemplate {
    let config = serde_json::json!({"chat_template": source, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
    ChatTemplate::from_parts(&config["chat_template"], &config).unwrap()
}

proptest! {
    #[test]
    fn own_rendering_is_the_librarys(chat in chats()) {
        thread_local! {
            static LOADED: Vec<ChatTemplate> = TEMPLATES.iter().map(|(_, source)| load(source)).collect();
        }
        let chat = plain(chat.iter().map(|(role, content, first)| (role.as_str(), content.as_str(), *first)).collect());
        LOADED.with(|templates| {
            for (template, (name, _)) in templates.iter().zip(TEMPLATES) {
                let own = template.own.as_ref().unwrap().render(&chat);
                if let Some(own) = own {
                    prop_assert_eq!(own, template.render_by_library(&chat).unwrap(), "{}", name);
                }
            }
            Ok(())
        })?;
    }
}

#[test]
fn usual_templates_are_rendered_without_the_library() {
    let turn = |role| (role, " a\n", false);
    for (name, source) in &TEMPLATES[..6] {
        let template = load(source);
        assert_eq!(template.renderer(), Renderer::Own, "{name}");
        let chat = plain(vec![turn("user"), turn("assistant"), turn("user")]);
        assert_eq!(template.render_plain(&chat).unwrap(), template.render_by_library(&chat).unwrap());
        assert_eq!(template.left_to_library(), 0, "{name}");
    }
}

#[test]
fn what_is_not_known_is_left_to_the_library_and_counted() {
    let chat = plain(vec![("user", "abc", false), ("system", "d", false)]);
    for source in [
        "{% if messages|length > 1 %}{{ messages[0].content | upper }}{% else %}x{% endif %}",
        "{% if messages|length > 1 %}{{ messages[0].content[:2] }}{% else %}x{% endif %}",
        "{% if messages|length > 1 %}{% macro a() %}b{% endmacro %}{{ a() }}{% else %}x{% endif %}",
        "{% if messages|length > 1 %}{{ messages[0] }}{% else %}x{% endif %}",
        "{% if messages|length > 1 %}{{ messages[0].content.replace('a', 'b') }}{% else %}x{% endif %}",
        "{% if messages|length > 1 %}{% for c in messages[0].content %}{{ c }}-{% endfor %}{% else %}x{% endif %}",
        "{% if messages|length > 1 %}{{ range(3) }}{% else %}x{% endif %}",
        "{% if messages|length > 1 %}{{ loop }}{{ 1.5 }}{{ true }}{{ 7 // 2 }}{% else %}x{% endif %}",
        "{% if messages|length > 1 %}{% for m in messages if m.role == 'user' %}{{ m.role }}{% endfor %}{% else %}x{% endif %}",
    ] {
        let template = load(source);
        assert_eq!(template.renderer(), Renderer::Own, "{source}");
        assert_eq!(template.render_plain(&chat).unwrap(), template.render_by_library(&chat).unwrap(), "{source}");
        assert_eq!(template.left_to_library(), 1, "{source}");
    }
    let template = load("{% if messages|length > 1 %}{{ raise_exception('no') }}{% else %}x{% endif %}");
    assert!(template.render_plain(&chat).unwrap_err().to_string().contains("no"));
    let template = load("{{ messages | tojson }}");
    assert!(matches!(template.renderer(), Renderer::Library { reason } if reason.contains("without the library")));
    assert_eq!(template.left_to_library(), 0);
}
