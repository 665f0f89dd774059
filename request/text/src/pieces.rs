//! The vocabulary in readable form: one string per token id.

use std::sync::OnceLock;

use tokenizers::{AddedVocabulary, DecoderWrapper, PreTokenizerWrapper};

/// The mark for the leading space of a token in SentencePiece vocabularies.
pub const SPACE_MARK: char = '\u{2581}';

/// Returns whether the vocabulary represents bytes as printable characters, as in GPT-2.
pub(crate) fn is_byte_level(inner: &tokenizers::Tokenizer) -> bool {
    let decoder = match inner.get_decoder() {
        Some(DecoderWrapper::ByteLevel(_)) => true,
        Some(DecoderWrapper::Sequence(parts)) => {
            parts.get_decoders().iter().any(|part| matches!(part, DecoderWrapper::ByteLevel(_)))
        }
        _ => false,
    };
    decoder || matches!(inner.get_pre_tokenizer(), Some(PreTokenizerWrapper::ByteLevel(_)))
}

/// Returns the visible string of every id below `vocab_size`; empty for ids without a token, and for special tokens,
/// whose names carry no information.
pub(crate) fn pieces(inner: &tokenizers::Tokenizer, vocab_size: u32) -> Vec<String> {
    let byte_level = is_byte_level(inner);
    let bytes = byte_of_char();
    let added = inner.get_added_vocabulary();
    let piece = |id| match inner.id_to_token(id) {
        None => String::new(),
        Some(token) if added.is_special_token(&token) => String::new(),
        Some(token) if byte_level && !is_added(added, id) => visible(&to_bytes(&token, &bytes)),
        Some(token) => mark_space(&token),
    };
    (0..vocab_size).map(piece).collect()
}

/// Returns the bytes of a token.
pub(crate) fn token_bytes(inner: &tokenizers::Tokenizer, id: u32) -> Vec<u8> {
    static BYTES: OnceLock<Vec<Option<u8>>> = OnceLock::new();
    let Some(token) = inner.id_to_token(id) else { return Vec::new() };
    if is_added(inner.get_added_vocabulary(), id) {
        return token.into_bytes();
    }
    if is_byte_level(inner) {
        return to_bytes(&token, BYTES.get_or_init(byte_of_char));
    }
    // SentencePiece's single-byte tokens.
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace(SPACE_MARK, " ").into_bytes(),
    }
}

fn is_added(added: &AddedVocabulary, id: u32) -> bool {
    added.simple_id_to_token(id).is_some()
}

/// Returns the inverse of GPT-2's byte table: printable bytes represent themselves, the others are characters from
/// U+0100 on.
fn byte_of_char() -> Vec<Option<u8>> {
    let mut bytes = vec![None; 0x144];
    let mut next = 0x100;
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let at = if printable {
            usize::from(byte)
        } else {
            next += 1;
            next - 1
        };
        bytes[at] = Some(byte);
    }
    bytes
}

/// Returns the bytes of a token; characters outside the table are encoded as UTF-8.
fn to_bytes(token: &str, byte_of: &[Option<u8>]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for char in token.chars() {
        match byte_of.get(char as usize).copied().flatten() {
            Some(byte) => bytes.push(byte),
            None => bytes.extend(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

/// Converts bytes to text; bytes that are not valid text appear as, for example, `<0xE4>`.
fn visible(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            text.push_str(&format!("<0x{byte:02X}>"));
        }
    }
    mark_space(&text)
}

fn mark_space(text: &str) -> String {
    match text.strip_prefix(' ') {
        Some(rest) => format!("{SPACE_MARK}{rest}"),
        None => text.to_owned(),
    }
}
