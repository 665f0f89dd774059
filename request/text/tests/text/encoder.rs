//! The gateway's encoder: plain chats read in place, and the slow library released until a text needs it.

use std::path::Path;

use proptest::prelude::*;
use semmoe_text::{
    ChatTemplate, Fault, Limits, PlainChat, Preparation, Prompt, Route, TextError, Tokenizer, chat_ids_while,
    prompt_ids,
};
use serde_json::{Value, json};

use crate::model;

/// A text that the fast library is known to encode differently.
const LEFT_TO_THE_ORACLE: &str = "ab'\u{17f}'se";

#[test]
fn the_slow_library_is_away_until_a_text_needs_it() {
    let whole = Tokenizer::from_file(&model("tokenizer.json")).unwrap();
    let encoder = Tokenizer::from_file(&model("tokenizer.json")).unwrap().into_encoder();
    assert_eq!(encoder.sha256(), whole.sha256());
    assert_eq!(encoder.encode("a river").unwrap(), whole.encode("a river").unwrap());
    for text in [LEFT_TO_THE_ORACLE.to_owned(), format!("<|im_start|>{LEFT_TO_THE_ORACLE}<|im_end|>")] {
        let error = encoder.encode(&text).unwrap_err();
        assert!(matches!(error, TextError::OracleAway) && error.fault() == Fault::Server, "{error}");
    }
    encoder.load_oracle().unwrap();
    // Loading it again changes nothing.
    encoder.load_oracle().unwrap();
    assert_eq!(encoder.encode(LEFT_TO_THE_ORACLE).unwrap(), whole.encode(LEFT_TO_THE_ORACLE).unwrap());
}

#[test]
fn a_file_that_was_changed_is_not_taken_for_the_one_that_was_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::copy(model("tokenizer.json"), &path).unwrap();
    let encoder = Tokenizer::from_file(&path).unwrap().into_encoder();
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    json["added_tokens"][0]["content"] = "<|another|>".into();
    std::fs::write(&path, json.to_string()).unwrap();
    let error = encoder.load_oracle().unwrap_err();
    assert!(matches!(error, TextError::TokenizerChanged { .. }), "{error}");
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(encoder.load_oracle().unwrap_err(), TextError::Read { .. }));
    assert!(matches!(encoder.encode(LEFT_TO_THE_ORACLE), Err(TextError::OracleAway)));
    // Contents passed as bytes cannot be reloaded, so nothing is released.
    let json = std::fs::read(model("tokenizer.json")).unwrap();
    assert!(Tokenizer::from_bytes(&json).unwrap().into_encoder().encode(LEFT_TO_THE_ORACLE).is_ok());
}

/// Templates that inspect their input in many ways.
const TEMPLATES: [&str; 4] = [
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}\
     {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{ bos_token }}{% for message in messages[::-1] %}{{ message | tojson }}{{ loop.index0 }}{{ message.keys() | list }}{% endfor %}\
     {% if tools %}tools{% endif %}{{ tools is none }}{{ enable_thinking is defined }}{{ messages | length }}",
    "{% for m in messages %}{% if m.role == 'user' and m.content.startswith('<') %}[{{ m.content.split('>')[-1].strip() }}]\
     {% elif m.role == 'user' or '\n' in m.content %}{{ m['content'] | trim | upper }}{% else %}{{ m.name is defined }}{% endif %}{% endfor %}",
    "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}{{ messages[-1].content }}",
];

fn template(folder: &Path, source: &str) -> ChatTemplate {
    let path = folder.join("tokenizer_config.json");
    let config = json!({ "chat_template": source, "bos_token": { "content": "<s>" }, "eos_token": "</s>" });
    std::fs::write(&path, config.to_string()).unwrap();
    ChatTemplate::beside(&path, || 0).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A plain chat has the ids of the full parser, or its error, whatever the template does with it.
    #[test]
    fn plain_chats_have_the_ids_of_the_whole_parser(
        messages in prop::collection::vec(("(user|system|assistant|\\PC{0,3})", "(<[a-z]{0,3}>)?(\\PC|[\n\"\\\\<|>' a-z]){0,20}", any::<bool>()), 1..5),
        more in any::<bool>()
    ) {
        let message = |(role, content, first): &(String, String, bool)| match first {
            true => json!({ "content": content, "role": role }),
            false => json!({ "role": role, "content": content }),
        };
        let messages: Vec<Value> = messages.iter().map(message).collect();
        let mut body = json!({ "model": "m", "messages": messages, "n": 1 });
        if more {
            body["tools"] = Value::Null;
        }
        let (text, folder) = (body.to_string(), tempfile::tempdir().unwrap());
        let chat = PlainChat::read(&text).unwrap().unwrap();
        let prompt = Prompt::from_json(Route::Chat, &body).unwrap();
        for source in TEMPLATES {
            let template = template(folder.path(), source);
            let expected = prompt_ids(&prompt, tokenizer(), Some(&template), Limits::default());
            let found = chat_ids_while(&chat, Preparation::OWN, tokenizer(), Some(&template), Limits::default(), &mut || true);
            match (expected, found) {
                (Ok(expected), Ok(found)) => prop_assert_eq!(expected.concat(), found),
                (Err(expected), Err(found)) => prop_assert_eq!(expected.to_string(), found.to_string()),
                (expected, found) => prop_assert!(false, "{expected:?}, {found:?}"),
            }
        }
    }
}

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: std::sync::LazyLock<Tokenizer> =
        std::sync::LazyLock::new(|| Tokenizer::from_file(&model("tokenizer.json")).unwrap());
    &TOKENIZER
}

#[test]
fn limits_and_the_want_of_a_template_are_reported_of_plain_chats_too() {
    let body = json!({ "messages": [{ "role": "user", "content": "a river" }] }).to_string();
    let chat = PlainChat::read(&body).unwrap().unwrap();
    let none = chat_ids_while(&chat, Preparation::OWN, tokenizer(), None, Limits::default(), &mut || true);
    assert!(matches!(none, Err(TextError::NoTemplate)));
    let folder = tempfile::tempdir().unwrap();
    let template = template(folder.path(), TEMPLATES[0]);
    let limits = Limits { text_bytes: 10, ..Limits::default() };
    let long = chat_ids_while(&chat, Preparation::OWN, tokenizer(), Some(&template), limits, &mut || true);
    assert!(matches!(long, Err(TextError::TooLarge { .. })));
    let given_up =
        chat_ids_while(&chat, Preparation::OWN, tokenizer(), Some(&template), Limits::default(), &mut || false);
    assert!(matches!(given_up, Err(TextError::GivenUp { .. })));
}
