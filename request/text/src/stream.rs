//! Decodes ids to text as they arrive, without ever splitting a character.

use crate::{TextError, Tokenizer};

/// Number of trailing U+FFFD that may still become one character: UTF-8 uses at most four bytes.
const HELD_BACK: usize = 4;
/// Once this many ids are undecided, the window is cut wherever that is provably safe.
const WINDOW_LIMIT: usize = 32;

/// Decodes ids to text piece by piece. For tokenizers whose decoder works on bytes, the concatenated pieces equal the
/// text of all ids decoded at once. With SentencePiece byte fallback, the decoder emits valid characters where the
/// library would discard a run of bytes.
///
/// Bytes of an unfinished character are held back until the character is complete or invalid.
#[derive(Debug, Clone)]
pub struct IncrementalDecoder {
    skip_special: bool,
    /// The ids still needed: first the context, then ids whose text is not fully emitted.
    window: Vec<u32>,
    /// End of the context in `window`.
    read: usize,
    /// Number of bytes of the window's text already emitted.
    emitted: usize,
}

impl IncrementalDecoder {
    /// Creates a decoder for one text; `skip_special` omits special tokens.
    pub fn new(skip_special: bool) -> Self {
        Self { skip_special, window: Vec::new(), read: 0, emitted: 0 }
    }

    /// Adds one id and returns the text that it completes, which is often empty. Ids outside the vocabulary are
    /// ignored, as in [`Tokenizer::decode`].
    ///
    /// # Errors
    /// [`TextError`] if the tokenizer's decoder fails.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, TextError> {
        let unknown = tokenizer.id_to_token(id).is_none();
        if unknown || (self.skip_special && tokenizer.is_special(id)) {
            return Ok(String::new());
        }
        self.window.push(id);
        let text = self.text(tokenizer, &self.window)?;
        let decided = text.trim_end_matches('\u{fffd}').len();
        let held = text[decided..].chars().count();
        let keep = held.min(HELD_BACK);
        let stable = text.len() - keep * '\u{fffd}'.len_utf8();
        let piece = text.get(self.emitted..stable).unwrap_or_default().to_owned();
        self.emitted = self.emitted.max(stable);
        if keep == 0 {
            // Some decoders treat the first token of a text differently, so the ids of the previous round are retained
            // as context.
            let context = self.read;
            self.read = self.window.len() - context;
            self.window.drain(..context);
            self.emitted = self.text(tokenizer, &self.window)?.len();
        } else if self.window.len() > WINDOW_LIMIT {
            self.cut(tokenizer, &text)?;
        }
        Ok(piece)
    }

    /// Returns the text still held back, i.e. that of an unfinished character, and resets the decoder.
    ///
    /// # Errors
    /// The errors of [`Self::push`].
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TextError> {
        let text = self.text(tokenizer, &self.window)?;
        let piece = text.get(self.emitted..).unwrap_or_default().to_owned();
        *self = Self::new(self.skip_special);
        Ok(piece)
    }

    fn text(&self, tokenizer: &Tokenizer, ids: &[u32]) -> Result<String, TextError> {
        tokenizer.decode_with(ids, self.skip_special)
    }

    /// Cuts the window in a stream of invalid bytes, which would otherwise grow forever. The cut is at a position where
    /// both sides decode to the same text as the whole, far enough from the end that part of the right side's text is
    /// final.
    fn cut(&mut self, tokenizer: &Tokenizer, text: &str) -> Result<(), TextError> {
        let unemitted = text.len() - self.emitted;
        let from = self.window.len().saturating_sub(2 * HELD_BACK);
        for at in (1..=from).rev() {
            let (left, right) = (self.text(tokenizer, &self.window[..at])?, self.text(tokenizer, &self.window[at..])?);
            let decided = right.chars().count() > HELD_BACK && right.len() >= unemitted;
            if decided && text.strip_prefix(&left) == Some(&right) {
                self.window.drain(..at);
                self.read = 0;
                self.emitted = right.len() - unemitted;
                return Ok(());
            }
        }
        Ok(())
    }
}
