//! Errors found before a launch, and reasons why a kernel stopped.

use semmoe_kernels::Dtype;

/// An error of a GPU's driver or of NCCL.
pub type GpuError = Box<dyn std::error::Error + Send + Sync>;

/// A refused call; nothing was launched.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LaunchError {
    /// A count or size out of its range.
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
    /// A null address where there must be memory.
    #[error("{what} {index} is null")]
    Null {
        /// The array of buffers.
        what: &'static str,
        /// The rank, or the place among the ranks of the launch.
        index: usize,
    },
    /// An address that is not a multiple of the access size.
    #[error("{what} {index} is at {address:#x}, expected a multiple of {alignment}")]
    Misaligned {
        /// The array of buffers.
        what: &'static str,
        /// The rank, or the place among the ranks of the launch.
        index: usize,
        /// The address.
        address: u64,
        /// The required multiple.
        alignment: u64,
    },
    /// A buffer is smaller than the call needs: with symmetric memory, the call reaches past its end.
    #[error("{what} {index} has {found} bytes, expected at least {expected}")]
    TooSmall {
        /// The array of buffers.
        what: &'static str,
        /// The rank, or the place among the ranks of the launch.
        index: usize,
        /// Bytes it has.
        found: u64,
        /// Bytes the call needs.
        expected: u64,
    },
    /// A list whose length differs from the number of ranks.
    #[error("{what} lists {found} buffers, expected {expected}")]
    Count {
        /// The array of buffers.
        what: &'static str,
        /// Buffers it has.
        found: usize,
        /// Ranks.
        expected: usize,
    },
    /// Elements of a type that the kernel does not support.
    #[error("{what} has elements of type {}, expected f32 or bf16", .found.name())]
    Element {
        /// The operation.
        what: &'static str,
        /// Their type.
        found: Dtype,
    },
}

/// Why a kernel stopped: what it left in its report word before the trap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Stopped {
    /// A peer did not begin the call in time.
    #[error("rank {rank} waited for rank {peer} to begin call {epoch}, and gave up at the time-out")]
    EntryTimeout {
        /// The rank that waited.
        rank: u32,
        /// The rank that it waited for.
        peer: u32,
        /// The number of the call, counted per block.
        epoch: u32,
    },
    /// A peer began the call and did not end it in time.
    #[error("rank {rank} waited for rank {peer} to end call {epoch}, and gave up at the time-out")]
    ExitTimeout {
        /// The rank that waited.
        rank: u32,
        /// The rank that it waited for.
        peer: u32,
        /// The number of the call, counted per block.
        epoch: u32,
    },
    /// A peer made another call, or this call with another shape.
    #[error("rank {rank} and rank {peer} made different calls, or calls of different shapes, as call {epoch}")]
    Disagree {
        /// The rank that detected it.
        rank: u32,
        /// The other one.
        peer: u32,
        /// The number of the call, counted per block.
        epoch: u32,
    },
    /// A destination, or the rank of an expert, is out of range.
    #[error("destination or expert {index} is out of range")]
    Destination {
        /// Its index.
        index: u32,
    },
    /// More rows than there is room for.
    #[error("rank {peer} would get {rows} rows, more than there is room for (found by rank {rank})")]
    Rows {
        /// The rank that detected it.
        rank: u32,
        /// The rank whose capacity is exceeded.
        peer: u32,
        /// Rows.
        rows: u32,
    },
    /// A position of the permutation holds no token.
    #[error("position {position} of the permutation of rank {rank} is out of range")]
    Permutation {
        /// Whose permutation.
        rank: u32,
        /// The position.
        position: u32,
    },
    /// The offsets of a rank descend or exceed the tokens.
    #[error("the offsets of rank {rank} end at {end}, which fits neither their begin nor the tokens")]
    Offsets {
        /// Whose rows.
        rank: u32,
        /// The offset.
        end: u32,
    },
    /// A move of a layout switch leaves its memory, or names no rank.
    #[error("move {index} of rank {rank} is out of range")]
    Move {
        /// Whose move.
        rank: u32,
        /// Its index.
        index: u32,
    },
    /// A code that no kernel of this version writes.
    #[error("a kernel stopped with the unknown code {code:#x}")]
    Unknown {
        /// The report word.
        code: u64,
    },
}

impl Stopped {
    /// The rank that was late, if one was the cause.
    pub fn late(&self) -> Option<usize> {
        match self {
            Self::EntryTimeout { peer, .. } | Self::ExitTimeout { peer, .. } => Some(*peer as usize),
            _ => None,
        }
    }

    /// Reads a report word; `None` for 0: nothing stopped.
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
