//! What can go wrong while recording and building.

use std::path::PathBuf;

use semmoe_engines::Engine;
use semmoe_engines::http::HttpError;
use semmoe_tables::FormatError;
use semmoe_text::{PromptLineError, TextError};

/// An error of this crate; every message is one sentence.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfilerError {
    /// An option cannot be used.
    #[error("{option} is {found}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        found: String,
        /// The values allowed.
        expected: &'static str,
    },
    /// Recording from this engine is not built yet.
    #[error("recording from {engine} is not built yet (built: semmoe, sglang)")]
    Engine {
        /// The engine.
        engine: Engine,
    },
    /// The engine was started without routed experts.
    #[error("the engine was started without --enable-return-routed-experts")]
    NoRoutedExperts,
    /// The engine does not tell the model's shape, and the caller did not either.
    #[error("the engine does not tell {field}, which a trace needs; give the model's shape")]
    UnknownModel {
        /// The first field that is missing.
        field: &'static str,
    },
    /// The tokenizer given is not the one of the engine's model.
    #[error("the tokenizer {} is not the engine's: {cause}", path.display())]
    OtherTokenizer {
        /// The file.
        path: PathBuf,
        /// What differs.
        cause: String,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// A line of the prompts file is wrong.
    #[error("{} line {line}: {cause}", path.display())]
    Prompt {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        cause: String,
    },
    /// The prompts file has no prompt.
    #[error("{} holds no prompt", path.display())]
    NoPrompts {
        /// The file.
        path: PathBuf,
    },
    /// Too many answers were missing or wrong; nothing was written.
    #[error(
        "{bad} of {asked} answers were bad, more than {allowed} allowed, and nothing was written; first, line {line}: {reason}"
    )]
    TooManyBad {
        /// Bad ones.
        bad: usize,
        /// Answers so far, bad ones included.
        asked: usize,
        /// Bad ones that would have been allowed for the whole file.
        allowed: usize,
        /// The line of the first one.
        line: usize,
        /// What was wrong with it.
        reason: String,
    },
    /// The caller cancelled; nothing was written.
    #[error("cancelled, and nothing was written")]
    Cancelled,
    /// Nothing to work on.
    #[error("no {what} was given")]
    NoInput {
        /// Traces or profiles.
        what: &'static str,
    },
    /// The engine could not be reached or did not answer as it should.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// A trace or profile is wrong.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A tokenizer or template is wrong.
    #[error(transparent)]
    Text(#[from] TextError),
}

impl From<PromptLineError> for ProfilerError {
    fn from(error: PromptLineError) -> Self {
        match error {
            PromptLineError::Io { path, source } => Self::Io { path, action: "read", source },
            PromptLineError::Line { path, line, cause } => Self::Prompt { path, line, cause },
        }
    }
}

impl ProfilerError {
    /// Whether the caller's options or files are at fault, and not the engine or the machine.
    #[must_use]
    pub fn is_input(&self) -> bool {
        match self {
            Self::Option { .. }
            | Self::Engine { .. }
            | Self::UnknownModel { .. }
            | Self::OtherTokenizer { .. }
            | Self::Prompt { .. }
            | Self::NoPrompts { .. }
            | Self::NoInput { .. }
            | Self::Text(_) => true,
            Self::Io { action, .. } => *action == "read",
            Self::Format(FormatError::Io { source, .. }) => source.kind() == std::io::ErrorKind::NotFound,
            Self::Format(_) => true,
            Self::NoRoutedExperts | Self::TooManyBad { .. } | Self::Cancelled | Self::Http(_) => false,
        }
    }
}
