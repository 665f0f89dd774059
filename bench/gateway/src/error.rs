//! Errors that end a benchmark.

use std::path::PathBuf;

use crate::answer::AnswerError;

/// Errors of a part of the benchmark.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// A socket or a poll failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A line of the prompts file that is malformed.
    #[error("{path}, line {line}: {cause}")]
    Prompts {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// The reason.
        cause: String,
    },
    /// The files have too little text for prompts of that length.
    #[error("the prompts have {found} words, expected at least {expected}")]
    TooFewWords {
        /// Words found.
        found: usize,
        /// Words needed.
        expected: usize,
    },
    /// The tokenizer is unusable.
    #[error(transparent)]
    Text(#[from] semmoe_text::TextError),
    /// The tables cannot be made.
    #[error("cannot make the tables: {cause}")]
    Tables {
        /// The reason.
        cause: String,
    },
    /// A request failed; latencies of failed requests mean nothing.
    #[error("request {request} failed: {source}")]
    Answer {
        /// Counted from 0, in the order of sending.
        request: u64,
        /// The fault in its answer.
        source: AnswerError,
    },
    /// No answer within the time limit.
    #[error("no answer within {seconds} s, {waiting} requests are waiting")]
    Silent {
        /// The time limit.
        seconds: u64,
        /// Requests without an answer.
        waiting: usize,
    },
}

impl BenchError {
    /// An adapter for `map_err`.
    pub(crate) fn io(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
