//! A sequence's text, decoded as tokens arrive and cut at stop texts. A sequence's rank and rank 0 run this on the same
//! tokens, so they agree on where the text ends.

use semmoe_text::{IncrementalDecoder, TextError, Tokenizer};

use super::request::SequenceRequest;
use super::stop::StopText;

/// Decodes a sequence and searches it for stop texts.
#[derive(Clone, Debug)]
pub(crate) struct SequenceText {
    decoder: IncrementalDecoder,
    stops: StopText,
    stop_ids: Vec<u32>,
    /// Stop texts are ignored before this many tokens.
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

    /// Appends the next token; returns the text that it completes and the stop text found, if any. A stop token has no
    /// text.
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

    /// Returns the remaining text at the end of the sequence.
    pub(crate) fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TextError> {
        let rest = self.decoder.finish(tokenizer)?;
        let (text, stop) = self.stops.push(&rest);
        Ok(if stop.is_some() { text } else { text + &self.stops.finish() })
    }
}
