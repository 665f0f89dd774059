//! Records that were left out, and how many of them are too many.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::ProfilerError;

/// A record that was left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BadRecord {
    /// The file it is in.
    pub file: PathBuf,
    /// Which record of the file: "line 3", "request 17".
    pub record: String,
    /// Why.
    pub reason: String,
}

impl fmt::Display for BadRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.file.display(), self.record, self.reason)
    }
}

/// How many of `total` records may be bad, by the share allowed.
pub(crate) fn allowed_bad(share: f64, total: usize) -> usize {
    (share * total as f64).floor() as usize
}

pub(crate) fn check_share(option: &'static str, share: f64) -> Result<(), ProfilerError> {
    check((0.0..=1.0).contains(&share), option, share, "a share between 0 and 1")
}

/// Refuses the value of an option that is not `good`.
pub(crate) fn check(
    good: bool,
    option: &'static str,
    found: impl fmt::Display,
    expected: &'static str,
) -> Result<(), ProfilerError> {
    if good { Ok(()) } else { Err(ProfilerError::Option { option, found: found.to_string(), expected }) }
}
