//! An executor's access to the expert memory of a rank and its peers.

use super::checksum::{PART_BYTES, PieceHash};
use super::error::MemoryFault;

/// Processes a row in parts that fit in the L1 cache. `run` receives the offset of each part and a buffer of the part's
/// length.
pub(super) fn each_part(
    bytes: usize,
    mut run: impl FnMut(usize, &mut [u8]) -> Result<(), MemoryFault>,
) -> Result<(), MemoryFault> {
    let mut part = [0; PART_BYTES];
    (0..bytes).step_by(PART_BYTES).try_for_each(|at| run(at, &mut part[..PART_BYTES.min(bytes - at)]))
}

/// One rank's expert buffer, plus the buffers of peers within reach: threads, processes on one host, or GPUs in one
/// NVLink domain.
pub trait ExpertMemory: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// Whether this rank and `rank` can read each other's buffers; both give the same answer. True for this rank
    /// itself.
    fn reaches(&self, rank: usize) -> bool;

    /// Returns the size of this rank's buffer.
    fn bytes(&self) -> usize;

    /// Reads from this rank's buffer or from a peer's within reach.
    ///
    /// # Errors
    /// If the bytes cannot be read or are out of bounds.
    fn read(&self, rank: usize, offset: usize, into: &mut [u8]) -> Result<(), MemoryFault>;

    /// Writes to this rank's buffer.
    ///
    /// # Errors
    /// If the bytes cannot be written or are out of bounds.
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryFault>;

    /// Copies a row from offset `from` of a buffer within reach to offset `to` of this rank's buffer, and adds the
    /// bytes to `hash`. Source and destination never overlap.
    ///
    /// # Errors
    /// See [`ExpertMemory::read`] and [`ExpertMemory::write`].
    fn copy(
        &mut self,
        rank: usize,
        from: usize,
        to: usize,
        bytes: usize,
        hash: &mut PieceHash,
    ) -> Result<(), MemoryFault> {
        each_part(bytes, |at, part| {
            self.read(rank, from + at, part)?;
            self.write(to + at, part)?;
            self.read(self.rank(), to + at, part)?;
            hash.update(part);
            Ok(())
        })
    }
}
