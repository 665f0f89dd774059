//! Switches a model's layout while sequences are running. All ranks take part, between two steps.
//!
//! | module | what |
//! |---|---|
//! | `attention` | switches attention between dp, tp and tp in groups |
//! | `experts` | moves experts to another placement |
//! | `agree` | messages through which ranks reach agreement |

mod agree;
mod attention;
mod experts;

use semmoe_kernels::reshard::kv::KvError;
use semmoe_kernels::reshard::{Layout, ReshardError};
use semmoe_tables::LayerIdx;
use serde::{Deserialize, Serialize};

pub(crate) use agree::allgather_messages;
#[cfg(feature = "gpu")]
pub(super) use agree::vote;
pub(super) use agree::{Obstacle, ROUND_BYTES, vote_of_spans};

use crate::ep::UnitError;

/// The outcome of an expert switch; identical on all ranks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SwitchOutcome {
    /// The experts have moved to the new placement.
    Committed,
    /// The experts have been moved back to the old placement.
    RolledBack {
        /// The rank that objected, and its reason.
        cause: String,
    },
}

/// A callback that is invoked before each layer. It returns this rank's reason for refusing to continue the switch, or
/// `None` to continue.
pub type Objection<'a> = &'a mut dyn FnMut(LayerIdx) -> Option<String>;

/// The reason for refusing a switch; identical on all ranks.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A rank objected.
    #[error("rank {rank}: {reason}")]
    Objection {
        /// The first rank that objected.
        rank: usize,
        /// The reason as sent by that rank.
        reason: String,
    },
    /// Ranks whose results must be equal computed different ones.
    #[error("the result on rank {rank} differs from that on rank {first}")]
    Results {
        /// The first rank with a different result.
        rank: usize,
        /// The first rank of the span, whose result is the reference.
        first: usize,
    },
    /// A rank failed to describe its sequences.
    #[error("rank {rank} cannot describe its sequences: {source}")]
    Sequences {
        /// The rank.
        rank: usize,
        /// The cause.
        source: serde_json::Error,
    },
    /// The pages cannot be divided among the ranks.
    #[error(transparent)]
    Pages(#[from] KvError),
}

/// The reason for an attention switch failing.
#[derive(Debug, thiserror::Error)]
pub enum SwitchFault {
    /// The ranks refused the switch, and nothing has changed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A rank was lost, so the unit cannot continue.
    #[error(transparent)]
    Unit(#[from] UnitError),
}

/// Whether a switch between these layouts would move nothing.
pub(super) fn stays(from: &Layout, to: &Layout) -> bool {
    from == to && from.hosts().is_none()
}

/// Returns a function that reports that a placement does not fit even though it passed the checks.
pub(super) fn unfit(rank: usize) -> impl Fn(ReshardError) -> UnitError + Copy {
    move |error| UnitError::Operands { rank, detail: error.to_string() }
}
