//! Long texts in slices: the ids are unchanged, and work stops once the client is gone.

use proptest::prelude::*;
use semmoe_text::{Limits, Prompt, TextError, Tokenizer, prompt_ids_while};
use serde_json::json;

use crate::{BOS, file, load};

/// A tokenizer that begins and ends every prompt with a token.
fn with_borders() -> Tokenizer {
    let id = load(&file()).token_to_id(BOS).unwrap();
    let mut with = file();
    let border = json!({ "SpecialToken": { "id": BOS, "type_id": 0 } });
    with["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [border, { "Sequence": { "id": "A", "type_id": 0 } }, border],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { BOS: { "id": BOS, "ids": [id], "tokens": [BOS] } },
    });
    load(&with)
}

#[test]
fn what_a_tokenizer_puts_around_a_prompt_stands_around_all_slices() {
    let tokenizer = with_borders();
    assert!(tokenizer.cuts_long_texts());
    let text = "a river\nThe sea.\n1 more\n\nlast";
    for special in [false, true] {
        let expected = tokenizer.encode_by_oracle(text, special).unwrap();
        assert_eq!(tokenizer.encode_in_slices(text, special, 1, &mut || true).unwrap(), expected);
    }
}

#[test]
fn work_is_given_up_between_slices() {
    let tokenizer = load(&file());
    let text = "Far out in the river there was a boat.\n".repeat(10_000);
    let mut asked = 0;
    let mut thrice = || {
        asked += 1;
        asked <= 3
    };
    let prompt = Prompt::Texts(vec![text.clone()]);
    let error = prompt_ids_while(&prompt, &tokenizer, None, Limits::default(), &mut thrice).unwrap_err();
    let TextError::GivenUp { done_bytes, all_bytes } = error else { panic!("{error}") };
    assert!((3 * 65_536..4 * 65_536).contains(&done_bytes), "{done_bytes}");
    assert_eq!(all_bytes, text.len());
    assert_eq!(
        tokenizer.encode_while(&text, true, &mut || true).unwrap(),
        tokenizer.encode_in_slices(&text, true, usize::MAX, &mut || true).unwrap()
    );
}

/// Each of these would produce other ids in slices.
#[test]
fn a_tokenizer_whose_ids_would_notice_is_never_cut() {
    let mut prefix_space = file();
    prefix_space["pre_tokenizer"] =
        json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    let mut with_line_end = file();
    let mut token = with_line_end["added_tokens"][0].clone();
    token["content"] = json!("x\ny");
    token["id"] = json!(
        with_line_end["added_tokens"].as_array().unwrap().iter().map(|t| t["id"].as_u64().unwrap()).max().unwrap() + 1
    );
    with_line_end["added_tokens"].as_array_mut().unwrap().push(token.clone());
    let mut strips = file();
    token["content"] = json!("stop");
    token["lstrip"] = json!(true);
    strips["added_tokens"].as_array_mut().unwrap().push(token);
    for (file, text) in [(prefix_space, "a\nriver"), (with_line_end, "ax\nyb"), (strips, "river\nstop")] {
        let tokenizer = load(&file);
        assert!(!tokenizer.cuts_long_texts());
        let whole = tokenizer.encode_by_oracle(text, false).unwrap();
        let cut = text.split_inclusive('\n').flat_map(|slice| tokenizer.encode_by_oracle(slice, false).unwrap());
        assert_ne!(cut.collect::<Vec<_>>(), whole, "{text:?} does not show why");
        assert_eq!(tokenizer.encode_in_slices(text, false, 1, &mut || true).unwrap(), whole);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn slices_have_the_ids_of_the_whole(text in "(\\PC{0,6}|[a-z. ]{0,4}|<\\|im_|'s|\n|\r|/|\u{301}){0,24}", least in 0usize..9) {
        static TOKENIZERS: std::sync::LazyLock<[Tokenizer; 2]> = std::sync::LazyLock::new(|| [load(&file()), with_borders()]);
        for tokenizer in &*TOKENIZERS {
            let expected = tokenizer.encode_by_oracle(&text, true).unwrap();
            prop_assert_eq!(tokenizer.encode_in_slices(&text, true, least, &mut || true).unwrap(), expected);
        }
    }
}
