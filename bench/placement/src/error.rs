//! The errors of a comparison.

/// One sentence each, with the cause.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    #[error(transparent)]
    Format(#[from] semmoe_tables::FormatError),
    #[error(transparent)]
    Solve(#[from] semmoe_solver::SolveError),
    #[error("cannot read {path}: {cause}")]
    Read { path: String, cause: String },
    #[error("cannot write the tables to standard output: {0}")]
    Write(#[from] std::io::Error),
    #[error("{found}: {expected}")]
    Input { found: String, expected: &'static str },
}
