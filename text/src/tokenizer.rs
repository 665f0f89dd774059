//! A Hugging Face `tokenizer.json`, loaded once and shared.

use std::io::Read as _;
use std::path::Path;

use crate::fast::{Fast, SegmentCache};
use crate::slices::{Around, slices};
use crate::{TextError, identity, pieces};

/// The largest file taken for a tokenizer, in bytes; the largest published ones have about 35 MB.
const FILE_LIMIT_BYTES: u64 = 256 << 20;

/// A long text is encoded in slices of this size, a millisecond each.
const SLICE_BYTES: usize = 64 << 10;

/// A tokenizer: text to ids and back. Truncation and padding that the file may ask for are switched off.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    fast: Result<Fast, String>,
    /// `None` if texts must not be cut.
    around: Option<Around>,
    vocab_size: u32,
    sha256: String,
}

/// Which library encodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoder<'a> {
    /// The fast one: it equalled the oracle on the self-check when the tokenizer was loaded.
    Fast,
    /// The oracle, several times slower.
    Oracle {
        /// Why not the fast one.
        reason: &'a str,
    },
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size).field("sha256", &self.sha256).finish()
    }
}

impl Tokenizer {
    /// Loads a `tokenizer.json`.
    pub fn from_file(path: &Path) -> Result<Self, TextError> {
        Self::from_bytes(&read_limited(path, FILE_LIMIT_BYTES)?)
    }

    /// Loads the contents of a `tokenizer.json`.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TextError> {
        let unusable = |error: tokenizers::Error| TextError::Tokenizer { reason: one_line(&error.to_string()) };
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(unusable)?;
        inner.with_truncation(None).map_err(unusable)?;
        inner.with_padding(None);
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
        Ok(Self { inner, fast, around, vocab_size, sha256 })
    }

    /// The ids of `text`. Special tokens written in the text are recognised; none are added around it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_with(text, false)
    }

    /// The ids of a prompt that is a text: with the special tokens that the tokenizer's file puts around one (a model may
    /// begin with BOS), as engines add them. A chat template writes its own.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_with(text, true)
    }

    /// As [`Self::encode_prompt`] with `special`, else as [`Self::encode`]: the same ids, but a text of more than 64 KiB is encoded
    /// in slices, and before each of them `keep_on` is asked whether anybody still wants it. A text without line ends, and every text
    /// of a tokenizer whose ids would notice ([`Self::cuts_long_texts`]), is one slice.
    ///
    /// # Errors
    /// [`TextError::GivenUp`] when `keep_on` says no.
    pub fn encode_while(
        &self,
        text: &str,
        special: bool,
        keep_on: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u32>, TextError> {
        self.encode_slices(text, special, SLICE_BYTES, keep_on)
    }

    fn encode_slices(
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

    /// The ids by slices of at least so many bytes, whatever the text's length: to be compared with whole ones.
    pub fn encode_in_slices(&self, text: &str, special: bool, slice_bytes: usize) -> Result<Vec<u32>, TextError> {
        self.encode_slices(text, special, slice_bytes, &mut || true)
    }

    /// Whether long texts are encoded in slices.
    pub fn cuts_long_texts(&self) -> bool {
        self.around.is_some()
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        match self.fast.as_ref().ok().and_then(|fast| fast.encode(text, special)) {
            Some(ids) => Ok(ids),
            None => self.oracle(text, special),
        }
    }

    /// The ids of [`Self::encode_prompt`] with `special`, else of [`Self::encode`], by the library that the engines use.
    pub fn encode_by_oracle(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        self.oracle(text, special)
    }

    fn oracle(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        match self.inner.encode_fast(text, special) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(TextError::Tokenize { action: "encode", reason: one_line(&error.to_string()) }),
        }
    }

    /// Which library encodes, and why.
    pub fn encoder(&self) -> Encoder<'_> {
        match &self.fast {
            Ok(_) => Encoder::Fast,
            Err(reason) => Encoder::Oracle { reason },
        }
    }

    /// Keeps ids for up to `bytes` bytes (text, ids and overhead), so that the next turn of a chat costs what is new in it.
    /// Text between two added tokens is encoded on its own; its ids are found again by the text itself, whatever stood around
    /// it. Zero switches this off. The oracle has no such cache.
    pub fn cache_segments(&mut self, bytes: usize) {
        if let Ok(fast) = &mut self.fast {
            fast.cache_segments(bytes);
        }
    }

    /// What that cache did so far; zeros without one.
    pub fn segment_cache(&self) -> SegmentCache {
        self.fast.as_ref().map_or_else(|_| SegmentCache::default(), Fast::segment_cache)
    }

    /// Texts so far that the fast library gave up on or is known to encode differently: the oracle encoded them.
    pub fn left_to_oracle(&self) -> u64 {
        self.fast.as_ref().map_or(0, Fast::left_to_oracle)
    }

    /// The text of `ids`, special tokens included. Ids that are not in the vocabulary count as nothing; bytes that are not
    /// UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        self.decode_with(ids, false)
    }

    /// As [`Self::decode`], leaving out special tokens if `skip_special`.
    pub fn decode_with(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        self.inner
            .decode(ids, skip_special)
            .map_err(|error| TextError::Tokenize { action: "decode", reason: one_line(&error.to_string()) })
    }

    /// The largest id plus one, added tokens included. A model's embedding may have more rows.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// SHA-256 over the canonical vocabulary, merges and added tokens, in lower-case hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The id of a token written as the vocabulary writes it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token of an id, as the vocabulary writes it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The vocabulary as text: one string per id below [`Self::vocab_size`], with [`SPACE_MARK`](crate::SPACE_MARK) for a
    /// leading space and `<0xE4>` for a byte that is not text by itself; empty for an id without a token, and for special tokens.
    pub fn pieces(&self) -> Vec<String> {
        pieces::pieces(&self.inner, self.vocab_size)
    }

    /// Whether an id is an added token marked special.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary();
        added.simple_id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }
}

/// A whole file, refused above `limit` bytes.
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

/// Library messages may span lines; ours are one sentence.
pub(crate) fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}
