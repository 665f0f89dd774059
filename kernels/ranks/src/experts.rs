//! Expert buffers that peers read in place, for [`semmoe_kernels::reshard`]; ranks are threads, or processes on one
//! host.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{Ordering, fence};

use semmoe_kernels::reshard::{ExpertMemory, MemoryCause, MemoryFault, PieceHash};

use crate::communicator::check_world;
use crate::error::RankError;
use crate::huge::HugeMap;
use crate::memory::{create_file, sealed_bytes};

/// The location of a rank's buffer, for other threads and for other processes on this machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BufferAddress {
    /// The rank's process.
    pub pid: u32,
    /// The buffer's file descriptor in that process.
    pub fd: i32,
}

impl BufferAddress {
    /// Opens the buffer's file, through its process, for reading and writing.
    ///
    /// # Errors
    /// If the file cannot be opened; the message includes its path.
    pub fn open(self) -> io::Result<File> {
        let path = format!("/proc/{}/fd/{}", self.pid, self.fd);
        let file = File::options().read(true).write(true).open(&path);
        file.map_err(|error| io::Error::new(error.kind(), format!("cannot open {path}: {error}")))
    }
}

/// One rank's expert buffer, and those of ranks within reach. All buffers have the same size.
#[derive(Debug)]
pub struct SharedExperts {
    rank: usize,
    bytes: usize,
    /// Kept open so that other ranks can map it.
    file: File,
    /// `[P]`; `None` for ranks out of reach.
    maps: Vec<Option<HugeMap>>,
}

impl SharedExperts {
    /// Creates a rank's zeroed buffer in a unit of `world` ranks: an unnamed file, which disappears when the last
    /// process that maps it ends. Pages are allocated on first write. No other rank is within reach yet.
    ///
    /// # Errors
    /// If the rank is out of range, or memory cannot be allocated.
    pub fn create(rank: usize, world: usize, bytes: usize) -> Result<Self, RankError> {
        if rank >= world {
            return Err(RankError::NoSuchRank { rank, world });
        }
        let bytes = bytes.max(1);
        let file = create_file("semmoe-experts", bytes)?;
        let mut maps: Vec<Option<HugeMap>> = (0..world).map(|_| None).collect();
        maps[rank] = Some(HugeMap::of(&file, bytes)?);
        Ok(Self { rank, bytes, file, maps })
    }

    /// Creates the ends of `world` ranks that are threads of this process, in rank order. Ranks reach each other within
    /// hosts of `host` ranks.
    ///
    /// # Errors
    /// See [`SharedExperts::create`]; also if hosts have no ranks.
    pub fn on_hosts(world: usize, host: usize, bytes: usize) -> Result<Vec<Self>, RankError> {
        check_world(host)?;
        let mut ends = (0..world).map(|rank| Self::create(rank, world, bytes)).collect::<Result<Vec<_>, _>>()?;
        let addresses: Vec<BufferAddress> = ends.iter().map(Self::address).collect();
        for (rank, end) in ends.iter_mut().enumerate() {
            for peer in (0..world).filter(|&peer| peer != rank && peer / host == rank / host) {
                // SAFETY: each rank has one end; its callers' resharders coordinate accesses.
                unsafe { end.reach(peer, addresses[peer])? };
            }
        }
        Ok(ends)
    }

    /// Returns the address of this rank's buffer.
    #[must_use]
    pub fn address(&self) -> BufferAddress {
        BufferAddress { pid: std::process::id(), fd: self.file.as_raw_fd() }
    }

    /// Maps a peer's buffer, which puts the peer within reach.
    ///
    /// # Safety
    /// The address must be that of the peer's end, and each rank must have one end. No rank may read bytes while their
    /// rank writes them. This holds if all ends are used by [`semmoe_kernels::reshard::Resharder`] and, between its
    /// calls, ranks write only bytes that no other rank reads.
    ///
    /// # Errors
    /// If there is no such rank, or its file cannot be opened, could be truncated, or has a different size.
    pub unsafe fn reach(&mut self, peer: usize, address: BufferAddress) -> Result<(), RankError> {
        let world = self.maps.len();
        let map = self.maps.get_mut(peer).ok_or(RankError::NoSuchRank { rank: peer, world })?;
        let file = address.open().map_err(RankError::memory)?;
        let (found, expected) = (sealed_bytes(&file, self.bytes)?, self.bytes);
        if found != expected {
            let cause = format_args!("rank {peer}'s experts have {found} bytes, expected {expected}");
            return Err(RankError::memory(cause));
        }
        *map = Some(HugeMap::of(&file, self.bytes)?);
        Ok(())
    }

    /// Unmaps a peer's buffer. This rank's own buffer stays mapped.
    pub fn leave(&mut self, peer: usize) {
        if let Some(map) = self.maps.get_mut(peer).filter(|_| peer != self.rank) {
            *map = None;
        }
    }

    /// Moves written bytes of this rank's own buffer into huge pages, as far as available.
    pub fn settle(&self, written: Range<usize>) {
        self.maps[self.rank].iter().for_each(|map| map.collapse(written.clone()));
    }

    /// This rank's buffer.
    #[must_use]
    pub fn own(&self) -> &[u8] {
        match &self.maps[self.rank] {
            // SAFETY: `self.bytes` bytes are mapped, and `&self` prevents this rank from writing.
            Some(map) => unsafe { std::slice::from_raw_parts(map.at, self.bytes) },
            None => &[],
        }
    }

    /// Returns a row of a rank's buffer, if within reach and in bounds.
    fn row(&self, rank: usize, offset: usize, bytes: usize) -> Result<*mut u8, MemoryFault> {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        match self.maps.get(rank).and_then(Option::as_ref) {
            Some(map) if fits => Ok(map.at.wrapping_add(offset)),
            Some(_) => Err(MemoryFault { rank, offset, bytes, cause: MemoryCause::Size(self.bytes) }),
            None => Err(MemoryFault { rank, offset, bytes, cause: MemoryCause::OutOfReach(self.rank) }),
        }
    }
}

impl ExpertMemory for SharedExperts {
    fn rank(&self) -> usize {
        self.rank
    }

    fn reaches(&self, rank: usize) -> bool {
        self.maps.get(rank).is_some_and(Option::is_some)
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn read(&self, rank: usize, offset: usize, into: &mut [u8]) -> Result<(), MemoryFault> {
        let row = self.row(rank, offset, into.len())?;
        // A peer writes before it sends its message; the fence orders this read after the message, whatever the
        // transport.
        fence(Ordering::SeqCst);
        // SAFETY: the row is within a mapped buffer (checked), which its rank does not write now, as the caller of
        // `reach` guarantees. It does not overlap `into`, because no reference to a buffer outlives its call.
        unsafe { row.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryFault> {
        let row = self.row(self.rank, offset, bytes.len())?;
        // SAFETY: the row is within this rank's buffer (checked), where no rank reads it now; `bytes` cannot overlap
        // it, because `own` borrows `self`.
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
            return Err(MemoryFault { rank, offset: from, bytes, cause: MemoryCause::Overlap(to) });
        }
        fence(Ordering::SeqCst);
        // SAFETY: both rows are within mapped buffers and disjoint (checked); the source is not written now and the
        // target not read, as the caller of `reach` guarantees.
        unsafe { hash.copy(source, target, bytes) };
        Ok(())
    }
}
