//! Errors detected before a launch, and the reasons why a kernel stopped.

use semmoe_kernels::Dtype;

/// An error of a GPU's driver or of NCCL.
pub type GpuError = Box<dyn std::error::Error + Send + Sync>;

/// A call was rejected; nothing was launched.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LaunchError {
    /// A count or size is out of range.
    #[error("{what} is {found}, expected {least} to {most}")]
    OutOfRange {
        /// The quantity.
        what: &'static str,
        /// The value.
        found: u64,
        /// The minimum.
        least: u64,
        /// The maximum.
        most: u64,
    },
    /// A required buffer is null.
    #[error("{what} {index} is null")]
    Null {
        /// The array of buffers.
        what: &'static str,
        /// Index of the rank, among all ranks or among those of the launch.
        index: usize,
    },
    /// An address is not a multiple of the access size.
    #[error("{what} {index} is at {address:#x}, expected a multiple of {alignment}")]
    Misaligned {
        /// The array of buffers.
        what: &'static str,
        /// Index of the rank, among all ranks or among those of the launch.
        index: usize,
        /// The address.
        address: u64,
        /// The required multiple.
        alignment: u64,
    },
    /// A buffer is smaller than the call requires, so with symmetric memory the call would exceed it.
    #[error("{what} {index} has {found} bytes, expected at least {expected}")]
    TooSmall {
        /// The array of buffers.
        what: &'static str,
        /// Index of the rank, among all ranks or among those of the launch.
        index: usize,
        /// Size of the buffer.
        found: u64,
        /// Size that the call requires.
        expected: u64,
    },
    /// A list's length differs from the number of ranks.
    #[error("{what}: {found} buffers, expected {expected}")]
    Count {
        /// The array of buffers.
        what: &'static str,
        /// Number of buffers in the list.
        found: usize,
        /// Ranks.
        expected: usize,
    },
    /// The kernel does not support the element type.
    #[error("{what} has elements of type {}, expected f32 or bf16", .found.name())]
    Element {
        /// The operation.
        what: &'static str,
        /// The element type.
        found: Dtype,
    },
}

/// Why a kernel stopped, as written to its report word before the trap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Stopped {
    /// A peer did not start the call in time.
    #[error("rank {rank} timed out waiting for rank {peer} to start call {epoch}")]
    EntryTimeout {
        /// The rank that waited.
        rank: u32,
        /// The rank that was late.
        peer: u32,
        /// Number of the call, counted per block.
        epoch: u32,
    },
    /// A peer started the call but did not finish it in time.
    #[error("rank {rank} timed out waiting for rank {peer} to finish call {epoch}")]
    ExitTimeout {
        /// The rank that waited.
        rank: u32,
        /// The rank that was late.
        peer: u32,
        /// Number of the call, counted per block.
        epoch: u32,
    },
    /// A peer made a different call, or the same call with different shapes.
    #[error("rank {rank} and rank {peer} made different calls, or calls with different shapes, at call {epoch}")]
    Disagree {
        /// The rank that detected it.
        rank: u32,
        /// The other rank.
        peer: u32,
        /// Number of the call, counted per block.
        epoch: u32,
    },
    /// A destination, or the rank of an expert, is out of range.
    #[error("destination or expert {index} is out of range")]
    Destination {
        /// Its index.
        index: u32,
    },
    /// More rows than fit.
    #[error("rank {peer} would receive {rows} rows, which exceeds its capacity (detected by rank {rank})")]
    Rows {
        /// The rank that detected it.
        rank: u32,
        /// The rank whose capacity is exceeded.
        peer: u32,
        /// Rows.
        rows: u32,
    },
    /// A position of the permutation is not a valid token.
    #[error("position {position} of the permutation of rank {rank} is out of range")]
    Permutation {
        /// Whose permutation.
        rank: u32,
        /// The position.
        position: u32,
    },
    /// A rank's offsets descend or exceed the number of tokens.
    #[error("the offsets of rank {rank} end at {end}, which is before their start or exceeds the number of tokens")]
    Offsets {
        /// Whose rows.
        rank: u32,
        /// The offset.
        end: u32,
    },
    /// A move of a layout switch exceeds its memory, or has an invalid rank.
    #[error("move {index} of rank {rank} is out of range")]
    Move {
        /// Whose move.
        rank: u32,
        /// Its index.
        index: u32,
    },
    /// No kernel of this version writes this code.
    #[error("a kernel stopped with unknown code {code:#x}")]
    Unknown {
        /// The report word.
        code: u64,
    },
}

impl Stopped {
    /// Returns the rank that was late, if that was the cause.
    pub fn late(&self) -> Option<usize> {
        match self {
            Self::EntryTimeout { peer, .. } | Self::ExitTimeout { peer, .. } => Some(*peer as usize),
            _ => None,
        }
    }

    /// Decodes a report word; `None` for 0, if nothing stopped.
    pub fn from_report(code: u64) -> Option<Self> {
        let [kind, rank, peer] = [code >> 56, code >> 48 & 0xff, code >> 40 & 0xff].map(|part| part as u32);
        let number = code as u32;
        Some(match kind {
            0 if code == 0 => return None,
            1 => Self::EntryTimeout { rank, peer, epoch: number },
            2 => Self::ExitTimeout { rank, peer, epoch: number },
            3 => Self::Disagree { rank, peer, epoch: number },
            4 => Self::Destination { index: number },
            5 => Self::Rows { rank, peer, rows: number },
            6 => Self::Permutation { rank, position: number },
            7 => Self::Offsets { rank, end: number },
            8 => Self::Move { rank, index: number },
            _ => Self::Unknown { code },
        })
    }
}
