//! Memory shared by the ranks of one host: a bell per rank, a ring per ordered pair of ranks, and each rank's rows.

use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use memmap2::MmapRaw;
use semmoe_kernels::Element;
use semmoe_ranks::{Bell, MAX_WORLD, SharedHalves, attach_memory, create_memory, halves_bytes};

/// Maximum number of ranks that can share memory.
pub const MAX_SHARED_WORLD: usize = MAX_WORLD;

/// Magic bytes at the start of the memory.
const MAGIC: u64 = u64::from_le_bytes(*b"semmoeEP");
const VERSION: u64 = 2;
/// The header's words: magic, version, ranks, bytes per ring, elements per half, session.
const HEADER_WORDS: usize = 6;
const PAGE: usize = 4096;
/// Two cache lines, because processors prefetch the adjacent line.
const BELL_BYTES: usize = 128;

/// Minimum and maximum size of a ring.
const RING_BYTES: (usize, usize) = (64 << 10, 1 << 20);
/// Target for the total size of all rings; the minimum ring size can push the total above it.
const RINGS_BYTES: usize = 64 << 20;

/// The words of a ring that its sender writes; the receiver only clears `starved`.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct SenderWords {
    /// Total number of bytes written.
    pub(super) written: AtomicU64,
    /// Nonzero while the sender waits for free space.
    pub(super) starved: AtomicU32,
}

/// The control words of one ring; all zeros means empty.
#[derive(Debug)]
#[repr(C)]
pub(super) struct RingWords {
    pub(super) sender: SenderWords,
    pub(super) receiver: ReceiverWords,
}

/// The words of a ring that its receiver writes.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct ReceiverWords {
    /// Total number of bytes read.
    pub(super) read: AtomicU64,
}

/// One unit's shared memory, mapped into this process. Pages are allocated on first use.
#[derive(Debug)]
pub struct ShmMemory {
    map: MmapRaw,
    pub(super) layout: Layout,
}

/// The order of the parts: header, bells, ring words, rings, each rank's rows. Each part is page-aligned. Rings are
/// ordered by sender, then by receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub(super) world: usize,
    pub(super) ring_bytes: usize,
    words: usize,
    rings: usize,
    elements: usize,
    rows: usize,
    rows_stride: usize,
    total: usize,
}

/// The reason that memory cannot be shared.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cannot use the ranks' shared memory: {0}")]
pub struct ShmError(String);

impl ShmError {
    pub(crate) fn new(cause: impl fmt::Display) -> Self {
        Self(cause.to_string())
    }
}

impl ShmMemory {
    /// Creates a unit's shared memory, with space for the `elements` row elements that a rank sends or returns in one
    /// collective. It is freed when the last process with the file or the mapping open exits, even if that process
    /// crashes. The other ranks open the file by its path under `/proc`.
    ///
    /// # Errors
    /// There are more ranks than can share memory, or the memory cannot be allocated.
    pub fn create(world: usize, elements: usize, session: u64) -> Result<(File, Self), ShmError> {
        let layout = Layout::new(world, elements)?;
        let (file, map) = create_memory("semmoe-worker", layout.total).map_err(ShmError::new)?;
        // SAFETY: the mapping is longer than a header and page-aligned, and no other process has mapped it yet.
        unsafe { map.as_mut_ptr().cast::<[u64; HEADER_WORDS]>().write(layout.header(session)) };
        Ok((file, Self { map, layout }))
    }

    /// Maps the memory that rank 0 created for this world and session.
    ///
    /// # Errors
    /// The file can be truncated, or its size or header does not match.
    pub fn attach(file: &File, world: usize, elements: usize, session: u64) -> Result<Self, ShmError> {
        let layout = Layout::new(world, elements)?;
        let map = attach_memory(file, layout.total).map_err(ShmError::new)?;
        if map.len() != layout.total {
            let (found, expected) = (map.len(), layout.total);
            return Err(ShmError::new(format_args!("the file has {found} bytes, expected {expected}")));
        }
        // SAFETY: the mapping is longer than a header and page-aligned; only its creator writes the header.
        let header = unsafe { map.as_ptr().cast::<[u64; HEADER_WORDS]>().read() };
        if header != layout.header(session) {
            return Err(ShmError::new("the file belongs to another unit"));
        }
        Ok(Self { map, layout })
    }

    /// The bell that a rank sleeps on.
    pub(super) fn bell(&self, rank: usize) -> &Bell {
        assert!(rank < self.layout.world, "a rank of this unit");
        // SAFETY: the offset is within the mapping and aligned, because bells start at a page boundary and BELL_BYTES
        // is a multiple of their alignment. A bell is atomic and valid for any bytes.
        unsafe { &*self.at(PAGE + rank * BELL_BYTES).cast() }
    }

    /// Returns the control words of the ring from one rank to another, and a pointer to the ring's bytes.
    pub(super) fn ring(&self, from: usize, to: usize) -> (&RingWords, *mut u8) {
        assert!(from < self.layout.world && to < self.layout.world, "ranks of this unit");
        let ring = from * self.layout.world + to;
        // SAFETY: the offset is within the mapping and aligned, because the words start at a page boundary. They are
        // atomic and valid for any bytes.
        let words = unsafe { &*self.at(self.layout.words + ring * size_of::<RingWords>()).cast() };
        (words, self.at(self.layout.rings + ring * self.layout.ring_bytes))
    }

    /// Returns a rank's view of the shared rows. Of the `world` ranks in the unit, those in `ranks` share the memory;
    /// `ranks` is ascending and includes this rank. Call this once per rank, in that rank's process.
    pub(crate) fn rows<T: Element>(self: &Arc<Self>, rank: usize, ranks: &[usize], world: usize) -> SharedHalves<T> {
        const { assert!(size_of::<T>() <= size_of::<f32>(), "the memory is sized for f32") };
        let Layout { elements, rows, rows_stride, .. } = self.layout;
        assert_eq!(ranks.len(), self.layout.world, "the memory is sized for this many ranks");
        let mut buffers = vec![std::ptr::null_mut(); world];
        ranks.iter().enumerate().for_each(|(at, &rank)| buffers[rank] = self.at(rows + at * rows_stride));
        // SAFETY: each rank has its own page-aligned part of the mapping, which the returned value keeps alive; a rank
        // joins only once, and its collectives are the unit's.
        unsafe { SharedHalves::new(rank, &buffers, elements, Box::new(Arc::clone(self))) }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(offset)
    }
}

const _: () = assert!(size_of::<Bell>() <= BELL_BYTES && BELL_BYTES.is_multiple_of(align_of::<Bell>()));

impl Layout {
    fn new(world: usize, elements: usize) -> Result<Self, ShmError> {
        if !(1..=MAX_SHARED_WORLD).contains(&world) {
            return Err(ShmError::new(format_args!("{world} ranks, expected 1 to {MAX_SHARED_WORLD}")));
        }
        let (least, most) = RING_BYTES;
        let share = RINGS_BYTES / (world * world);
        // A power of two, so that ring offsets stay continuous when a position wraps.
        let ring_bytes = (1 << share.max(1).ilog2()).clamp(least, most);
        let words = PAGE + (world * BELL_BYTES).next_multiple_of(PAGE);
        let rings = words + (world * world * size_of::<RingWords>()).next_multiple_of(PAGE);
        let rows = rings + world * world * ring_bytes;
        let stride = halves_bytes::<f32>(elements).and_then(|bytes| bytes.checked_next_multiple_of(PAGE));
        let total = stride.and_then(|stride| stride.checked_mul(world)?.checked_add(rows));
        match (stride, total.filter(|&total| total <= isize::MAX as usize)) {
            (Some(rows_stride), Some(total)) => {
                Ok(Self { world, ring_bytes, words, rings, elements, rows, rows_stride, total })
            }
            _ => Err(ShmError::new(format_args!("{elements} row elements for each of {world} ranks are too many"))),
        }
    }

    fn header(&self, session: u64) -> [u64; HEADER_WORDS] {
        [MAGIC, VERSION, self.world as u64, self.ring_bytes as u64, self.elements as u64, session]
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_the_units_own_memory_is_attached() {
        let (file, memory) = ShmMemory::create(3, 10, 7).unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(ShmMemory::attach(&file, 3, 10, 7).unwrap().layout, memory.layout);
        let refused = |file: &File, world, session, why: &str| {
            let error = ShmMemory::attach(file, world, 10, session).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        refused(&file, 3, 8, "belongs to another unit");
        refused(&file, 2, 7, "bytes, expected");
        refused(&file, 4, 7, "expected at least");
        refused(&file, 65, 7, "65 ranks, expected 1 to 64");
        let mut plain = tempfile::tempfile().unwrap();
        plain.write_all(&vec![0; memory.layout.total]).unwrap();
        refused(&plain, 3, 7, "cannot use");
        assert!(ShmMemory::create(0, 10, 1).is_err());
        for world in 1..=MAX_SHARED_WORLD {
            let Layout { ring_bytes, total, .. } = Layout::new(world, 10).unwrap();
            assert!(ring_bytes.is_power_of_two() && total <= 300 << 20, "{world}");
        }
    }
}
