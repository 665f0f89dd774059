//! Errors that prevent a prompt from being sent.

use std::error::Error;

use semmoe_text::TextError;

/// The record is not a prompt, or not a valid one for this engine.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PromptError {
    /// The line is not a record.
    #[error("{0}")]
    Line(#[source] Box<dyn Error + Send + Sync>),
    /// The prompt cannot be rendered or tokenized.
    #[error(transparent)]
    Text(#[from] TextError),
    #[error("{0}")]
    Unusable(&'static str),
    #[error("token id {id} is not below the vocabulary size ({vocabulary})")]
    TokenId { id: u32, vocabulary: u32 },
    #[error("turn {turn} is from {from:?}, expected human, gpt or system")]
    Speaker { turn: usize, from: String },
    #[error("turn {0} has no speaker")]
    NoSpeaker(usize),
    #[error("turn {0} has no text")]
    NoText(usize),
}
