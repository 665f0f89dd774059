//! A Hugging Face `tokenizer.json`, loaded once and shared.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};

use crate::encoder::{PromptEncoder, one_line, read_limited};
use crate::oracle::FILE_LIMIT_BYTES;
use crate::{TextError, pieces};

/// A tokenizer, which converts text to ids, through its [`PromptEncoder`], and back.
#[derive(Debug)]
pub struct Tokenizer {
    encoder: PromptEncoder,
}

impl Deref for Tokenizer {
    type Target = PromptEncoder;

    fn deref(&self) -> &PromptEncoder {
        &self.encoder
    }
}

impl DerefMut for Tokenizer {
    fn deref_mut(&mut self) -> &mut PromptEncoder {
        &mut self.encoder
    }
}

/// Returns the tokenizer file for `path`, which may be a checkpoint directory.
pub fn tokenizer_file(path: &Path) -> PathBuf {
    if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() }
}

impl Tokenizer {
    /// Loads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError`] if the file cannot be read or is not a tokenizer.
    pub fn from_file(path: &Path) -> Result<Self, TextError> {
        let json = read_limited(path, FILE_LIMIT_BYTES)?;
        let in_file = |error| match error {
            TextError::Tokenizer { reason } => TextError::Tokenizer { reason: format!("{}: {reason}", path.display()) },
            error => error,
        };
        Ok(Self { encoder: PromptEncoder::new(&json, Some(path.to_owned())).map_err(in_file)? })
    }

    /// Parses the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError`] if the bytes are not a tokenizer.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TextError> {
        Ok(Self { encoder: PromptEncoder::new(json, None)? })
    }

    /// Converts the tokenizer to its encoder, which needs less memory: if the fast library is in use, the engines'
    /// library is released until [`PromptEncoder::load_oracle`] loads it again.
    pub fn into_encoder(mut self) -> PromptEncoder {
        self.encoder.leave_oracle();
        self.encoder
    }

    fn inner(&self) -> &tokenizers::Tokenizer {
        self.encoder.inner().expect("only into_encoder releases the oracle")
    }

    /// Returns the text of `ids`, including special tokens. Ids outside the vocabulary are ignored; bytes that are not
    /// UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TextError`] if the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        self.decode_with(ids, false)
    }

    /// Returns the text of `ids`, like [`Self::decode`], but omits special tokens if `skip_special`.
    ///
    /// # Errors
    /// The errors of [`Self::decode`].
    pub fn decode_with(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        self.inner()
            .decode(ids, skip_special)
            .map_err(|error| TextError::Tokenize { action: "decode", reason: one_line(&error.to_string()) })
    }

    /// Returns the id of a token, as spelled in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner().token_to_id(token)
    }

    /// Returns the token of an id, as spelled in the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner().id_to_token(id)
    }

    /// Returns the bytes of a token, which need not be valid text on their own; empty for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        pieces::token_bytes(self.inner(), id)
    }

    /// Returns the vocabulary as text: one string per id below [`PromptEncoder::vocab_size`], with
    /// [`SPACE_MARK`](crate::SPACE_MARK) for a leading space and `<0xE4>` for a byte that is not text on its own; empty
    /// for ids without a token, and for special tokens.
    pub fn pieces(&self) -> Vec<String> {
        pieces::pieces(self.inner(), self.vocab_size())
    }

    /// Returns whether an id is an added token that is marked special.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner().get_added_vocabulary();
        added.simple_id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }
}
