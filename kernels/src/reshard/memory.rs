//! A rank's memory, as an executor uses it.

use super::checksum::{PART_BYTES, PieceHash};
use super::error::MemoryFault;

/// Goes through a row in parts that stay in the first cache: each by its offset, with a buffer of its length.
pub(super) fn each_part(
    bytes: usize,
    mut run: impl FnMut(usize, &mut [u8]) -> Result<(), MemoryFault>,
) -> Result<(), MemoryFault> {
    let mut part = [0; PART_BYTES];
    (0..bytes).step_by(PART_BYTES).try_for_each(|at| run(at, &mut part[..PART_BYTES.min(bytes - at)]))
}

/// One rank's expert buffer, and those of the peers that it can read: threads, processes of one host, GPUs of one
/// NVLink domain.
pub trait ExpertMemory {
    /// This rank.
    fn rank(&self) -> usize;

    /// Whether a peer's buffer can be read from here, and this rank's from there: the same answer on both. True of the
    /// own one.
    fn reaches(&self, rank: usize) -> bool;

    /// Bytes of this rank's buffer.
    fn bytes(&self) -> usize;

    /// Reads from a buffer within reach, the own one included.
    ///
    /// # Errors
    /// Bytes that cannot be read, or are out of bounds.
    fn read(&self, rank: usize, offset: usize, into: &mut [u8]) -> Result<(), MemoryFault>;

    /// Writes to the own buffer.
    ///
    /// # Errors
    /// Bytes that cannot be written, or are out of bounds.
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryFault>;

    /// Copies a row from a buffer within reach to `to` in the own one, and adds the bytes to `hash`. The two never
    /// overlap.
    ///
    /// # Errors
    /// As [`ExpertMemory::read`] and [`ExpertMemory::write`].
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

impl<M: ExpertMemory> ExpertMemory for &mut M {
    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn reaches(&self, rank: usize) -> bool {
        (**self).reaches(rank)
    }

    fn bytes(&self) -> usize {
        (**self).bytes()
    }

    fn read(&self, rank: usize, offset: usize, into: &mut [u8]) -> Result<(), MemoryFault> {
        (**self).read(rank, offset, into)
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryFault> {
        (**self).write(offset, bytes)
    }

    fn copy(
        &mut self,
        rank: usize,
        from: usize,
        to: usize,
        bytes: usize,
        hash: &mut PieceHash,
    ) -> Result<(), MemoryFault> {
        (**self).copy(rank, from, to, bytes, hash)
    }
}

/// Memory that no other rank can reach: everything travels in messages.
#[derive(Debug)]
pub struct OwnMemory<'a> {
    rank: usize,
    buffer: &'a mut [u8],
}

impl<'a> OwnMemory<'a> {
    /// The buffer of a rank.
    pub fn new(rank: usize, buffer: &'a mut [u8]) -> Self {
        Self { rank, buffer }
    }

    fn fault(&self, rank: usize, offset: usize, bytes: usize) -> MemoryFault {
        let cause = match rank == self.rank {
            true => format!("the buffer has {} bytes", self.buffer.len()),
            false => format!("rank {} cannot read it", self.rank),
        };
        MemoryFault { rank, offset, bytes, cause }
    }
}

impl ExpertMemory for OwnMemory<'_> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn reaches(&self, rank: usize) -> bool {
        rank == self.rank
    }

    fn bytes(&self) -> usize {
        self.buffer.len()
    }

    fn read(&self, rank: usize, offset: usize, into: &mut [u8]) -> Result<(), MemoryFault> {
        let own = self.buffer.get(offset..).and_then(|rest| rest.get(..into.len()));
        match own.filter(|_| rank == self.rank) {
            Some(own) => into.copy_from_slice(own),
            None => return Err(self.fault(rank, offset, into.len())),
        }
        Ok(())
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryFault> {
        match self.buffer.get_mut(offset..).and_then(|rest| rest.get_mut(..bytes.len())) {
            Some(own) => own.copy_from_slice(bytes),
            None => return Err(self.fault(self.rank, offset, bytes.len())),
        }
        Ok(())
    }
}
