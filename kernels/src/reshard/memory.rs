//! A rank's memory, as used by an executor.

use super::checksum::{PART_BYTES, PieceHash};
use super::error::MemoryFault;

/// Processes a row in parts that fit the L1 cache: each by its offset, with a buffer of its length.
pub(super) fn each_part(
    bytes: usize,
    mut run: impl FnMut(usize, &mut [u8]) -> Result<(), MemoryFault>,
) -> Result<(), MemoryFault> {
    let mut part = [0; PART_BYTES];
    (0..bytes).step_by(PART_BYTES).try_for_each(|at| run(at, &mut part[..PART_BYTES.min(bytes - at)]))
}

/// One rank's expert buffer, and those of the peers within reach: threads, processes on one host, GPUs of one NVLink
/// domain.
pub trait ExpertMemory: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// Whether a peer's buffer can be read from here, and this rank's from there; the answer is equal on both. True for
    /// this rank itself.
    fn reaches(&self, rank: usize) -> bool;

    /// Bytes of this rank's buffer.
    fn bytes(&self) -> usize;

    /// Reads from a buffer within reach, or from this rank's own.
    ///
    /// # Errors
    /// Bytes that cannot be read, or are out of bounds.
    fn read(&self, rank: usize, offset: usize, into: &mut [u8]) -> Result<(), MemoryFault>;

    /// Writes to this rank's own buffer.
    ///
    /// # Errors
    /// Bytes that cannot be written, or are out of bounds.
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryFault>;

    /// Copies a row from a buffer within reach to `to` in this rank's own one, and adds the bytes to `hash`. The two
    /// never overlap.
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
