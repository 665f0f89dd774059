//! Expert buffers that peers read where they lie, for [`semmoe_kernels::reshard`]: ranks are threads, or processes of
//! one host.

use std::any::Any;
use std::sync::atomic::{Ordering, fence};

use semmoe_kernels::reshard::{ExpertMemory, MemoryFault, PieceHash};

use crate::error::RankError;
use crate::memory::HostMemory;

/// Bytes that are hashed while they are in the first cache. A multiple of the hash's block.
const PART_BYTES: usize = 32 << 10;

/// One rank's expert buffer, and those of the ranks that it reaches.
pub struct SharedExperts {
    rank: usize,
    bytes: usize,
    /// `[P]`; null for ranks out of reach.
    buffers: Vec<*mut u8>,
    /// What the memory belongs to.
    _memory: Box<dyn Any + Send>,
}

// SAFETY: the pointers are to memory that any thread may use; `&mut self` alone writes, and to this rank's buffer
// alone.
unsafe impl Send for SharedExperts {}

impl SharedExperts {
    /// The end of a rank; `buffers[p]` is rank p's buffer of `bytes` bytes as mapped here, null if it is out of reach.
    ///
    /// # Safety
    /// What is not null is mapped and stays so for as long as `memory` lives. The buffer of `rank` is written through
    /// this end alone while it lives. No rank reads bytes while their rank writes them: so it is if all ends are used
    /// by [`semmoe_kernels::reshard::Resharder`] and, between its calls, ranks write only what no other rank reads.
    ///
    /// # Panics
    /// If the rank has no buffer of its own.
    #[must_use]
    pub unsafe fn new(rank: usize, buffers: &[*mut u8], bytes: usize, memory: Box<dyn Any + Send>) -> Self {
        assert!(!buffers[rank].is_null(), "a rank reaches its own memory");
        Self { rank, bytes, buffers: buffers.to_vec(), _memory: memory }
    }

    /// The ends of `world` ranks that are threads of this process, in rank order, zeroed. Each `host` ranks reach each
    /// other.
    ///
    /// # Errors
    /// Worlds that there are not, hosts of no ranks, and memory that cannot be had.
    pub fn on_hosts(world: usize, host: usize, bytes: usize) -> Result<Vec<Self>, RankError> {
        let memory = HostMemory::new(world, host, bytes)?;
        // SAFETY: each rank has one end, which keeps the map; who reads what when is the caller's resharders' part.
        let end = |rank| unsafe { Self::new(rank, &memory.buffers(rank), bytes, Box::new(memory.clone())) };
        Ok((0..world).map(end).collect())
    }

    /// This rank's buffer.
    #[must_use]
    pub fn own(&self) -> &[u8] {
        // SAFETY: mapped, of so many bytes, and `&self` keeps this rank from writing.
        unsafe { std::slice::from_raw_parts(self.buffers[self.rank], self.bytes) }
    }

    /// A row of a rank's buffer, if it is within reach and bounds.
    fn row(&self, rank: usize, offset: usize, bytes: usize) -> Result<*mut u8, MemoryFault> {
        let buffer = self.buffers.get(rank).copied().filter(|buffer| !buffer.is_null());
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        match buffer {
            Some(buffer) if fits => Ok(buffer.wrapping_add(offset)),
            Some(_) => Err(MemoryFault { rank, offset, bytes, cause: format!("the buffer has {} bytes", self.bytes) }),
            None => Err(MemoryFault { rank, offset, bytes, cause: format!("rank {} cannot read it", self.rank) }),
        }
    }
}

impl ExpertMemory for SharedExperts {
    fn rank(&self) -> usize {
        self.rank
    }

    fn reaches(&self, rank: usize) -> bool {
        self.buffers.get(rank).is_some_and(|buffer| !buffer.is_null())
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn read(&self, rank: usize, offset: usize, into: &mut [u8]) -> Result<(), MemoryFault> {
        let row = self.row(rank, offset, into.len())?;
        // What peers wrote before their message came is read after it, whatever carried the message.
        fence(Ordering::SeqCst);
        // SAFETY: within a mapped buffer (checked) that its rank does not write now, by the promise of `new`; `into` is
        // not part of it, as no reference to a buffer lives beside this call.
        unsafe { row.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryFault> {
        let row = self.row(self.rank, offset, bytes.len())?;
        // SAFETY: within this rank's buffer (checked), which no rank reads there now; `bytes` cannot be part of it, as
        // `own` borrows `self`.
        unsafe { row.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn copy(
        &mut self,
        rank: usize,
        from: usize,
        to: usize,
        bytes: usize,
        hash: &mut PieceHash,
    ) -> Result<(), MemoryFault> {
        let (source, target) = (self.row(rank, from, bytes)?, self.row(self.rank, to, bytes)?);
        if rank == self.rank && from.abs_diff(to) < bytes {
            return Err(MemoryFault { rank, offset: from, bytes, cause: format!("it overlaps the bytes at {to}") });
        }
        fence(Ordering::SeqCst);
        for at in (0..bytes).step_by(PART_BYTES) {
            let (source, target, part) = (source.wrapping_add(at), target.wrapping_add(at), PART_BYTES.min(bytes - at));
            // SAFETY: both within mapped buffers and apart (checked); the source is not written now and the target not
            // read, by the promise of `new`.
            let copied = unsafe {
                target.copy_from_nonoverlapping(source, part);
                std::slice::from_raw_parts(target, part)
            };
            hash.update(copied);
        }
        Ok(())
    }
}

impl std::fmt::Debug for SharedExperts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedExperts").field("rank", &self.rank).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
