//! Errors between ranks.

use std::time::Duration;

use semmoe_kernels::KernelError;
use semmoe_tables::RankId;

/// A collective, or the creation of a group, failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RankError {
    /// The operands do not match; this rank did not take part in the collective.
    #[error(transparent)]
    Operands(#[from] KernelError),
    /// The group has an invalid size.
    #[error("the world has {found} ranks, expected 1 to {limit}")]
    World {
        /// Number of ranks requested.
        found: usize,
        /// Maximum number of ranks.
        limit: usize,
    },
    /// The group has no such rank.
    #[error("rank {rank} is out of range for {world} ranks")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// Number of ranks in the group.
        world: usize,
    },
    /// The rank has already joined.
    #[error("rank {rank} has already joined the group")]
    Joined {
        /// The rank.
        rank: RankId,
    },
    /// An address or offset is misaligned.
    #[error("{what} is at {found:#x}, expected a multiple of {alignment}")]
    Misaligned {
        /// The misaligned object.
        what: &'static str,
        /// The address or offset.
        found: usize,
        /// The required alignment.
        alignment: usize,
    },
    /// A range exceeds the symmetric buffer, or a size exceeds the group's limits.
    #[error("{what}: {found} exceeds the limit of {limit}")]
    TooLarge {
        /// The quantity that is too large, with its unit.
        what: &'static str,
        /// The value needed.
        found: u64,
        /// The value available.
        limit: u64,
    },
    /// Two ranges of one call overlap.
    #[error("{first} and {second} overlap in the symmetric buffer")]
    Overlap {
        /// One range.
        first: &'static str,
        /// The other range.
        second: &'static str,
    },
    /// A rank made a different call. All ranks get such an error, no data was changed, and the group can continue.
    #[error("mismatched {what}: {theirs} on rank {rank}, {ours} on this rank")]
    Disagree {
        /// The first rank that differs.
        rank: RankId,
        /// The value that differs.
        what: &'static str,
        /// The other rank's value.
        theirs: String,
        /// This rank's value.
        ours: String,
    },
    /// A rank would receive more rows than fit; all ranks get this error, and the group can continue.
    #[error("rank {rank} would receive {rows} rows, but its capacity is {capacity}")]
    Capacity {
        /// The rank.
        rank: RankId,
        /// Number of rows sent to the rank.
        rows: u64,
        /// Number of rows that fit on the rank.
        capacity: u64,
    },
    /// A rank did not arrive in time. The group can no longer be used.
    #[error("rank {rank} did not arrive at epoch {epoch} within {} ms", limit.as_millis())]
    TimedOut {
        /// The rank that was late.
        rank: RankId,
        /// The epoch that the rank did not reach.
        epoch: u32,
        /// How long this rank waited.
        limit: Duration,
    },
    /// A rank ended. The group can no longer be used.
    #[error("rank {rank} left before epoch {epoch}")]
    Left {
        /// The rank.
        rank: RankId,
        /// The epoch that the rank will not reach.
        epoch: u32,
    },
    /// A rank gave up waiting for another. The group can no longer be used.
    #[error("rank {rank} gave up at epoch {epoch} because rank {cause} did not arrive")]
    GaveUp {
        /// The rank that gave up.
        rank: RankId,
        /// The epoch in which the rank was waiting.
        epoch: u32,
        /// The rank that did not arrive.
        cause: RankId,
    },
    /// Memory could not be allocated or is invalid.
    #[error("memory of the group: {cause}")]
    Memory {
        /// The cause.
        cause: String,
    },
}

impl RankError {
    pub(crate) fn memory(cause: impl std::fmt::Display) -> Self {
        Self::Memory { cause: cause.to_string() }
    }

    /// Checks a size against its limit.
    pub(crate) fn check_limit(what: &'static str, found: usize, limit: usize) -> Result<(), Self> {
        let (found, limit) = (found as u64, limit as u64);
        if found <= limit { Ok(()) } else { Err(Self::TooLarge { what, found, limit }) }
    }
}
