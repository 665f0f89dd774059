//! Why nothing was imported.

use std::path::{Path, PathBuf};

use crate::pickle::PickleError;

/// An error of an import; every message is one sentence that names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The file cannot be read, or not safely.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: PickleError,
    },
    /// The file holds something else.
    #[error("{}: {cause}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What.
        cause: String,
    },
    /// The files are of several kinds.
    #[error("some files have counts and some have tokens, expected files of one kind")]
    Mixed,
    /// Nothing is in the files.
    #[error("{files} files hold no token with a route")]
    Nothing {
        /// Files read.
        files: usize,
    },
    /// Too many records were left out.
    #[error("{bad} of {records} records were bad, more than {allowed} allowed, and nothing was written; first, {} {record}: {reason}", path.display())]
    TooManyBad {
        /// Bad ones.
        bad: u64,
        /// All.
        records: u64,
        /// Bad ones that would have been allowed.
        allowed: u64,
        /// The file of the first.
        path: PathBuf,
        /// Which record it is.
        record: String,
        /// The problem.
        reason: String,
    },
}

impl ImportError {
    /// Whether the files are at fault as a whole.
    pub(crate) fn is_input(&self) -> bool {
        !matches!(self, Self::TooManyBad { .. })
    }
}

/// The problem with a file or record, without the name of the file.
#[derive(Debug)]
pub(super) enum Wrong {
    Read(PickleError),
    Content(String),
}

impl Wrong {
    pub(super) fn in_file(self, path: &Path) -> ImportError {
        let path = path.to_owned();
        match self {
            Self::Read(source) => ImportError::File { path, source },
            Self::Content(cause) => ImportError::Content { path, cause },
        }
    }

    /// Whether the file itself could not be read, which is no matter of one record.
    pub(super) fn is_io(&self) -> bool {
        matches!(self, Self::Read(PickleError::Io(_)))
    }
}

impl From<PickleError> for Wrong {
    fn from(error: PickleError) -> Self {
        Self::Read(error)
    }
}

impl From<String> for Wrong {
    fn from(cause: String) -> Self {
        Self::Content(cause)
    }
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Read(error) => error.fmt(f),
            Self::Content(cause) => f.write_str(cause),
        }
    }
}
