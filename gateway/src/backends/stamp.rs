//! Whether a file is still the one that was read.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::backends::tables::Stamp;

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

/// Files as they were when they were read.
pub(crate) struct Seen(Mutex<Vec<FileState>>);

impl Seen {
    /// To be taken before they are read, so that a change meanwhile is seen next time.
    pub(crate) fn of<'a>(files: impl Iterator<Item = &'a Path>) -> Self {
        Self(Mutex::new(files.map(FileState::of).collect()))
    }

    /// Looks at the files again; returns whether any has changed.
    pub(crate) fn changed<'a>(&self, files: impl Iterator<Item = &'a Path>) -> bool {
        let now: Vec<FileState> = files.map(FileState::of).collect();
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *seen != now;
        *seen = now;
        changed
    }
}
