//! The identity of a tokenizer: a SHA-256 over everything that determines its ids, independent of the file's layout.
//!
//! The hash covers these parts, each prefixed by its length: every token with its id, sorted by token (including added
//! tokens); the merges in order; the added tokens by id with their matching flags.

use std::collections::HashMap;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::TextError;

#[derive(Deserialize)]
struct File {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default)]
    merges: Vec<Merge>,
}

/// Older files write a merge as "a b", newer ones as ["a", "b"].
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Joined(String),
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
}

/// Returns the identity of the tokenizer in `json` with the full vocabulary `vocab`, as lower-case hex.
pub(crate) fn sha256(json: &[u8], vocab: &HashMap<String, u32>) -> Result<String, TextError> {
    let file: File =
        serde_json::from_slice(json).map_err(|error| TextError::Tokenizer { reason: error.to_string() })?;
    let mut hash = Sha256::new();
    hash.update(b"semmoe.tokenizer.1\n");

    let mut tokens: Vec<(&str, u32)> = vocab.iter().map(|(token, id)| (token.as_str(), *id)).collect();
    tokens.sort_unstable();
    section(&mut hash, b"vocab", tokens.len());
    for (token, id) in tokens {
        text(&mut hash, token);
        hash.update(id.to_le_bytes());
    }

    section(&mut hash, b"merges", file.model.merges.len());
    for merge in &file.model.merges {
        let (left, right) = match merge {
            Merge::Pair(left, right) => (left.as_str(), right.as_str()),
            Merge::Joined(both) => both.split_once(' ').unwrap_or((both, "")),
        };
        text(&mut hash, left);
        text(&mut hash, right);
    }

    let mut added = file.added_tokens;
    added.sort_by(|a, b| (a.id, &a.content).cmp(&(b.id, &b.content)));
    section(&mut hash, b"added", added.len());
    for token in &added {
        hash.update(token.id.to_le_bytes());
        text(&mut hash, &token.content);
        hash.update([token.single_word, token.lstrip, token.rstrip, token.normalized].map(u8::from));
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn section(hash: &mut Sha256, name: &[u8], count: usize) {
    hash.update(name);
    hash.update((count as u64).to_le_bytes());
}

fn text(hash: &mut Sha256, text: &str) {
    hash.update((text.len() as u64).to_le_bytes());
    hash.update(text.as_bytes());
}
