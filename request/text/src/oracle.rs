//! The engines' tokenizer library, which serves as the oracle: loaded from the start, or released until a text needs
//! it.

use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::encoder::{one_line, read_limited};
use crate::{TextError, identity};

/// Size limit of a tokenizer file, in bytes; the largest published ones are about 35 MB.
pub(crate) const FILE_LIMIT_BYTES: u64 = 256 << 20;

/// The oracle of a tokenizer. It occupies tens of MB, and almost no text needs it once the fast library is in use.
pub(crate) struct Oracle {
    loaded: OnceLock<tokenizers::Tokenizer>,
    /// Held by the thread that loads the oracle.
    loading: Mutex<()>,
    /// The file to reload the oracle from.
    path: Option<PathBuf>,
}

impl Oracle {
    pub(crate) fn new(inner: tokenizers::Tokenizer, path: Option<PathBuf>) -> Self {
        Self { loaded: OnceLock::from(inner), loading: Mutex::new(()), path }
    }

    /// Releases the oracle, if it can be loaded again.
    pub(crate) fn leave(&mut self) {
        if self.path.is_some() {
            self.loaded.take();
        }
    }

    /// # Errors
    /// [`TextError::OracleAway`].
    pub(crate) fn get(&self) -> Result<&tokenizers::Tokenizer, TextError> {
        self.loaded.get().ok_or(TextError::OracleAway)
    }

    /// Reloads the tokenizer if it was released; it stays loaded from then on.
    ///
    /// # Errors
    /// If the file is missing, or the tokenizer's digest does not match `sha256`.
    pub(crate) fn load(&self, sha256: &str) -> Result<(), TextError> {
        let _loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let (None, Some(path)) = (self.loaded.get(), &self.path) else { return Ok(()) };
        let json = read_limited(path, FILE_LIMIT_BYTES)?;
        let inner = parse(&json)?;
        let found = identity::sha256(&json, &inner.get_vocab(true))?;
        if found != sha256 {
            return Err(TextError::TokenizerChanged { path: path.clone(), found, expected: sha256.to_owned() });
        }
        // Cannot fail: the lock is held, so no other thread sets the value.
        let _ = self.loaded.set(inner);
        Ok(())
    }
}

/// Parses a `tokenizer.json`, and disables truncation and padding.
pub(crate) fn parse(json: &[u8]) -> Result<tokenizers::Tokenizer, TextError> {
    let unusable = |error: tokenizers::Error| TextError::Tokenizer { reason: one_line(&error.to_string()) };
    let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(unusable)?;
    inner.with_truncation(None).map_err(unusable)?;
    inner.with_padding(None);
    Ok(inner)
}
