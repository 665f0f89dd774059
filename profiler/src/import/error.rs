//! Why nothing was imported.

use std::path::{Path, PathBuf};

use crate::BadRecord;

/// An error of an import; every message is one sentence that names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The file has other content.
    #[error("{}: {cause}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The description of that content.
        cause: String,
    },
    /// The files are of several kinds.
    #[error("some files have counts and some have tokens, expected files of one kind")]
    Mixed,
    /// The files contain nothing to import.
    #[error("{files} files hold no token with a route")]
    Nothing {
        /// Number of files read.
        files: usize,
    },
    /// Too many records were left out.
    #[error(
        "{bad} of {records} records were bad, more than {allowed} allowed, and nothing was written; first, {first}"
    )]
    TooManyBad {
        /// Number of bad records.
        bad: u64,
        /// Number of all records.
        records: u64,
        /// Number of bad records allowed.
        allowed: u64,
        /// The first bad record.
        first: Box<BadRecord>,
    },
}

impl ImportError {
    pub(super) fn content(path: &Path, cause: String) -> Self {
        Self::Content { path: path.to_owned(), cause }
    }

    /// Whether the files as a whole are at fault.
    pub(crate) fn is_input(&self) -> bool {
        !matches!(self, Self::TooManyBad { .. })
    }
}
