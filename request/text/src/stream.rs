//! Decodes ids to text as they arrive, never splitting a character.

use crate::{TextError, Tokenizer};

/// Number of trailing U+FFFD that may still become one character: UTF-8 uses at most four bytes.
const HELD_BACK: usize = 4;
/// Once this many ids are undecided, the window is cut wherever that is provably safe.
const WINDOW_LIMIT: usize = 32;

/// Decodes ids to text piece by piece. The concatenated pieces equal decoding all ids at once, for tokenizers whose
/// decoder works on bytes; with SentencePiece byte fallback, it shows valid characters where the library would discard
/// a run.
///
/// Bytes of an unfinished character are held back until they are decided.
#[derive(Debug, Clone)]
pub struct IncrementalDecoder {
    skip_special: bool,
    /// Ids still needed: context first, then those not fully emitted.
    window: Vec<u32>,
    /// Where the context ends in `window`.
    read: usize,
    /// Bytes of the window's text already emitted.
    emitted: usize,
}

impl IncrementalDecoder {
    /// Starts a text; `skip_special` omits special tokens.
    pub fn new(skip_special: bool) -> Self {
        Self { skip_special, window: Vec::new(), read: 0, emitted: 0 }
    }

    /// Takes one id and returns the text that it completes, often none. Ids outside the vocabulary are ignored, as in
    /// [`Tokenizer::decode`].
    ///
    /// # Errors
    /// `TextError` if the tokenizer's decoder fails.
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
            // Some decoders treat the first token of a text differently, so one round of ids is kept as context.
            let context = self.read;
            self.read = self.window.len() - context;
            self.window.drain(..context);
            self.emitted = self.text(tokenizer, &self.window)?.len();
        } else if self.window.len() > WINDOW_LIMIT {
            self.cut(tokenizer, &text)?;
        }
        Ok(piece)
    }

    /// Returns the text still held back, i.e. the decoding of an unfinished character, and resets the decoder.
    ///
    /// # Errors
    /// Those of [`Self::push`].
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TextError> {
        let text = self.text(tokenizer, &self.window)?;
        let piece = text.get(self.emitted..).unwrap_or_default().to_owned();
        *self = Self::new(self.skip_special);
        Ok(piece)
    }

    fn text(&self, tokenizer: &Tokenizer, ids: &[u32]) -> Result<String, TextError> {
        tokenizer.decode_with(ids, self.skip_special)
    }

    /// Cuts a stream of broken bytes, which would never settle: where both sides decode to the same text as the whole,
    /// far enough from the end that the right side has decided bytes of its own.
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
