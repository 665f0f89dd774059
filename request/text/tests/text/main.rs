//! Text to ids, tested through the public interface.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod encoder;
mod golden;
mod pieces;
mod slices;
mod special;

use std::path::PathBuf;

use semmoe_text::Tokenizer;
use serde_json::Value;

/// A token that precedes a text if a file says so.
const BOS: &str = "<|endoftext|>";

/// A file of the bundled model.
fn model(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-qwen3moe-15m").join(file)
}

/// The bundled model's tokenizer as JSON, for tests to modify.
fn file() -> Value {
    serde_json::from_slice(&std::fs::read(model("tokenizer.json")).unwrap()).unwrap()
}

fn load(file: &Value) -> Tokenizer {
    Tokenizer::from_bytes(&serde_json::to_vec(file).unwrap()).unwrap()
}
