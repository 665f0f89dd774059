//! The message that the command prints when it fails, and the exit code that goes with it.

use std::fmt;

/// A failure of the command: one sentence with the cause.
#[derive(Debug)]
pub(crate) enum CliError {
    /// Wrong arguments or input: exit code 2.
    Input(String),
    /// Anything else: exit code 1.
    Failed(String),
    /// A failure with an exit code of its own.
    WithCode(u8, String),
    /// Stopped by the user before the work was done: exit code 130, as shells report it.
    Interrupted,
}

impl CliError {
    /// An [`CliError::Input`] from anything that can be shown.
    pub(crate) fn input(cause: impl fmt::Display) -> Self {
        Self::Input(cause.to_string())
    }

    /// A [`CliError::Failed`] from anything that can be shown.
    pub(crate) fn failed(cause: impl fmt::Display) -> Self {
        Self::Failed(cause.to_string())
    }

    /// Wrong input is the user's to mend; the rest is what the engine or the machine did.
    pub(crate) fn by_side(is_input: bool, cause: impl fmt::Display) -> Self {
        if is_input { Self::input(cause) } else { Self::failed(cause) }
    }

    /// The process exit code.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Failed(_) => 1,
            Self::WithCode(code, _) => *code,
            Self::Interrupted => 130,
        }
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(cause) | Self::Failed(cause) | Self::WithCode(_, cause) => f.write_str(cause),
            Self::Interrupted => f.write_str("interrupted"),
        }
    }
}
