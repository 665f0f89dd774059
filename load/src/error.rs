//! Errors outside of single requests; the failure of one request is a [`crate::Failure`].

use std::path::PathBuf;

use semmoe_engines::http::{HttpError, UrlError};
use semmoe_engines::tls::TlsError;
use semmoe_text::PromptLineError;

/// An error of this crate; every message is one sentence.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// An option cannot be used.
    #[error("{option} is {found}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value; never that of a secret.
        found: String,
        /// The values allowed.
        expected: &'static str,
    },
    /// The prompts file.
    #[error(transparent)]
    Prompts(#[from] PromptLineError),
    /// The prompts file has nothing to send.
    #[error("{} holds no prompt for {route} ({left_out} of another kind)", path.display())]
    NoPrompts {
        /// The file.
        path: PathBuf,
        /// The route's path.
        route: &'static str,
        /// Prompts that the route cannot carry.
        left_out: usize,
    },
    /// The prompts are more than is kept in memory.
    #[error("the requests for the prompts of {} take more than {limit} bytes, expected a shorter file", path.display())]
    TooManyPrompts {
        /// The file.
        path: PathBuf,
        /// The limit.
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
    /// A line of the arrival file is wrong.
    #[error("{} line {line}: {cause}", path.display())]
    Arrival {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// The problem.
        cause: String,
    },
    /// The arrival file as a whole is wrong.
    #[error("{} {cause}", path.display())]
    Arrivals {
        /// The file.
        path: PathBuf,
        /// The problem.
        cause: String,
    },
    /// The address cannot be used.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The server cannot be reached at all.
    #[error("cannot connect to {url}: {cause}")]
    Connect {
        /// Where to.
        url: String,
        /// The operating system's reason.
        cause: String,
    },
    /// Which model to ask for is not known.
    #[error("{url} serves {found} models, expected one or the model's name")]
    Model {
        /// The server.
        url: String,
        /// How many it lists.
        found: usize,
    },
    /// The list of models could not be read.
    #[error("the model's name was not given, and {0}")]
    Models(#[from] HttpError),
    /// The caller stopped the run before it began.
    #[error("stopped before anything was sent")]
    Cancelled,
    /// The machine gave no thread or runtime.
    #[error("cannot start a worker: {0}")]
    Start(std::io::Error),
}

impl LoadError {
    pub(crate) fn option(option: &'static str, found: impl ToString, expected: &'static str) -> Self {
        Self::Option { option, found: found.to_string(), expected }
    }

    /// Whether the caller's options or files are at fault, and not the server or the machine.
    pub fn is_input(&self) -> bool {
        !matches!(self, Self::Connect { .. } | Self::Models(_) | Self::Cancelled | Self::Start(_))
    }
}
