//! Whether a file is still the one that was read.

use std::path::{Path, PathBuf};

use crate::tables::Stamp;

/// A file as it was when it was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileState {
    path: PathBuf,
    /// `None` where there was no such file.
    stamp: Option<Stamp>,
}

impl FileState {
    /// To be taken before the file is read, so that a change meanwhile is seen next time.
    pub(crate) fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), stamp: Stamp::of(path) }
    }
}
