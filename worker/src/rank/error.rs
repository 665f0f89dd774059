//! Reasons why a rank ended, one sentence each, and the exit codes.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use semmoe_tables::FormatError;

use crate::control::RendezvousError;
use crate::model::ModelError;

/// Reasons why a rank failed to start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// Invalid arguments.
    #[error("{0}")]
    Arguments(String),
    /// A checkpoint that cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file in the model directory is unusable, or contradicts another one.
    #[error("{}: {detail}", path.display())]
    Inconsistent {
        /// The file.
        path: PathBuf,
        /// The problem, with the found and expected values.
        detail: String,
    },
    /// The tables cannot be read or belong to a different model.
    #[error("the tables cannot be used: {0}")]
    Tables(#[source] FormatError),
    /// The tables are for a different unit, or this unit cannot use them.
    #[error("the tables in {} {reason}", path.display())]
    TablesMismatch {
        /// The file.
        path: PathBuf,
        /// The difference between the found and expected values.
        reason: String,
    },
    /// Without tables, the experts cannot be divided evenly among the ranks.
    #[error("the experts cannot be divided among the ranks: {0}")]
    Placement(#[source] FormatError),
    /// The HTTP address is in use, or does not belong to this machine.
    #[error("cannot serve HTTP on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// The unit could not form.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The HTTP server stopped on its own.
    #[error("the HTTP server failed: {0}")]
    Http(#[source] io::Error),
    /// The operating system could not provide threads, sockets or a runtime.
    #[error("cannot set up the process: {0}")]
    Runtime(#[source] io::Error),
    /// A rank of the unit was lost; the message names it.
    #[error("{0}")]
    Lost(String),
}

impl WorkerError {
    pub(super) fn arguments(detail: impl ToString) -> Self {
        Self::Arguments(detail.to_string())
    }

    /// Returns the process's exit code: 2 for invalid arguments or input, 3 if a rank was lost, 1 otherwise.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Rendezvous(RendezvousError::Mismatch(_)) => 2,
            Self::Lost(_) => 3,
            Self::Listen { .. } | Self::Rendezvous(_) | Self::Http(_) | Self::Runtime(_) => 1,
            _ => 2,
        }
    }
}
