//! The fast encoder, and the self-check that permits its use: `fastokens` reads the same `tokenizer.json` and must
//! match `tokenizers`, the engines' library, on every text of the check.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::encoder::ids_by;
use crate::segments::{SegmentCache, Segments};
use crate::{TextError, self_check};

/// LATIN SMALL LETTER LONG S folds to `s`, so `'ſ` is a contraction under `(?i:'s)`. With the split rule of o200k,
/// fastokens 0.3.5 splits the text after it differently (`ab'ſ'se`), so texts with this letter are left to the oracle.
const LONG_S: char = '\u{17f}';

/// Encodes texts that the fast library cannot, with or without the tokens around a prompt.
pub(crate) type Slow<'a> = &'a dyn Fn(&str, bool) -> Result<Vec<u32>, TextError>;

/// The reason why the fast encoder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NoFastEncoder {
    /// The fast library panicked.
    #[error("it panicked")]
    Panicked,
    /// One of the libraries rejected the tokenizer.
    #[error("{}", crate::encoder::one_line(&.0.to_string()))]
    Library(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The libraries disagree.
    #[error("its ids differ on {0:?}")]
    Differs(String),
    /// The fast library fails on most texts.
    #[error("it fails on most texts")]
    GivesUp,
}

/// The fast encoder of a tokenizer that passed the self-check.
pub(crate) struct Fast {
    inner: fastokens::Tokenizer,
    /// `None` if the library must find added tokens itself, in which case segments are not cached.
    segments: Option<Segments>,
    left_to_oracle: AtomicU64,
}

impl Fast {
    /// Loads `json`, the contents of a `tokenizer.json`, and compares it with `oracle`.
    ///
    /// # Errors
    /// If the kind of tokenizer is unsupported, or the ids of a text differ.
    pub(crate) fn new(json: &[u8], oracle: &tokenizers::Tokenizer) -> Result<Self, NoFastEncoder> {
        let value = serde_json::from_slice(json).map_err(|error| NoFastEncoder::Library(error.into()))?;
        let mut inner = quiet(|| fastokens::Tokenizer::from_json(value))
            .ok_or(NoFastEncoder::Panicked)?
            .map_err(|error| NoFastEncoder::Library(error.into()))?;
        inner.set_truncation(None);
        inner.set_padding(None);
        let mut fast = Self { inner, segments: Segments::new(oracle), left_to_oracle: AtomicU64::new(0) };
        let texts = self_check::texts(oracle);
        for text in &texts {
            for special in [false, true] {
                let expected = oracle.encode_fast(text.as_str(), special).map_err(NoFastEncoder::Library)?;
                if fast.try_whole(text, special).is_some_and(|ids| ids != expected.get_ids()) {
                    return Err(NoFastEncoder::Differs(text.clone()));
                }
                if !special && fast.differs_in_segments(text, expected.get_ids(), oracle) {
                    fast.segments = None;
                }
            }
        }
        // A few of the texts are known to differ, but a library that fails on most texts is not worth using.
        if fast.left_to_oracle.swap(0, Ordering::Relaxed) > texts.len() as u64 {
            return Err(NoFastEncoder::GivesUp);
        }
        Ok(fast)
    }

    fn differs_in_segments(&self, text: &str, expected: &[u32], oracle: &tokenizers::Tokenizer) -> bool {
        let slow = |text: &str, special| ids_by(oracle, text, special);
        self.segments.is_some() && !self.encode(text, false, &slow).is_ok_and(|ids| ids == expected)
    }

    /// Encodes `text`. Texts on which the library fails or is known to be wrong are encoded (and counted) by `slow`.
    /// With `special`, adds the tokens that the tokenizer specifies around a prompt.
    pub(crate) fn encode(&self, text: &str, special: bool, slow: Slow<'_>) -> Result<Vec<u32>, TextError> {
        let whole = |text: &str| match self.try_whole(text, special) {
            Some(ids) => Ok(ids),
            None => slow(text, special),
        };
        match &self.segments {
            Some(segments) if !special => segments.encode(text, whole),
            _ => whole(text),
        }
    }

    fn try_whole(&self, text: &str, special: bool) -> Option<Vec<u32>> {
        let encode = || self.inner.encode_with_special_tokens(text, special);
        let ids = if text.contains(LONG_S) { None } else { quiet(encode).and_then(Result::ok) };
        if ids.is_none() {
            self.left_to_oracle.fetch_add(1, Ordering::Relaxed);
        }
        ids
    }

    /// Caches up to `bytes` bytes of segments between added tokens, such as the earlier turns of a chat.
    pub(crate) fn cache_segments(&mut self, bytes: usize) {
        match &mut self.segments {
            Some(segments) => segments.keep(bytes),
            None => self.inner.enable_segment_cache(bytes),
        }
    }

    pub(crate) fn segment_cache(&self) -> SegmentCache {
        if let Some(segments) = &self.segments {
            return segments.stats();
        }
        let stats = self.inner.segment_cache_stats().unwrap_or_default();
        SegmentCache {
            hits: stats.hits,
            misses: stats.misses,
            hit_bytes: stats.hit_bytes,
            bytes: stats.bytes as u64,
            max_bytes: stats.max_bytes as u64,
        }
    }

    /// Returns the number of texts or parts of texts that the fast library did not encode.
    pub(crate) fn left_to_oracle(&self) -> u64 {
        self.left_to_oracle.load(Ordering::Relaxed)
    }
}

/// Catches a panic of the library, which must not take down the gateway: the oracle then encodes the text.
fn quiet<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
