//! The strings of a vocabulary: the bundled byte-level one against the decoder, a SentencePiece-like one by hand.

use semmoe_text::{SPACE_MARK, Tokenizer};
use serde_json::json;

use crate::model;

fn bundled() -> Tokenizer {
    Tokenizer::from_file(&model("tokenizer.json")).unwrap()
}

#[test]
fn byte_level_pieces_are_what_the_decoder_says() {
    let tokenizer = bundled();
    let pieces = tokenizer.pieces();
    assert_eq!(pieces.len(), tokenizer.vocab_size() as usize);
    let mut compared = 0;
    for (id, piece) in (0u32..).zip(&pieces) {
        let decoded = tokenizer.decode(&[id]).unwrap();
        if tokenizer.is_special(id) || decoded.contains('\u{fffd}') {
            continue;
        }
        let expected = match decoded.strip_prefix(' ') {
            Some(rest) => format!("{SPACE_MARK}{rest}"),
            None => decoded,
        };
        assert_eq!(piece, &expected, "id {id}");
        compared += 1;
    }
    assert!(compared > 9_000, "{compared}");
}

#[test]
fn bytes_that_are_no_text_are_named_and_special_tokens_have_no_string() {
    let tokenizer = bundled();
    let pieces = tokenizer.pieces();
    // Byte 0xE4 is U+00E4 in GPT-2's table.
    let byte = tokenizer.token_to_id("\u{e4}").unwrap();
    assert_eq!(pieces[byte as usize], "<0xE4>");
    let special = tokenizer.token_to_id("<|im_start|>").unwrap();
    assert_eq!(pieces[special as usize], "");
}

#[test]
fn sentencepiece_pieces_are_the_tokens_themselves() {
    let file = json!({
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "byte_fallback": true, "unk_token": null,
                  "vocab": {"<s>": 0, "<0xE4>": 1, "\u{2581}": 2, "a": 3, "\u{2581}a": 4, "\u{e4}": 6},
                  "merges": ["\u{2581} a"]}
    });
    let tokenizer = Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap();
    assert_eq!(tokenizer.pieces(), ["", "<0xE4>", "\u{2581}", "a", "\u{2581}a", "", "\u{e4}"]);
}
