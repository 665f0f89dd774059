//! Added tokens: put around prompts as the tokenizer's file says, and used as boundaries of cached segments.

use std::sync::{LazyLock, Mutex};

use proptest::prelude::*;
use semmoe_text::{ChatTemplate, Limits, Prompt, Route, Tokenizer, prompt_ids};
use serde_json::{Value, json};

use crate::{BOS, file, load};

#[test]
fn a_text_begins_with_bos_where_the_file_says_so_and_a_chat_does_not() {
    let plain = load(&file());
    let bos = plain.token_to_id(BOS).unwrap();
    let mut with_bos = file();
    with_bos["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": BOS, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { BOS: { "id": BOS, "ids": [bos], "tokens": [BOS] } },
    });
    let with_bos = load(&with_bos);
    let template =
        ChatTemplate::from_source("{% for m in messages %}{{ m.content }}{% endfor %}", &Value::Null, || 0).unwrap();
    let ids = |tokenizer: &Tokenizer, route, body: Value| {
        let prompt = Prompt::from_json(route, &body).unwrap();
        prompt_ids(&prompt, tokenizer, Some(&template), Limits::default()).unwrap().concat()
    };
    let text = plain.encode("a river").unwrap();
    let begun = [&[bos], &text[..]].concat();
    let chat = json!({ "messages": [{ "role": "user", "content": "a river" }] });
    for (tokenizer, completion) in [(&plain, &text), (&with_bos, &begun)] {
        assert_eq!(&ids(tokenizer, Route::Completions, json!({ "prompt": "a river" })), completion);
        assert_eq!(&ids(tokenizer, Route::Generate, json!({ "text": "a river" })), completion);
        assert_eq!(ids(tokenizer, Route::Chat, chat.clone()), text);
        assert_eq!(ids(tokenizer, Route::Completions, json!({ "prompt": text })), text, "ids are taken as they are");
    }
}

#[test]
fn only_text_is_known_as_such() {
    for (content, expected) in [
        (json!("a"), true),
        (json!(["a", { "type": "text", "text": "b" }]), true),
        (json!([{ "type": "image_url", "image_url": { "url": "x" } }]), false),
        (json!([{ "type": "text", "text": "b" }, { "type": "input_audio" }]), false),
        (Value::Null, true),
    ] {
        let body = json!({ "messages": [{ "role": "user", "content": content }] });
        assert_eq!(Prompt::from_json(Route::Chat, &body).unwrap().is_text_only(), expected, "{body}");
    }
    assert!(Prompt::Texts(vec!["a".into()]).is_text_only());
}

/// Loaded only once, as that takes longer than all texts.
static BOTH: LazyLock<Mutex<[Tokenizer; 2]>> = LazyLock::new(|| Mutex::new([load(&file()), load(&file())]));

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Chats that grow, shrink and change, through a cache that is large, and one that is always full.
    #[test]
    fn a_segment_found_again_has_the_oracles_ids(
        chats in prop::collection::vec(prop::collection::vec("(the river|'s| {0,3}|[a-z\n]{0,6}|中é1|<\\|im_){0,5}", 1..6), 1..12)
    ) {
        let mut both = BOTH.lock().unwrap();
        let [large, small] = &mut *both;
        prop_assert!(large.is_fast().is_ok());
        // Empty both caches.
        large.cache_segments(1 << 20);
        small.cache_segments(1 << 12);
        for _ in 0..2 {
            for chat in &chats {
                let text: String = chat.iter().map(|turn| format!("<|im_start|>user\n{turn}<|im_end|>\n")).collect();
                let expected = large.encode_by_oracle(&text, false).unwrap();
                prop_assert_eq!(large.encode(&text).unwrap(), expected.clone());
                prop_assert_eq!(small.encode(&text).unwrap(), expected);
            }
        }
        prop_assert!(large.segment_cache().hits > 0);
        prop_assert!(large.segment_cache().bytes <= 1 << 20 && small.segment_cache().bytes <= 1 << 12);
    }
}
