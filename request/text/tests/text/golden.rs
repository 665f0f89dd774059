//! The bundled model's tokenizer against its golden vectors, and laws that hold for any text and any ids.

use std::sync::OnceLock;

use proptest::prelude::*;
use semmoe_text::{
    Budget, ChatTemplate, Fault, Given, IncrementalDecoder, Limits, Prompt, Route, TextError, Tokenizer, prompt_ids,
};
use serde_json::{Value, json};

use crate::model;

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| Tokenizer::from_file(&model("tokenizer.json")).unwrap())
}

fn template() -> ChatTemplate {
    ChatTemplate::beside(&model("tokenizer.json"), || 0).unwrap()
}

fn incremental(ids: &[u32], skip_special: bool) -> String {
    let mut decoder = IncrementalDecoder::new(skip_special);
    let mut text = String::new();
    for &id in ids {
        text += &decoder.push(tokenizer(), id).unwrap();
    }
    text + &decoder.finish(tokenizer()).unwrap()
}

#[test]
fn golden_prompts_have_their_ids_and_texts() {
    let golden: Value = serde_json::from_slice(&std::fs::read(model("golden/golden.json")).unwrap()).unwrap();
    for prompt in golden["prompts"].as_array().unwrap() {
        let (text, expected) =
            (&prompt["text"], serde_json::from_value::<Vec<u32>>(prompt["input_ids"].clone()).unwrap());
        let (route, body) = if prompt["chat"] == true {
            let messages = json!([{"role": "user", "content": text}]);
            assert_eq!(
                template().render(&messages, Given::default(), Budget::default()).unwrap(),
                prompt["rendered"].as_str().unwrap()
            );
            (Route::Chat, json!({"messages": messages}))
        } else {
            (Route::Completions, json!({"prompt": text}))
        };
        let extracted = Prompt::from_json(route, &body).unwrap();
        let ids = prompt_ids(&extracted, tokenizer(), Some(&template()), Limits::default()).unwrap();
        assert_eq!(ids, [expected]);
        let greedy: Vec<u32> = serde_json::from_value(prompt["greedy_16"].clone()).unwrap();
        assert_eq!(tokenizer().decode(&greedy).unwrap(), prompt["greedy_text"].as_str().unwrap());
        assert_eq!(incremental(&greedy, false), prompt["greedy_text"].as_str().unwrap());
    }
}

#[test]
fn identity_ignores_layout_and_sees_content() {
    let original: Value = serde_json::from_slice(&std::fs::read(model("tokenizer.json")).unwrap()).unwrap();
    let load = |json: &Value| Tokenizer::from_bytes(&serde_json::to_vec(json).unwrap()).unwrap().sha256().to_owned();
    let mut joined = original.clone();
    for merge in joined["model"]["merges"].as_array_mut().unwrap() {
        *merge = json!(format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()));
    }
    assert_eq!(load(&joined), tokenizer().sha256());
    let mut reordered = original.clone();
    reordered["model"]["merges"].as_array_mut().unwrap().swap(0, 1);
    assert_ne!(load(&reordered), tokenizer().sha256());
    let mut renamed = original;
    renamed["added_tokens"][0]["content"] = json!("<|other|>");
    assert_ne!(load(&renamed), tokenizer().sha256());
    assert_eq!(tokenizer().sha256().len(), 64);
    assert_eq!(tokenizer().vocab_size(), 10_240);
}

#[test]
fn unusable_files_are_reported_in_one_sentence() {
    for bytes in [
        &b"{}"[..],
        b"",
        b"\xff\xfe",
        b"{\"model\":{}}",
        br#"{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}"#,
    ] {
        let error = Tokenizer::from_bytes(bytes).unwrap_err();
        assert_eq!(error.fault(), Fault::Server);
        assert!(!error.to_string().contains('\n'), "{error}");
    }
    let missing = Tokenizer::from_file(&model("no-such-file.json")).unwrap_err().to_string();
    assert!(missing.contains("no-such-file.json"), "{missing}");
    assert!(matches!(ChatTemplate::from_source("{% if %}", &Value::Null, || 0), Err(TextError::TemplateSyntax { .. })));
}

#[test]
fn prompts_are_found_on_every_route_and_wrong_types_are_the_clients_fault() {
    let ids = |list: &[&[u32]]| Ok(Prompt::Ids(list.iter().map(|ids| ids.to_vec()).collect()));
    let texts = |list: &[&str]| Ok(Prompt::Texts(list.iter().map(|&text| text.to_owned()).collect()));
    let cases: Vec<(Route, Value, Result<Prompt, &str>)> = vec![
        (Route::Completions, json!({"prompt": "a"}), texts(&["a"])),
        (Route::Completions, json!({"prompt": ["a", "b"]}), texts(&["a", "b"])),
        (Route::Completions, json!({"prompt": [1, 2]}), ids(&[&[1, 2]])),
        (Route::Completions, json!({"prompt": [[1], [2]]}), ids(&[&[1], &[2]])),
        (
            Route::Completions,
            json!({"prompt": 5}),
            Err("prompt must be a string, a list of strings, or a list of token ids, found a number"),
        ),
        (Route::Completions, json!({"prompt": []}), Err("found an empty list")),
        (Route::Completions, json!({"prompt": ["a", 1]}), Err("found a number")),
        (Route::Completions, json!({"prompt": [1, -1]}), Err("prompt[1] must be a token id, found -1")),
        (Route::Completions, json!({"prompt": [1, 1.5]}), Err("found 1.5")),
        (Route::Completions, json!({"prompt": [4_294_967_296_u64]}), Err("found 4294967296")),
        (Route::Completions, json!({}), Err("found nothing")),
        (Route::Completions, json!([]), Err("found nothing")),
        (Route::Generate, json!({"text": "a"}), texts(&["a"])),
        (Route::Generate, json!({"input_ids": [3]}), ids(&[&[3]])),
        (Route::Generate, json!({"text": [1]}), Err("text[0] must be a string")),
        (Route::Generate, json!({"input_ids": "a"}), Err("input_ids must be a list of token ids")),
        (Route::Generate, json!({"text": "a", "input_ids": [1]}), Err("one of the two")),
        (Route::Generate, json!({}), Err("text or input_ids must be given")),
        (Route::Chat, json!({"messages": []}), Err("found an empty list")),
        (Route::Chat, json!({"messages": "hi"}), Err("found a string")),
        (
            Route::Chat,
            json!({"messages": [1], "chat_template_kwargs": 3}),
            Err("chat_template_kwargs must be an object"),
        ),
    ];
    for (route, body, expected) in cases {
        match (Prompt::from_json(route, &body), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{body}"),
            (Err(error), Err(expected)) => {
                assert!(error.to_string().contains(expected), "{body}: {error}");
                assert_eq!(error.fault(), Fault::Client);
            }
            (found, expected) => panic!("{body}: found {found:?}, expected {expected:?}"),
        }
    }
}

#[test]
fn limits_are_kept() {
    let limits = Limits { text_bytes: 4, prompts: 2, ids: 3, ..Limits::default() };
    let run = |prompt: Prompt| prompt_ids(&prompt, tokenizer(), None, limits).map_err(|error| error.to_string());
    assert!(run(Prompt::Texts(vec!["abcd".into()])).is_ok());
    assert!(run(Prompt::Texts(vec!["abcde".into()])).unwrap_err().contains("5 bytes, more than the 4"));
    assert!(run(Prompt::Ids(vec![vec![1]; 3])).unwrap_err().contains("3 prompts"));
    assert!(run(Prompt::Ids(vec![vec![1, 2], vec![3, 4]])).unwrap_err().contains("4 token ids"));
}

#[test]
fn templates_render_as_the_engines_do() {
    let render = |source: &str, messages: Value, tools: Option<Value>| {
        let given = Given { tools: tools.as_ref(), ..Given::default() };
        ChatTemplate::from_source(source, &Value::Null, || 0)
            .unwrap()
            .render(&messages, given, Budget::default())
            .map_err(|error| error.to_string())
    };
    let user = json!([{"role": "user", "content": "hi"}]);
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]}]);
    assert_eq!(render("{{ messages[0].content }}", parts, None).unwrap(), "a b");
    assert_eq!(
        render("{{ messages[0].content }}|", json!([{"role": "assistant", "content": null}]), None).unwrap(),
        "|"
    );
    let tools = json!([{"name": "f<'&>", "n": [1, {"é": null}]}]);
    assert_eq!(
        render("{{ tools[0] | tojson }}", user.clone(), Some(tools)).unwrap(),
        r#"{"name": "f<'&>", "n": [1, {"é": null}]}"#
    );
    assert_eq!(render("{{ tools is none }}", user.clone(), Some(json!([]))).unwrap(), "True");
    assert_eq!(
        render(
            "  {% for m in messages %}\n{% if loop.first %}{% continue %}{% endif %}x{% endfor %}\ny\n",
            user.clone(),
            None
        )
        .unwrap(),
        "y"
    );
    assert_eq!(render("{{ messages[0]['content'].upper().startswith('H') }}", user.clone(), None).unwrap(), "True");
    assert_eq!(render("{{ '<a>' }}", user.clone(), None).unwrap(), "<a>");
    let refused = render("{{ raise_exception('roles must alternate') }}", user, None).unwrap_err();
    assert!(refused.contains("roles must alternate"), "{refused}");
    assert!(render("x", json!([3]), None).unwrap_err().contains("messages[0] must be an object"));
    assert!(render("x", json!([{"content": "a"}]), None).unwrap_err().contains("messages[0].role"));
    assert!(render("x", json!([{"role": "user", "content": 1}]), None).unwrap_err().contains("messages[0].content"));
}

#[test]
fn characters_are_never_split() {
    let text = "naïve 🦀 日本語 — ok";
    let ids = tokenizer().encode(text).unwrap();
    let mut decoder = IncrementalDecoder::new(false);
    let pieces: Vec<String> = ids.iter().map(|&id| decoder.push(tokenizer(), id).unwrap()).collect();
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
    assert_eq!(pieces.concat(), text);
}

#[test]
fn ids_outside_the_vocabulary_count_as_nothing() {
    let text = "naïve 🦀 日本語 — ok";
    let mut ids = tokenizer().encode(text).unwrap();
    for at in (0..=ids.len()).rev() {
        ids.insert(at, tokenizer().vocab_size() + at as u32);
    }
    assert_eq!(tokenizer().decode(&ids).unwrap(), text);
    assert_eq!(incremental(&ids, false), text);
}

#[test]
fn broken_bytes_for_ever_stay_cheap_and_exact() {
    let lone = tokenizer().token_to_id("ð").unwrap();
    let ids = vec![lone; 3000];
    assert_eq!(incremental(&ids, false), tokenizer().decode(&ids).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_encodes_and_decodes_without_panic(text in any::<String>()) {
        let ids = tokenizer().encode(&text).unwrap();
        prop_assert_eq!(incremental(&ids, false), tokenizer().decode(&ids).unwrap());
    }

    #[test]
    fn incremental_decoding_equals_decoding_at_once(ids in prop::collection::vec(prop_oneof![0_u32..10_400, 0_u32..300], 0..120), skip in any::<bool>()) {
        prop_assert_eq!(incremental(&ids, skip), tokenizer().decode_with(&ids, skip).unwrap());
    }

    #[test]
    fn any_message_text_renders(content in any::<String>(), role in any::<String>()) {
        let rendered = template().render(
            &json!([{"role": role, "content": content}]),
            Given { add_generation_prompt: false, ..Given::default() },
            Budget::default(),
        ).unwrap();
        prop_assert!(rendered.contains(&content));
    }
}

#[test]
fn the_fast_library_encodes_and_leaves_known_differences_to_the_oracle() {
    let tokenizer = Tokenizer::from_file(&model("tokenizer.json")).unwrap();
    tokenizer.is_fast().unwrap();
    let before = tokenizer.left_to_oracle();
    for text in ["Hello there.", "ab'\u{17f}'se", "\u{17f}"] {
        assert_eq!(tokenizer.encode(text).unwrap(), tokenizer.encode_by_oracle(text, false).unwrap(), "{text:?}");
    }
    assert_eq!(tokenizer.left_to_oracle() - before, 2);
}

#[test]
fn a_tokenizer_that_the_fast_library_does_not_know_is_encoded_by_the_oracle() {
    let mut json: Value = serde_json::from_slice(&std::fs::read(model("tokenizer.json")).unwrap()).unwrap();
    // A word-level model: supported by the oracle, but not by the fast library.
    json["model"] = json!({"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"});
    json["added_tokens"] = json!([]);
    json["normalizer"] = Value::Null;
    json["pre_tokenizer"] = json!({"type": "Whitespace"});
    json["post_processor"] = Value::Null;
    json["decoder"] = Value::Null;
    let tokenizer = Tokenizer::from_bytes(&serde_json::to_vec(&json).unwrap()).unwrap();
    assert!(!tokenizer.is_fast().unwrap_err().to_string().is_empty());
    assert_eq!(tokenizer.encode("a b c").unwrap(), [0, 1, 2]);
}

proptest! {
    #[test]
    fn both_libraries_give_the_same_ids(text in "\\PC{0,80}", seams in "[ \t\r\n0-9'sStTlLdD\u{17f}_<|>e\u{301}]{0,30}") {
        for text in [format!("{text}{seams}"), format!("{seams}{text}{seams}")] {
            prop_assert_eq!(tokenizer().encode(&text).unwrap(), tokenizer().encode_by_oracle(&text, false).unwrap());
        }
    }
}
