//! Errors that do not concern a single request; [`crate::Failure`] describes the failure of one request.

use std::error::Error;
use std::path::PathBuf;

use semmoe_engines::http::{HttpError, UrlError};
use semmoe_engines::tls::TlsError;
use semmoe_text::PromptLineError;

/// A problem with an arrival file or with one of its lines.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArrivalError {
    #[error("is neither .jsonl (`timestamp` in ms) nor .csv (seconds)")]
    Format,
    #[error("has no arrivals")]
    None,
    #[error("has more than {0} arrivals")]
    TooMany(usize),
    #[error("longer than {0} bytes")]
    TooLong(u64),
    #[error("not UTF-8")]
    NotText,
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("no column {0}, which should contain the times")]
    NoColumn(usize),
    #[error("the time is '{0}', expected seconds or YYYY-MM-DD hh:mm:ss")]
    NoTime(String),
    #[error("the time is {found} s, expected 0 to {most}")]
    Seconds { found: f64, most: f64 },
}

/// An error of this crate; every message is one sentence.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// An option has an invalid value.
    #[error("{option} is {found}, expected {expected}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// Value of the option, unless it is a secret.
        found: String,
        /// The values allowed.
        expected: &'static str,
    },
    /// The prompts file cannot be read.
    #[error(transparent)]
    Prompts(#[from] PromptLineError),
    /// The prompts file contains no usable prompts.
    #[error("{} contains no prompts for {route} ({left_out} of a different kind)", path.display())]
    NoPrompts {
        /// The file.
        path: PathBuf,
        /// The route's path.
        route: &'static str,
        /// Number of prompts that the route does not support.
        left_out: usize,
    },
    /// The prompts exceed the memory limit.
    #[error("the requests for the prompts in {} exceed {limit} bytes, expected a shorter file", path.display())]
    TooManyPrompts {
        /// The file.
        path: PathBuf,
        /// Maximum total size of the requests, in bytes.
        limit: usize,
    },
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A line of the arrival file is invalid.
    #[error("{} line {line}: {source}", path.display())]
    Arrival {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The problem.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The arrival file as a whole is invalid.
    #[error("{} {source}", path.display())]
    Arrivals {
        /// The file.
        path: PathBuf,
        /// The problem.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The address is invalid.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The server cannot be reached.
    #[error("cannot connect to {url}: {source}")]
    Connect {
        /// The server's address.
        url: String,
        /// The cause.
        source: std::io::Error,
    },
    /// No model was named, and the server does not serve exactly one.
    #[error("{url} serves {found} models, expected exactly one unless a model is named")]
    Model {
        /// The server.
        url: String,
        /// Number of models listed.
        found: usize,
    },
    /// The list of models could not be read.
    #[error("no model was named, and {0}")]
    Models(#[from] HttpError),
    /// The caller stopped the run before it began.
    #[error("stopped before anything was sent")]
    Cancelled,
    /// A thread or runtime could not be started.
    #[error("cannot start a worker: {0}")]
    Start(std::io::Error),
}

impl LoadError {
    pub(crate) fn option(option: &'static str, found: impl ToString, expected: &'static str) -> Self {
        Self::Option { option, found: found.to_string(), expected }
    }

    /// Whether the caller's options or files are at fault, rather than the server or the machine.
    pub fn is_input(&self) -> bool {
        !matches!(self, Self::Connect { .. } | Self::Models(_) | Self::Cancelled | Self::Start(_))
    }
}
