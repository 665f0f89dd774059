//! Expert buffers that peers read in place, for [`semmoe_kernels::reshard`]: ranks are threads, or processes on one
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

/// How other processes of this machine, and other threads, find a rank's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BufferAddress {
    /// The rank's process.
    pub pid: u32,
    /// The buffer's file descriptor in that process.
    pub fd: i32,
}

impl BufferAddress {
    /// Opens the file behind it, through its process, for reading and writing.
    ///
    /// # Errors
    /// The file cannot be opened; the message names its path.
    pub fn open(self) -> io::Result<File> {
        let path = format!("/proc/{}/fd/{}", self.pid, self.fd);
        let file = File::options().read(true).write(true).open(&path);
        file.map_err(|error| io::Error::new(error.kind(), format!("{path} cannot be opened: {error}")))
    }
}

/// One rank's expert buffer, and those of the ranks within reach. All buffers have the same size.
#[derive(Debug)]
pub struct SharedExperts {
    rank: usize,
    bytes: usize,
    /// Kept open while ranks may want to map it.
    file: File,
    /// `[P]`; `None` for ranks out of reach.
    maps: Vec<Option<HugeMap>>,
}

impl SharedExperts {
    /// Creates a rank's zeroed buffer in a unit of `world`: an unnamed file, which disappears when the last process
    /// that maps it ends. Pages are allocated on first write. Reaches no other rank yet.
    ///
    /// # Errors
    /// A rank outside the world, or memory that cannot be allocated.
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

    /// The ends of `world` ranks that are threads of this process, in rank order. Ranks reach each other within hosts
    /// of `host` ranks.
    ///
    /// # Errors
    /// See [`SharedExperts::create`]; hosts without ranks.
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

    /// How others find this rank's buffer.
    #[must_use]
    pub fn address(&self) -> BufferAddress {
        BufferAddress { pid: std::process::id(), fd: self.file.as_raw_fd() }
    }

    /// Maps a peer's buffer, which is within reach from then on.
    ///
    /// # Safety
    /// The address is that of the peer's end, and each rank has one end. No rank reads bytes while their rank writes
    /// them. This holds if all ends are used by [`semmoe_kernels::reshard::Resharder`] and, between its calls, ranks
    /// write only what no other rank reads.
    ///
    /// # Errors
    /// No such rank; a file that cannot be opened, could be truncated or has another size.
    pub unsafe fn reach(&mut self, peer: usize, address: BufferAddress) -> Result<(), RankError> {
        let world = self.maps.len();
        let map = self.maps.get_mut(peer).ok_or(RankError::NoSuchRank { rank: peer, world })?;
        let file = address.open().map_err(RankError::memory)?;
        let (found, expected) = (sealed_bytes(&file, self.bytes)?, self.bytes);
        if found != expected {
            let cause = format_args!("the experts of rank {peer} have {found} bytes, expected {expected}");
            return Err(RankError::memory(cause));
        }
        *map = Some(HugeMap::of(&file, self.bytes)?);
        Ok(())
    }

    /// Unmaps a peer's buffer. The rank's own buffer stays mapped.
    pub fn leave(&mut self, peer: usize) {
        if let Some(map) = self.maps.get_mut(peer).filter(|_| peer != self.rank) {
            *map = None;
        }
    }

    /// Moves written bytes of the rank's own buffer into huge pages, as far as available.
    pub fn settle(&self, written: Range<usize>) {
        self.maps[self.rank].iter().for_each(|map| map.collapse(written.clone()));
    }

    /// This rank's buffer.
    #[must_use]
    pub fn own(&self) -> &[u8] {
        match &self.maps[self.rank] {
            // SAFETY: mapped with `self.bytes` bytes, and `&self` prevents this rank from writing.
            Some(map) => unsafe { std::slice::from_raw_parts(map.at, self.bytes) },
            None => &[],
        }
    }

    /// A row of a rank's buffer, if within reach and bounds.
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
        // A peer writes, then sends its message; this read must follow the message, whatever transport carried it.
        fence(Ordering::SeqCst);
        // SAFETY: within a mapped buffer (checked) that its rank does not write now, as promised to `reach`; `into` is
        // not part of it, as no reference to a buffer outlives this call.
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
            return Err(MemoryFault { rank, offset: from, bytes, cause: MemoryCause::Overlap(to) });
        }
        fence(Ordering::SeqCst);
        // SAFETY: both within mapped buffers and disjoint (checked); the source is not written now and the target not
        // read, as guaranteed to `reach`.
        unsafe { hash.copy(source, target, bytes) };
        Ok(())
    }
}
