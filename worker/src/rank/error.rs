//! Why a rank ended, in one sentence, and the exit code that says so.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use semmoe_tables::{Attention, FormatError};
use semmoe_text::TextError;

use crate::control::RendezvousError;
use crate::ep::ExpertLayout;
use crate::model::ModelError;

/// Why a rank did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// Invalid arguments.
    #[error("{detail}")]
    Arguments {
        /// The problem: found and expected.
        detail: String,
    },
    /// A checkpoint that cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tokenizer or chat template that cannot be used.
    #[error("{}: {source}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: TextError,
    },
    /// A file of the model directory contradicts another.
    #[error("{}: {detail}", path.display())]
    Inconsistent {
        /// The file.
        path: PathBuf,
        /// The problem: found and expected.
        detail: String,
    },
    /// Tables that cannot be read or are another model's.
    #[error("the tables cannot be used: {source}")]
    Tables {
        /// The cause; it names the file.
        source: FormatError,
    },
    /// Tables for another number of ranks, or of nodes where experts belong to nodes.
    #[error(
        "the tables in {} are for {found} groups, this unit has {expected} {}",
        path.display(),
        if matches!(experts, ExpertLayout::Hybrid(_)) { "nodes" } else { "ranks" }
    )]
    TablesGroups {
        /// The file.
        path: PathBuf,
        /// Groups of the tables.
        found: u16,
        /// Ranks or nodes of the unit.
        expected: u16,
        /// How its experts are divided.
        experts: ExpertLayout,
    },
    /// Tables for another kind of attention.
    #[error("the tables in {} are for attention {found}, this unit runs attention {expected}", path.display())]
    TablesAttention {
        /// The file.
        path: PathBuf,
        /// The attention of the tables.
        found: Attention,
        /// The attention of the unit.
        expected: Attention,
    },
    /// Tables that would have no effect.
    #[error(
        "the tables in {} would have no effect, as with experts tp every rank has a slice of every expert: serve without them, \
         or with experts ep",
        path.display()
    )]
    TablesExperts {
        /// The file.
        path: PathBuf,
    },
    /// Tables for attention tp, which send rows to ranks, where experts belong to nodes.
    #[error(
        "the tables in {} send rows of attention tp to ranks, and with experts hybrid a row belongs to a node: serve without them, \
         with experts ep, or with attention dp",
        path.display()
    )]
    TablesNodes {
        /// The file.
        path: PathBuf,
    },
    /// Tables with replicas for attention tp.
    #[error(
        "the tables in {} replicate experts, which does not go with attention tp: there the rank of a row depends on the batch, \
         and with it would the order in which its experts are summed; solve them without replicas, or for attention dp",
        path.display()
    )]
    TablesReplicas {
        /// The file.
        path: PathBuf,
    },
    /// Without tables, the experts cannot be divided among the ranks.
    #[error("the experts cannot be divided among the ranks: {source}")]
    Placement {
        /// The cause.
        source: FormatError,
    },
    /// The HTTP address is taken or not this machine's.
    #[error("cannot serve HTTP on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// The ranks did not come together.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The HTTP server ended by itself.
    #[error("the HTTP server failed: {source}")]
    Http {
        /// The cause.
        source: io::Error,
    },
    /// The operating system refused threads, sockets or a runtime.
    #[error("the process cannot be set up: {source}")]
    Runtime {
        /// The cause.
        source: io::Error,
    },
    /// A rank of the unit was lost.
    #[error("{cause}")]
    Lost {
        /// One sentence that names the rank.
        cause: String,
    },
}

impl WorkerError {
    pub(super) fn arguments(detail: impl ToString) -> Self {
        Self::Arguments { detail: detail.to_string() }
    }

    /// The process's exit code: 2 for wrong arguments or input, 3 when a rank was lost, 1 otherwise.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Arguments { .. }
            | Self::Model(_)
            | Self::Text { .. }
            | Self::Inconsistent { .. }
            | Self::Tables { .. }
            | Self::TablesGroups { .. }
            | Self::TablesAttention { .. }
            | Self::TablesExperts { .. }
            | Self::TablesNodes { .. }
            | Self::TablesReplicas { .. }
            | Self::Placement { .. }
            | Self::Rendezvous(RendezvousError::Mismatch { .. }) => 2,
            Self::Lost { .. } => 3,
            Self::Listen { .. } | Self::Rendezvous(_) | Self::Http { .. } | Self::Runtime { .. } => 1,
        }
    }
}
