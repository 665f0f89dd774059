//! The number of token ids that a model accepts. It exceeds the tokenizer's, because embeddings are padded.

use std::io;
use std::path::Path;

use serde_json::Value;

/// Maximum size of `config.json`, which usually has a few kilobytes.
const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// Divisor for the assumed maximum padding, a fraction of the tokenizer's tokens. Padding rows seen: 267 in Qwen3, 465
/// in DeepSeek-V3, 1,069 in gpt-oss, 2,398 of 102,400 in DeepSeek-V2.
const PADDING_SHARE: u32 = 32;
const LEAST_PADDING: u32 = 1024;
/// JSON pointers to the vocabulary size; a multimodal configuration nests the language model's.
const TEXT_CONFIGS: [&str; 5] = [
    "/vocab_size",
    "/text_config/vocab_size",
    "/llm_config/vocab_size",
    "/language_config/vocab_size",
    "/thinker_config/text_config/vocab_size",
];

/// The exclusive upper bound on a model's token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vocabulary {
    /// The number of rows in the model's embedding.
    Known(u32),
    /// An upper bound for any model that uses such a tokenizer.
    AtMost(u32),
}

impl Vocabulary {
    /// Reads the bound from the `config.json` next to the tokenizer at this path, which has `tokens` tokens.
    pub(crate) fn beside(tokenizer: &Path, tokens: u32, model: &str) -> Self {
        let path = tokenizer.with_file_name("config.json");
        let why = match read(&path) {
            Ok(size) => return Self::Known(size),
            Err(why) => why,
        };
        let size = tokens.saturating_add((tokens / PADDING_SHARE).max(LEAST_PADDING));
        let path = path.display().to_string();
        tracing::warn!(model, path, %why, size, "the model's vocabulary size is unknown: ids below this bound are accepted");
        Self::AtMost(size)
    }

    pub(crate) fn size(self) -> u32 {
        match self {
            Self::Known(size) | Self::AtMost(size) => size,
        }
    }
}

fn read(path: &Path) -> io::Result<u32> {
    let length = std::fs::metadata(path)?.len();
    if length > MAX_CONFIG_BYTES {
        return Err(io::Error::other(format!("it has {length} bytes, more than {MAX_CONFIG_BYTES}")));
    }
    let config: Value = serde_json::from_slice(&std::fs::read(path)?)?;
    let size = TEXT_CONFIGS.iter().find_map(|at| config.pointer(at)?.as_u64());
    let size = size.and_then(|size| u32::try_from(size).ok()).filter(|size| *size > 0);
    size.ok_or_else(|| io::Error::other("it has no vocab_size"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_the_models_and_not_the_tokenizers() {
        let folder = tempfile::tempdir().unwrap();
        let of = || Vocabulary::beside(&folder.path().join("tokenizer.json"), 151_669, "m");
        assert_eq!(of(), Vocabulary::AtMost(156_408), "no file");
        for (config, expected) in [
            (r#"{"vocab_size":151936}"#, Vocabulary::Known(151_936)),
            (r#"{"text_config":{"vocab_size":151936},"vision_config":{"vocab_size":1}}"#, Vocabulary::Known(151_936)),
            (r#"{"thinker_config":{"text_config":{"vocab_size":152064}}}"#, Vocabulary::Known(152_064)),
            (r#"{"vocab_size":0}"#, Vocabulary::AtMost(156_408)),
            (r#"{"vocab_size":-1}"#, Vocabulary::AtMost(156_408)),
            (r#"{"vocab_size":99999999999}"#, Vocabulary::AtMost(156_408)),
            ("[1]", Vocabulary::AtMost(156_408)),
            ("{", Vocabulary::AtMost(156_408)),
        ] {
            std::fs::write(folder.path().join("config.json"), config).unwrap();
            assert_eq!(of(), expected, "{config}");
        }
        assert_eq!(Vocabulary::beside(Path::new("/none/tokenizer.json"), 260, "m").size(), 1284);
    }
}
