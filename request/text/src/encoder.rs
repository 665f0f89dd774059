//! Encodes text to ids: the part of a tokenizer that a gateway needs.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::fast::{Fast, NoFastEncoder};
use crate::oracle::{self, Oracle};
use crate::segments::SegmentCache;
use crate::slices::{Around, slices};
use crate::{TextError, identity};

/// Slice size for long texts: about a millisecond of work per slice.
const SLICE_BYTES: usize = 64 << 10;

/// Encodes prompts with one tokenizer. The truncation and padding settings of the tokenizer file are disabled.
pub struct PromptEncoder {
    oracle: Oracle,
    fast: Result<Fast, NoFastEncoder>,
    /// The ids added around a prompt; `None` if texts must not be cut.
    around: Option<Around>,
    vocab_size: u32,
    sha256: String,
}

impl std::fmt::Debug for PromptEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PromptEncoder").field("vocab_size", &self.vocab_size).field("sha256", &self.sha256).finish()
    }
}

impl PromptEncoder {
    /// Creates an encoder from the contents of a `tokenizer.json` and the path of that file.
    pub(crate) fn new(json: &[u8], path: Option<PathBuf>) -> Result<Self, TextError> {
        let inner = oracle::parse(json)?;
        let vocab = inner.get_vocab(true);
        let Some(last) = vocab.values().max().copied() else {
            return Err(TextError::Tokenizer { reason: "its vocabulary is empty".into() });
        };
        let vocab_size = last
            .checked_add(1)
            .ok_or_else(|| TextError::Tokenizer { reason: format!("its largest id {last} is out of range") })?;
        let sha256 = identity::sha256(json, &vocab)?;
        let fast = Fast::new(json, &inner);
        let around = Around::new(&inner);
        Ok(Self { oracle: Oracle::new(inner, path), fast, around, vocab_size, sha256 })
    }

    /// Releases the oracle if the fast library is in use and the oracle can be loaded again.
    pub(crate) fn leave_oracle(&mut self) {
        if self.fast.is_ok() {
            self.oracle.leave();
        }
    }

    /// Reloads the oracle if it was released, which takes a few tenths of a second and tens of MB.
    ///
    /// # Errors
    /// If the file is missing, or now contains a different tokenizer.
    pub fn load_oracle(&self) -> Result<(), TextError> {
        self.oracle.load(&self.sha256)
    }

    pub(crate) fn inner(&self) -> Result<&tokenizers::Tokenizer, TextError> {
        self.oracle.get()
    }

    /// Encodes `text`. Special tokens written in the text are recognised; none are added around it.
    ///
    /// # Errors
    /// [`TextError`] if the tokenizer rejects the text, or if the text needs the oracle while it is released.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_with(text, false)
    }

    /// Encodes like [`Self::encode`] and, if `special`, adds the special tokens that the tokenizer file specifies
    /// around a prompt (such as BOS), as engines do; chat templates write their own. A text of more than 64 KiB is
    /// encoded in slices, and encoding stops when `keep_on` returns false before a slice. A text without line ends is a
    /// single slice, and so is every text if slicing would change the tokenizer's ids ([`Self::cuts_long_texts`]).
    ///
    /// # Errors
    /// [`TextError::GivenUp`] if `keep_on` returns false, [`TextError::OracleAway`] if the text needs the oracle.
    pub fn encode_while(
        &self,
        text: &str,
        special: bool,
        keep_on: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u32>, TextError> {
        self.encode_in_slices(text, special, SLICE_BYTES, keep_on)
    }

    /// Like [`Self::encode_while`], with slices of at least `slice_bytes` bytes.
    ///
    /// # Errors
    /// The errors of [`Self::encode_while`].
    pub fn encode_in_slices(
        &self,
        text: &str,
        special: bool,
        slice_bytes: usize,
        keep_on: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u32>, TextError> {
        let mut go_on = |done_bytes: usize| {
            if keep_on() { Ok(()) } else { Err(TextError::GivenUp { done_bytes, all_bytes: text.len() }) }
        };
        let around = match &self.around {
            Some(around) if text.len() > slice_bytes => around,
            _ => {
                go_on(0)?;
                return self.encode_with(text, special);
            }
        };
        let mut ids = if special { around.before.clone() } else { Vec::new() };
        let mut done_bytes = 0;
        for slice in slices(text, slice_bytes) {
            go_on(done_bytes)?;
            ids.extend(self.encode_with(slice, false)?);
            done_bytes += slice.len();
        }
        if special {
            ids.extend_from_slice(&around.after);
        }
        Ok(ids)
    }

    /// Returns whether long texts are encoded in slices.
    pub fn cuts_long_texts(&self) -> bool {
        self.around.is_some()
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        match &self.fast {
            // If nothing is added around a prompt, encode it like any other text, so that its turns hit the cache.
            Ok(fast) => {
                let special = special && self.around != Some(Around::default());
                fast.encode(text, special, &|text, special| self.encode_by_oracle(text, special))
            }
            Err(_) => self.encode_by_oracle(text, special),
        }
    }

    /// Like [`Self::encode_while`], but encodes with the engines' own library.
    ///
    /// # Errors
    /// [`TextError::OracleAway`], and the library's own errors.
    pub fn encode_by_oracle(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        ids_by(self.inner()?, text, special)
    }

    /// Checks whether the fast library is in use, i.e. whether it matched the oracle in the self-check at load time. If
    /// not, the oracle encodes, which is several times slower.
    ///
    /// # Errors
    /// The reason why the fast library is not used.
    pub fn is_fast(&self) -> Result<(), &NoFastEncoder> {
        self.fast.as_ref().map(|_| ())
    }

    /// Caches ids within `bytes` bytes (text, ids and overhead), so that the next turn of a chat only has to encode its
    /// new text. Text between two added tokens is encoded separately and cached by its content, regardless of context.
    /// Zero disables the cache. The oracle has no cache.
    pub fn cache_segments(&mut self, bytes: usize) {
        if let Ok(fast) = &mut self.fast {
            fast.cache_segments(bytes);
        }
    }

    /// Returns the statistics of the segment cache, or zeros if there is none.
    pub fn segment_cache(&self) -> SegmentCache {
        self.fast.as_ref().map_or_else(|_| SegmentCache::default(), Fast::segment_cache)
    }

    /// Returns the number of texts or parts of texts encoded by the oracle because the fast library failed or is known
    /// to differ.
    pub fn left_to_oracle(&self) -> u64 {
        self.fast.as_ref().map_or(0, Fast::left_to_oracle)
    }

    /// Returns the largest id plus one, including added tokens. A model's embedding may have more rows.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Returns the SHA-256 over the canonical vocabulary, merges and added tokens, in lower-case hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

/// Reads a file, but rejects one of more than `limit` bytes.
pub(crate) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, TextError> {
    let read = |source| TextError::Read { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(read)?;
    let bytes = file.metadata().map_err(read)?.len();
    if bytes > limit {
        return Err(TextError::FileTooLarge { path: path.to_owned(), bytes, limit });
    }
    let mut contents = Vec::new();
    file.take(limit).read_to_end(&mut contents).map_err(read)?;
    Ok(contents)
}

/// Encodes a text with the engines' own library.
pub(crate) fn ids_by(library: &tokenizers::Tokenizer, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
    match library.encode_fast(text, special) {
        Ok(encoding) => Ok(encoding.get_ids().to_vec()),
        Err(error) => Err(TextError::Tokenize { action: "encode", reason: one_line(&error.to_string()) }),
    }
}

/// Joins a library's message into one line.
pub(crate) fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}
