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
    /// Captures a file's state. Call it before reading the file, so that the next check notices a concurrent change.
    pub(crate) fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), stamp: Stamp::of(path) }
    }
}

/// The states of files at the time they were read.
pub(crate) struct Seen(Mutex<Vec<FileState>>);

impl Seen {
    /// Captures the states of files. Call it before reading them, so that the next check notices a concurrent change.
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
