//! The copies of a layout switch, checked before any launch and planned by `semmoe_kernels::reshard`.

use semmoe_kernels::reshard::Move;
use semmoe_kernels::reshard::kv::KvMove;

use crate::calls::{ELEMENT_ALIGNMENT, collective};
use crate::error::LaunchError;
use crate::launch::{Grid, Launch};
use crate::params::ReshardParams;
use crate::team::{Buffer, Team, in_range};

/// A copy, in the form that the kernel reads from device memory: five 64-bit numbers, then two 32-bit numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceMove([u64; 6]);

/// Bytes of a [`DeviceMove`].
pub const MOVE_BYTES: u64 = 48;

impl DeviceMove {
    /// Returns the kernel's representation.
    pub fn to_bytes(self) -> [u8; MOVE_BYTES as usize] {
        let mut bytes = [0; MOVE_BYTES as usize];
        for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(self.0) {
            *to = word.to_ne_bytes();
        }
        bytes
    }

    /// Creates a KV cache move. Pages of these sizes are contiguous in one buffer before the switch and in another
    /// after it.
    pub fn of_page(moved: &KvMove, from_page_bytes: usize, to_page_bytes: usize) -> Self {
        let from = moved.from.page as usize * from_page_bytes + moved.from_offset;
        let to = moved.page as usize * to_page_bytes + moved.to_offset;
        let words = [from, moved.from_stride, to, moved.to_stride, moved.bytes].map(|word| word as u64);
        Self::new(words, moved.rows, moved.from.rank)
    }

    fn new([from, from_stride, to, to_stride, bytes]: [u64; 5], rows: usize, rank: usize) -> Self {
        // The last word has two halves, the lower one first: GPUs and their hosts are little-endian.
        Self([from, from_stride, to, to_stride, bytes, rows as u64 & 0xffff_ffff | (rank as u64) << 32])
    }
}

impl From<&Move> for DeviceMove {
    fn from(moved: &Move) -> Self {
        let Move { from, to, .. } = moved;
        let words = [from.offset, from.stride, to.offset, to.stride, moved.bytes].map(|word| word as u64);
        Self::new(words, moved.rows, from.rank)
    }
}

/// Moves one layer of a switch, or its entire KV cache. Every rank of the team calls it for the same step of the same
/// switch; when it ends on one rank, all ranks have finished reading.
#[derive(Clone, Copy, Debug)]
pub struct Reshard<'a> {
    /// P x the source; all have the same size.
    pub from: &'a [Buffer],
    /// L x the destination; all have the same size. For weights, it is the rank's own `from`.
    pub to: &'a [Buffer],
    /// L x `[count]` [`DeviceMove`]s to the rank. The kernel rejects moves that are out of bounds.
    pub moves: &'a [Buffer],
    /// L: number of moves.
    pub counts: &'a [u64],
    /// Digest of the switch (`Switch::digest`, `KvPlan::digest`); ranks stop if theirs differ.
    pub digest: u64,
    /// The layer.
    pub step: u64,
}

impl Reshard<'_> {
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self, team: &Team, grid: Grid) -> Result<Launch, LaunchError> {
        let least = |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.bytes).min().unwrap_or_default();
        let counts = team.counts("moves", self.counts, i32::MAX as u64)?;
        let most = self.counts.iter().copied().max().unwrap_or_default();
        let (from_bytes, to_bytes) = (least(self.from), least(self.to));
        let params = ReshardParams {
            team: team.params(),
            from: team.peers("from", self.from, from_bytes, ELEMENT_ALIGNMENT)?,
            to: team.locals("to", self.to, to_bytes, ELEMENT_ALIGNMENT)?,
            moves: team.locals("moves", self.moves, most * MOVE_BYTES, 8)?,
            counts,
            from_bytes,
            to_bytes,
            digest: (self.digest ^ self.digest >> 32) as u32,
            step: in_range("step", self.step, 0, u64::from(u32::MAX))?,
        };
        collective("semmoe_reshard", team, grid.check(team)?, &params)
    }
}
