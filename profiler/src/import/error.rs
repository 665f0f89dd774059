//! Why nothing was imported.

use std::path::{Path, PathBuf};

use crate::BadRecord;

/// An error of an import; every message is one sentence that names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
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
    #[error(
        "{bad} of {records} records were bad, more than {allowed} allowed, and nothing was written; first, {first}"
    )]
    TooManyBad {
        /// Bad ones.
        bad: u64,
        /// All.
        records: u64,
        /// Bad ones that would have been allowed.
        allowed: u64,
        /// The first one.
        first: Box<BadRecord>,
    },
}

impl ImportError {
    pub(super) fn content(path: &Path, cause: String) -> Self {
        Self::Content { path: path.to_owned(), cause }
    }

    /// Whether the files are at fault as a whole.
    pub(crate) fn is_input(&self) -> bool {
        !matches!(self, Self::TooManyBad { .. })
    }
}
