//! Switches the layout of a model while sequences run: all ranks take part, between two steps.
//!
//! | module | what |
//! |---|---|
//! | `attention` | attention switches between dp, tp and groups of tp |
//! | `experts` | experts move to another placement |
//! | `agree` | the messages by which ranks agree |

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

/// How a switch of experts ended; identical on all ranks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SwitchOutcome {
    /// The experts are at their new places.
    Committed,
    /// The experts are back at their old places.
    RolledBack {
        /// The rank that objected, and why.
        cause: String,
    },
}

/// Asked before each layer: why a rank refuses to continue a switch; `None` if it continues.
pub type Objection<'a> = &'a mut dyn FnMut(LayerIdx) -> Option<String>;

/// Why the ranks refuse a switch; identical on all ranks.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A rank objected.
    #[error("rank {rank}: {reason}")]
    Objection {
        /// The first rank that objected.
        rank: usize,
        /// Its reason, as it sent it.
        reason: String,
    },
    /// Ranks that must agree have different results.
    #[error("the result of rank {rank} differs from rank {first}'s")]
    Results {
        /// The first rank with another result.
        rank: usize,
        /// The first rank of its span.
        first: usize,
    },
    /// A rank's sequences cannot be read.
    #[error("rank {rank} cannot describe its sequences: {source}")]
    Sequences {
        /// The rank.
        rank: usize,
        /// The cause.
        source: serde_json::Error,
    },
    /// Pages that the ranks cannot divide among themselves.
    #[error(transparent)]
    Pages(#[from] KvError),
}

/// Why a switch of attention did not take place.
#[derive(Debug, thiserror::Error)]
pub enum SwitchFault {
    /// The ranks refuse; nothing has changed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A rank was lost: the unit cannot continue.
    #[error(transparent)]
    Unit(#[from] UnitError),
}

/// Whether a switch moves nothing.
pub(super) fn stays(from: &Layout, to: &Layout) -> bool {
    from == to && !matches!(from, Layout::Ep(_))
}

/// The error of a checked placement that does not fit after all.
pub(super) fn unfit(rank: usize) -> impl Fn(ReshardError) -> UnitError + Copy {
    move |error| UnitError::Operands { rank, detail: error.to_string() }
}
