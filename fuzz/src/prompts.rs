//! Bodies of requests to ids.

use std::path::PathBuf;
use std::sync::LazyLock;

use semmoe_text::{ChatTemplate, Limits, Prompt, Route, Tokenizer, prompt_ids};

/// The bundled model's.
static MODEL: LazyLock<(Tokenizer, ChatTemplate)> = LazyLock::new(|| {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-qwen3moe-15m");
    let broken = |error| panic!("the bundled model cannot be read: {error}");
    let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap_or_else(broken);
    let template = ChatTemplate::from_config_file(&folder.join("tokenizer_config.json"));
    (tokenizer, template.unwrap_or_else(|error| panic!("the bundled model cannot be read: {error}")))
});

/// A body of any route is refused with a reason, or becomes ids: those of the oracle.
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

/// A text has the oracle's ids, whole and in slices.
pub fn tokens(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let tokenizer = &MODEL.0;
    for special in [false, true] {
        let expected = oracle(&text, special);
        let whole = tokenizer.encode_while(&text, special, &mut || true);
        assert_eq!(whole.ok().as_ref(), Some(&expected), "{text:?}");
        for least in [0, 7] {
            assert_eq!(tokenizer.encode_in_slices(&text, special, least).ok().as_ref(), Some(&expected), "{text:?}");
        }
    }
}

fn oracle(text: &str, special: bool) -> Vec<u32> {
    MODEL.0.encode_by_oracle(text, special).unwrap_or_else(|error| panic!("the oracle fails: {error}"))
}
