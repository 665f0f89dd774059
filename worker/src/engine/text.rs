//! The text of a sequence as its tokens come: decoded, and cut at stop texts. A rank and rank 0 run the same on the
//! same tokens, so that they agree on where a text ends.

use semmoe_text::{IncrementalDecoder, TextError, Tokenizer};

use super::request::SequenceRequest;
use super::stop::StopText;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct SequenceText {
    decoder: IncrementalDecoder,
    stops: StopText,
    stop_ids: Vec<u32>,
    /// No stop text counts before this many tokens.
    min_new_tokens: u32,
    tokens: u32,
}

impl SequenceText {
    pub(crate) fn new(request: &SequenceRequest) -> Self {
        Self {
            decoder: IncrementalDecoder::new(request.stop.skip_special),
            stops: StopText::new(&request.stop.texts),
            stop_ids: request.stop.token_ids.clone(),
            min_new_tokens: request.min_new_tokens,
            tokens: 0,
        }
    }

    /// Takes the next token: the text that it decides, and the stop text that it completes. A stop token has no text.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<(String, Option<String>), TextError> {
        if self.stop_ids.contains(&token) {
            return Ok((String::new(), None));
        }
        let piece = self.decoder.push(tokenizer, token)?;
        self.tokens = self.tokens.saturating_add(1);
        if self.tokens < self.min_new_tokens {
            return Ok((piece, None));
        }
        let (text, stop) = self.stops.push(&piece);
        Ok((text, stop.map(str::to_owned)))
    }

    /// The text still held back when no more tokens come.
    pub(crate) fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TextError> {
        let rest = self.decoder.finish(tokenizer)?;
        let (text, stop) = self.stops.push(&rest);
        Ok(if stop.is_some() { text } else { text + &self.stops.finish() })
    }
}
