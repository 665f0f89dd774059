//! The errors of a replay.

/// One sentence each, with the cause.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    #[error(transparent)]
    Format(#[from] semmoe_tables::FormatError),
    #[error(transparent)]
    Policy(#[from] semmoe_routing::PolicyError),
    #[error("cannot read {path}: {cause}")]
    Read { path: String, cause: String },
    #[error("{path}, line {line}: {cause}")]
    Line { path: String, line: usize, cause: String },
    #[error("cannot write to standard output: {0}")]
    Write(#[from] std::io::Error),
    #[error("{found}: expected {expected}")]
    Input { found: String, expected: &'static str },
}
