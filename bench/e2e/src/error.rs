//! Reasons why a measurement cannot be made.

use std::io;
use std::path::{Path, PathBuf};

/// One sentence each.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Wrong arguments, or files that do not fit.
    #[error("{detail}")]
    Input {
        /// The value found and the one expected.
        detail: String,
    },
    /// Creating namespaces requires root.
    #[error(
        "network namespaces and limited links need root and the programs ip and tc ({cause}); --loopback measures without them"
    )]
    NoNamespaces {
        /// The missing part.
        cause: String,
    },
    /// A program that was started failed.
    #[error("{command} failed: {cause}")]
    Command {
        /// The command line.
        command: String,
        /// Its exit status or the end of its output.
        cause: String,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The measurement itself went wrong.
    #[error("{detail}")]
    Failed {
        /// The failure.
        detail: String,
    },
    /// Interrupted by Ctrl-C or SIGTERM.
    #[error("interrupted")]
    Interrupted,
}

impl BenchError {
    /// Wrong arguments or files.
    pub fn input(detail: impl ToString) -> Self {
        Self::Input { detail: detail.to_string() }
    }

    /// A measurement that went wrong.
    pub fn failed(detail: impl ToString) -> Self {
        Self::Failed { detail: detail.to_string() }
    }

    /// About a file.
    pub fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }

    /// 2 for wrong input, 130 for Ctrl-C, 1 otherwise.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Input { .. } | Self::NoNamespaces { .. } => 2,
            Self::Interrupted => 130,
            Self::Command { .. } | Self::File { .. } | Self::Failed { .. } => 1,
        }
    }
}
