//! The error message that the command prints, and its exit code.

use std::fmt;
use std::path::Path;

/// A failure of the command, described in one sentence.
#[derive(Debug)]
pub(crate) struct CliError {
    message: String,
    /// The exit code of the process.
    pub(crate) code: u8,
}

impl CliError {
    /// A failure with a specific exit code.
    pub(crate) fn with_code(code: u8, cause: impl fmt::Display) -> Self {
        Self { message: cause.to_string(), code }
    }

    /// Invalid arguments or input: exit code 2.
    pub(crate) fn input(cause: impl fmt::Display) -> Self {
        Self::with_code(2, cause)
    }

    /// Any other failure: exit code 1.
    pub(crate) fn failed(cause: impl fmt::Display) -> Self {
        Self::with_code(1, cause)
    }

    /// Reports a file that cannot be written.
    pub(crate) fn cannot_write(path: &Path, error: impl fmt::Display) -> Self {
        Self::failed(format!("cannot write {}: {error}", path.display()))
    }

    /// Reports invalid input, which the user must fix, or a failure of an engine or the machine.
    pub(crate) fn by_side(is_input: bool, cause: impl fmt::Display) -> Self {
        if is_input { Self::input(cause) } else { Self::failed(cause) }
    }

    /// Stopped by the user before completion: exit code 130, as in shells.
    pub(crate) fn interrupted() -> Self {
        Self::with_code(130, "interrupted")
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
