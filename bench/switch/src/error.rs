//! The errors of a contest.

use semmoe_planner::policy::{CurveError, SettingsError};

/// One sentence each, with the cause.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SwitchError {
    #[error("cannot read {path}: {cause}")]
    Read { path: String, cause: String },
    #[error("{engine}, {layout}: {source}")]
    Curve { engine: String, layout: &'static str, source: CurveError },
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("{found}: expected {expected}")]
    Input { found: String, expected: &'static str },
    #[error("cannot write to standard output: {0}")]
    Write(#[from] std::io::Error),
}
