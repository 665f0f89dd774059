//! Errors between ranks.

use std::time::Duration;

use semmoe_kernels::KernelError;
use semmoe_tables::RankId;

/// A collective, or the making of a group, failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RankError {
    /// Operands that do not fit together; the call took no part in the collective.
    #[error(transparent)]
    Operands(#[from] KernelError),
    /// A group of an invalid size.
    #[error("the world has {found} ranks, expected 1 to {limit}")]
    World {
        /// Ranks asked for.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// A rank that the group does not have.
    #[error("rank {rank} is not below {world}, the number of ranks")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// Ranks of the group.
        world: usize,
    },
    /// The rank has joined before.
    #[error("rank {rank} has already joined the group")]
    Joined {
        /// The rank.
        rank: RankId,
    },
    /// An address or offset between the steps that it must be on.
    #[error("{what} is at {found:#x}, expected a multiple of {alignment}")]
    Misaligned {
        /// The object there.
        what: &'static str,
        /// Where.
        found: usize,
        /// The step.
        alignment: usize,
    },
    /// A place past the symmetric buffer, or more than the group was made for.
    #[error("{what} needs {found}, expected at most {limit}")]
    TooLarge {
        /// The quantity that is too large, with its unit.
        what: &'static str,
        /// The value it needs.
        found: u64,
        /// The value available.
        limit: u64,
    },
    /// Two places of one call overlap.
    #[error("{first} and {second} overlap in the symmetric buffer")]
    Overlap {
        /// One place.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A rank called something else; all ranks get such an error, nothing was touched, and the group can go on.
    #[error("rank {rank} calls with {what} {theirs}, this rank with {ours}")]
    Disagree {
        /// The first rank that differs.
        rank: RankId,
        /// The difference.
        what: &'static str,
        /// The other's value.
        theirs: String,
        /// This rank's value.
        ours: String,
    },
    /// More rows for a rank than it has room for; all ranks get this, and the group can go on.
    #[error("rank {rank} would receive {rows} rows, expected at most {capacity}")]
    Capacity {
        /// The rank.
        rank: RankId,
        /// Rows for it.
        rows: u64,
        /// Rows that it takes.
        capacity: u64,
    },
    /// A rank did not arrive in time. The group is spent.
    #[error("rank {rank} did not arrive at epoch {epoch} within {} ms", limit.as_millis())]
    TimedOut {
        /// The rank that was waited for.
        rank: RankId,
        /// The epoch that it did not reach.
        epoch: u32,
        /// The limit.
        limit: Duration,
    },
    /// A rank ended. The group is spent.
    #[error("rank {rank} left before epoch {epoch}")]
    Left {
        /// The rank.
        rank: RankId,
        /// The epoch that it will not reach.
        epoch: u32,
    },
    /// A rank waited for another in vain. The group is spent.
    #[error("rank {rank} gave up at epoch {epoch}, as rank {cause} did not arrive")]
    GaveUp {
        /// The rank that gave up.
        rank: RankId,
        /// The epoch that it waited for.
        epoch: u32,
        /// The rank that it waited for.
        cause: RankId,
    },
    /// Memory could not be had or is not what it should be.
    #[error("the memory of the group: {cause}")]
    Memory {
        /// Why.
        cause: String,
    },
}

impl RankError {
    pub(crate) fn memory(cause: impl std::fmt::Display) -> Self {
        Self::Memory { cause: cause.to_string() }
    }

    /// Whether a size is within its limit.
    pub(crate) fn check_limit(what: &'static str, found: usize, limit: usize) -> Result<(), Self> {
        let (found, limit) = (found as u64, limit as u64);
        if found <= limit { Ok(()) } else { Err(Self::TooLarge { what, found, limit }) }
    }
}
