//! Request bodies to token ids.

use std::path::PathBuf;
use std::sync::LazyLock;

use semmoe_text::{Budget, ChatTemplate, Given, Limits, Prompt, Route, Tokenizer, prompt_ids};
use serde_json::{Value, json};

/// The bundled model's tokenizer and chat template.
static MODEL: LazyLock<(Tokenizer, ChatTemplate)> = LazyLock::new(|| {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-qwen3moe-15m");
    let broken = |error| panic!("the bundled model cannot be read: {error}");
    let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap_or_else(broken);
    let template = ChatTemplate::beside(&folder.join("tokenizer.json"), || 0);
    (tokenizer, template.unwrap_or_else(|error| panic!("the bundled model cannot be read: {error}")))
});

/// A body for any route is refused with a reason, or gives the oracle's ids.
pub fn requests(data: &[u8]) {
    let Ok(body) = serde_json::from_slice(data) else { return };
    let (tokenizer, template) = &*MODEL;
    for route in [Route::Chat, Route::Completions, Route::Generate] {
        let Ok(prompt) = Prompt::from_json(route, &body) else { continue };
        let Ok(ids) = prompt_ids(&prompt, tokenizer, Some(template), Limits::default()) else { continue };
        if let Prompt::Texts(texts) = &prompt {
            for (text, ids) in texts.iter().zip(&ids) {
                assert_eq!(oracle(text, true), *ids, "{text:?}");
            }
        }
    }
}

/// A template, a zero byte and messages: refused with a reason, or rendered within limits on time and memory.
pub fn templates(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (source, messages) = data.split_at(end);
    let Ok(source) = std::str::from_utf8(source) else { return };
    let Ok(template) = ChatTemplate::from_source(source, &Value::Null, || 0) else { return };
    let usual = || json!([{"role": "user", "content": "a b", "x": [1, null, {"k": 0.5}]}]);
    let messages = messages.get(1..).and_then(|json| serde_json::from_slice(json).ok()).unwrap_or_else(usual);
    let budget = Budget { steps: 100_000, bytes: 4 << 20 };
    if let Ok(text) = template.render_as_given(&messages, Given::default(), budget) {
        assert!(text.len() <= budget.bytes, "{source:?}");
    }
    let _ = template.render(&messages, Given { tools: Some(&messages), ..Given::default() }, budget);
    let _ = template.features();
}

/// Encoding a text gives the oracle's ids, whole and in slices.
pub fn tokens(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let tokenizer = &MODEL.0;
    for special in [false, true] {
        let expected = oracle(&text, special);
        let whole = tokenizer.encode_while(&text, special, &mut || true);
        assert_eq!(whole.ok().as_ref(), Some(&expected), "{text:?}");
        for least in [0, 7] {
            assert_eq!(
                tokenizer.encode_in_slices(&text, special, least, &mut || true).ok().as_ref(),
                Some(&expected),
                "{text:?}"
            );
        }
    }
}

fn oracle(text: &str, special: bool) -> Vec<u32> {
    MODEL.0.encode_by_oracle(text, special).unwrap_or_else(|error| panic!("the oracle fails: {error}"))
}
