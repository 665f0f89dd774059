//! Records that were left out, and how many are tolerated.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::ProfilerError;

/// A record that was left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BadRecord {
    /// The file that contains it.
    pub file: PathBuf,
    /// The record's position: "line 3", "request 17".
    pub record: String,
    /// The reason.
    pub reason: String,
}

impl fmt::Display for BadRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.file.display(), self.record, self.reason)
    }
}

/// How many of `total` records may be bad, given the allowed share.
pub(crate) fn allowed_bad(share: f64, total: usize) -> usize {
    (share * total as f64).floor() as usize
}

pub(crate) fn check_share(option: &'static str, share: f64) -> Result<(), ProfilerError> {
    check((0.0..=1.0).contains(&share), option, share, "a share between 0 and 1")
}

/// Rejects the value of an option unless it is `good`.
pub(crate) fn check(
    good: bool,
    option: &'static str,
    found: impl fmt::Display,
    expected: &'static str,
) -> Result<(), ProfilerError> {
    if good { Ok(()) } else { Err(ProfilerError::Option { option, found: found.to_string(), expected }) }
}
