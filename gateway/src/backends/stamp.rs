//! Detects whether a file has changed since it was read.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::backends::tables::Stamp;

/// The state of a file at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileState {
    path: PathBuf,
    /// `None` if the file did not exist.
    stamp: Option<Stamp>,
}

impl FileState {
    /// Take it before reading the file, so that a concurrent change is noticed next time.
    pub(crate) fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), stamp: Stamp::of(path) }
    }
}

/// The states of files as they were when read.
pub(crate) struct Seen(Mutex<Vec<FileState>>);

impl Seen {
    /// Take it before reading the files, so that a concurrent change is noticed next time.
    pub(crate) fn of<'a>(files: impl Iterator<Item = &'a Path>) -> Self {
        Self(Mutex::new(files.map(FileState::of).collect()))
    }

    /// Checks the files again; returns whether any has changed.
    pub(crate) fn changed<'a>(&self, files: impl Iterator<Item = &'a Path>) -> bool {
        let now: Vec<FileState> = files.map(FileState::of).collect();
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *seen != now;
        *seen = now;
        changed
    }
}
