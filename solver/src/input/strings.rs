//! The strings of a vocabulary's tokens.

use semmoe_tables::ModelInfo;

use crate::input::error::SolveError;

/// One string per token id, as evidence for the routing of tokens seen rarely or never.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenStrings {
    strings: Vec<String>,
    tokenizer_sha256: Option<String>,
}

impl TokenStrings {
    /// Creates token strings from the visible string of each id, with U+2581 for a leading space, and the tokenizer's
    /// identity as in [`ModelInfo`]. An empty string resembles no other.
    pub fn new(strings: Vec<String>, tokenizer_sha256: Option<String>) -> Self {
        TokenStrings { strings, tokenizer_sha256 }
    }

    /// Checks that the tokenizer can be the model's: equal identities if both are known, and no more tokens than the
    /// model has rows. A model may have more rows than tokens.
    pub(crate) fn check(&self, model: &ModelInfo) -> Result<(), SolveError> {
        if let (Some(found), Some(expected)) = (&self.tokenizer_sha256, &model.tokenizer_sha256)
            && found != expected
        {
            return Err(SolveError::OtherTokenizer { found: found.clone(), expected: expected.clone() });
        }
        if self.strings.len() > model.vocab_size as usize {
            return Err(SolveError::TokenizerTooLarge { found: self.strings.len(), expected: model.vocab_size });
        }
        Ok(())
    }

    pub(crate) fn get(&self, token: usize) -> &str {
        self.strings.get(token).map_or("", String::as_str)
    }
}
