//! Rejections and failures of a switch.

use super::checksum::PieceId;
use crate::collectives::UnitError;

/// A layout or shape that does not fit. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReshardError {
    /// A count that is zero or exceeds the range of ids.
    #[error("there are {found} {what}, expected 1 to {limit}")]
    Count {
        /// The things counted.
        what: &'static str,
        /// The count found.
        found: usize,
        /// The maximum.
        limit: usize,
    },
    /// A number that is not a multiple of another.
    #[error("{what} is {found}, expected a multiple of {divisor}")]
    Divides {
        /// The quantity.
        what: &'static str,
        /// The number.
        found: usize,
        /// The required divisor.
        divisor: usize,
    },
    /// Two parts of the layout have different counts.
    #[error("{what}: {found}, expected {expected}")]
    Differs {
        /// The things counted.
        what: &'static str,
        /// The count found.
        found: usize,
        /// The required count.
        expected: usize,
    },
    /// More slots than the buffer was created for.
    #[error("the layout needs {found} expert slots on each rank, but the buffer has room for {limit}")]
    Slots {
        /// Slots of the layout.
        found: usize,
        /// Slots of the pool.
        limit: usize,
    },
    /// Too few slots for all experts.
    #[error("{ranks} ranks with {slots} slots each have no room for {experts} experts")]
    Room {
        /// Slots of each rank.
        slots: usize,
        /// Ranks.
        ranks: usize,
        /// Experts.
        experts: usize,
    },
    /// TP in a buffer that has no room for it.
    #[error("the buffer was made for EP alone")]
    EpOnly,
    /// Groups in a buffer that has no room for them.
    #[error("the buffer has no room for groups of {width} ranks")]
    NoGroups {
        /// Ranks of a group.
        width: usize,
    },
    /// A switch from slices to the same slices.
    #[error("the unit has its experts in TP slices already")]
    Same,
    /// A slot names an expert that the model does not have.
    #[error("layer {layer}, slot {slot} hosts expert {expert}, expected below {experts}")]
    Expert {
        /// Layer.
        layer: usize,
        /// Slot among those of all ranks.
        slot: usize,
        /// The expert.
        expert: u16,
        /// Experts of the model.
        experts: usize,
    },
    /// A rank hosts an expert twice.
    #[error("layer {layer}: rank {rank} hosts expert {expert} twice")]
    Twice {
        /// Layer.
        layer: usize,
        /// Rank.
        rank: usize,
        /// The expert.
        expert: u16,
    },
    /// No rank hosts an expert.
    #[error("layer {layer}: no rank hosts expert {expert}")]
    Missing {
        /// Layer.
        layer: usize,
        /// The expert.
        expert: u16,
    },
    /// More bytes than can be addressed.
    #[error("the experts of one rank have more bytes than can be addressed")]
    TooLarge,
    /// Two copies of a piece have different checksums.
    #[error("{piece} has checksum {found:#018x}, another copy {expected:#018x}")]
    Copies {
        /// The piece.
        piece: PieceId,
        /// Checksum of the later copy.
        found: u64,
        /// Checksum of the first copy.
        expected: u64,
    },
    /// A checksum was never recorded.
    #[error("{0} has no checksum")]
    Unknown(PieceId),
}

/// A rank's memory could not be read or written.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{bytes} bytes at {offset} of rank {rank}: {cause}")]
pub struct MemoryFault {
    /// The rank whose memory it is.
    pub rank: usize,
    /// The first byte.
    pub offset: usize,
    /// Number of bytes.
    pub bytes: usize,
    /// The cause.
    #[source]
    pub cause: MemoryCause,
}

/// Why memory could not be read or written.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MemoryCause {
    /// The bytes are not all in the buffer, which has this many.
    #[error("the buffer has {0} bytes")]
    Size(usize),
    /// The memory is out of this rank's reach.
    #[error("rank {0} cannot read it")]
    OutOfReach(usize),
    /// The bytes overlap those at this offset.
    #[error("it overlaps the bytes at {0}")]
    Overlap(usize),
}

/// A fault that this rank found in a layer; its peers learn only the [`Reason`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// The bytes that arrived are not those that were loaded.
    #[error("{piece} from rank {from} has checksum {found:#018x}, expected {expected:#018x}")]
    Checksum {
        /// The piece.
        piece: PieceId,
        /// The rank that sent the piece.
        from: usize,
        /// Checksum of what arrived.
        found: u64,
        /// Checksum of what was loaded.
        expected: u64,
    },
    /// A piece without a checksum cannot be verified.
    #[error(transparent)]
    Unverified(#[from] ReshardError),
    /// Memory could not be read or written.
    #[error(transparent)]
    Memory(#[from] MemoryFault),
    /// The caller requested a stop.
    #[error("the switch was asked to stop")]
    Stopped,
}

impl Fault {
    /// The part of it that peers learn.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Checksum { .. } | Self::Unverified(_) => Reason::Checksum,
            Self::Memory(_) => Reason::Memory,
            Self::Stopped => Reason::Stopped,
        }
    }
}

/// Why a rank refused a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[repr(u8)]
pub enum Reason {
    /// The checksum of the bytes that arrived differs from the one recorded at load, or none is known.
    #[error("what arrived has another checksum than what was loaded")]
    Checksum = 1,
    /// Memory could not be read or written.
    #[error("memory could not be read or written")]
    Memory = 2,
    /// Its caller requested a stop.
    #[error("it was asked to stop")]
    Stopped = 3,
}

/// The rank that refused a layer; the lowest one if several did. Equal on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("rank {rank} refused layer {layer}: {reason}")]
pub struct Refusal {
    /// The layer.
    pub layer: usize,
    /// The rank.
    pub rank: usize,
    /// The reason.
    pub reason: Reason,
}

/// A switch that ended in neither layout, or did not begin. A unit that lost a rank, or could not roll back, must not
/// serve.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SwitchError {
    /// The operands do not fit; nothing was changed.
    #[error(transparent)]
    Operands(#[from] ReshardError),
    /// A rank was lost or broke the protocol.
    #[error("the switch stopped at layer {layer}: {cause}")]
    Lost {
        /// The layer that was moving.
        layer: usize,
        /// The rank and the cause.
        cause: UnitError,
    },
    /// The rollback failed as well: some layers are in the old layout, some in the new one.
    #[error("rolling back {first}: {second}")]
    Stuck {
        /// Why the switch was rolled back.
        first: Refusal,
        /// Why the rollback failed.
        second: Refusal,
    },
}
