//! Errors of a switch: invalid operands, and failures while it runs.

use super::checksum::PieceId;
use crate::collectives::UnitError;

/// An invalid layout or shape. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReshardError {
    /// A count is zero or exceeds the id range.
    #[error("{what}: {found}, expected 1 to {limit}")]
    Count {
        /// The things counted.
        what: &'static str,
        /// The count found.
        found: usize,
        /// The maximum.
        limit: usize,
    },
    /// A number is not a multiple of the required divisor.
    #[error("{what}: {found}, expected a multiple of {divisor}")]
    Divides {
        /// The quantity.
        what: &'static str,
        /// The number.
        found: usize,
        /// The required divisor.
        divisor: usize,
    },
    /// A count does not match the expected one.
    #[error("{what}: {found}, expected {expected}")]
    Differs {
        /// The things counted.
        what: &'static str,
        /// The count found.
        found: usize,
        /// The required count.
        expected: usize,
    },
    /// The layout has more slots than the buffer was created for.
    #[error("the layout needs {found} expert slots on each rank, but the buffer has room for {limit}")]
    Slots {
        /// Slots per rank in the layout.
        found: usize,
        /// Slots per rank in the buffer.
        limit: usize,
    },
    /// The ranks have too few slots for all experts.
    #[error("{ranks} ranks with {slots} slots each cannot hold {experts} experts")]
    Room {
        /// Slots of each rank.
        slots: usize,
        /// Ranks.
        ranks: usize,
        /// Experts.
        experts: usize,
    },
    /// The buffer has no room for TP.
    #[error("the buffer has room for EP layouts only")]
    EpOnly,
    /// The buffer has no room for groups of this width.
    #[error("the buffer has no room for groups of {width} ranks")]
    NoGroups {
        /// Ranks of a group.
        width: usize,
    },
    /// The buffer has no room for these hybrid nodes.
    #[error("the buffer has no room for a hybrid layout of {nodes} nodes")]
    NoHybrid {
        /// Number of nodes.
        nodes: usize,
    },
    /// The old and the new layout have the same slices.
    #[error("the experts are already in this sliced layout")]
    Same,
    /// A slot names an expert that the model does not have.
    #[error("layer {layer}, slot {slot} hosts expert {expert}, but the model has only {experts}")]
    Expert {
        /// Layer.
        layer: usize,
        /// Slot index across all ranks.
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
    /// The size exceeds the address space.
    #[error("the experts of one rank exceed the address space")]
    TooLarge,
    /// Two copies of a piece have different checksums.
    #[error("{piece} has checksum {found:#018x}, but another copy has {expected:#018x}")]
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
#[error("{bytes} bytes at offset {offset} of rank {rank}: {cause}")]
pub struct MemoryFault {
    /// The rank that owns the memory.
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
    /// The access exceeds the buffer, whose size is given.
    #[error("the buffer has {0} bytes")]
    Size(usize),
    /// This rank cannot access the memory.
    #[error("rank {0} cannot access it")]
    OutOfReach(usize),
    /// The bytes overlap others, at the given offset.
    #[error("they overlap the bytes at offset {0}")]
    Overlap(usize),
}

/// A fault that this rank detected in a layer; peers receive only the [`Reason`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// The received bytes differ from the bytes that were loaded.
    #[error("{piece} from rank {from} has checksum {found:#018x}, expected {expected:#018x}")]
    Checksum {
        /// The piece.
        piece: PieceId,
        /// The rank that sent the piece.
        from: usize,
        /// Checksum of the received bytes.
        found: u64,
        /// Checksum recorded at load.
        expected: u64,
    },
    /// A piece without a checksum cannot be verified.
    #[error(transparent)]
    Unverified(#[from] ReshardError),
    /// Memory could not be read or written.
    #[error(transparent)]
    Memory(#[from] MemoryFault),
    /// The caller requested a stop.
    #[error("a stop of the switch was requested")]
    Stopped,
}

impl Fault {
    /// Returns the reason that peers receive.
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
    /// The checksum of the received bytes differs from the one recorded at load, or none was recorded.
    #[error("checksum mismatch between the received bytes and the loaded ones")]
    Checksum = 1,
    /// Memory could not be read or written.
    #[error("memory could not be read or written")]
    Memory = 2,
    /// The rank's caller requested a stop.
    #[error("a stop was requested")]
    Stopped = 3,
}

/// The rank that refused a layer, or the lowest one if several did. Equal on all ranks.
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

/// A switch that did not start, or that ended in neither layout. A unit that lost a rank or could not roll back must
/// not serve requests.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SwitchError {
    /// The operands are invalid; nothing was changed.
    #[error(transparent)]
    Operands(#[from] ReshardError),
    /// A rank was lost or broke the protocol.
    #[error("the switch stopped at layer {layer}: {cause}")]
    Lost {
        /// The layer being moved.
        layer: usize,
        /// The rank and the cause.
        cause: UnitError,
    },
    /// The rollback failed as well: some layers are in the old layout, some in the new one.
    #[error("the rollback failed: {second}; it was started because {first}")]
    Stuck {
        /// Why the switch was rolled back.
        first: Refusal,
        /// Why the rollback failed.
        second: Refusal,
    },
}
