//! Skipped records, and how many of them are tolerated.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

/// A record that was skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BadRecord {
    /// The file that contains it.
    pub file: PathBuf,
    /// The record's position, such as "line 3" or "request 17".
    pub record: String,
    /// The reason.
    pub reason: String,
}

impl fmt::Display for BadRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.file.display(), self.record, self.reason)
    }
}

/// Returns how many of `total` records may be bad, given the tolerated fraction.
pub(crate) fn allowed_bad(share: f64, total: usize) -> usize {
    (share * total as f64).floor() as usize
}
