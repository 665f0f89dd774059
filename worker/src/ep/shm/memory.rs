//! The memory that the ranks of one host share: a bell per rank, a ring per ordered pair of ranks, and each rank's
//! rows.

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
/// Magic, version, ranks, bytes of a ring, elements of a half, session.
const HEADER_WORDS: usize = 6;
const PAGE: usize = 4096;
/// A cache line, and the adjacent one that processors prefetch.
const BELL_BYTES: usize = 128;

/// Minimum and maximum size of a ring.
const RING_BYTES: (usize, usize) = (64 << 10, 1 << 20);
/// Target for the total size of all rings; the minimum per ring may exceed it.
const RINGS_BYTES: usize = 64 << 20;

/// The words that a ring's sender writes.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct SenderWords {
    /// Bytes written since the beginning.
    pub(super) written: AtomicU64,
    /// Nonzero if the sender waits for room.
    pub(super) starved: AtomicU32,
}

/// The words of one ring; all zeros means empty.
#[derive(Debug)]
#[repr(C)]
pub(super) struct RingWords {
    pub(super) sender: SenderWords,
    pub(super) receiver: ReceiverWords,
}

/// The words that a ring's receiver writes.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct ReceiverWords {
    /// Bytes read since the beginning.
    pub(super) read: AtomicU64,
}

/// One unit's memory, mapped into this process. Pages are allocated on first use.
#[derive(Debug)]
pub struct ShmMemory {
    map: MmapRaw,
    pub(super) layout: Layout,
}

/// Header, bells, ring words, rings, rows of each rank; each part is page-aligned. Rings are ordered by sender, then by
/// receiver.
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

/// Reasons why memory cannot be shared.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the memory that the ranks share cannot be used: {0}")]
pub struct ShmError(String);

impl ShmError {
    pub(crate) fn new(cause: impl fmt::Display) -> Self {
        Self(cause.to_string())
    }
}

impl ShmMemory {
    /// Creates the memory of a unit, with room for `elements` elements of rows that a rank sends or returns in one
    /// collective. It disappears with the last process that has the file or the mapping open, however that ends. The
    /// other ranks attach to the file by its path under `/proc`.
    ///
    /// # Errors
    /// More ranks than can share memory, or no memory.
    pub fn create(world: usize, elements: usize, session: u64) -> Result<(File, Self), ShmError> {
        let layout = Layout::new(world, elements)?;
        let (file, map) = create_memory("semmoe-worker", layout.total).map_err(ShmError::new)?;
        // SAFETY: the mapping is longer than a header and page-aligned, and no other process has it yet.
        unsafe { map.as_mut_ptr().cast::<[u64; HEADER_WORDS]>().write(layout.header(session)) };
        Ok((file, Self { map, layout }))
    }

    /// Maps the memory that rank 0 created for this world and session.
    ///
    /// # Errors
    /// A file that could be truncated, has another size, or another header.
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
            return Err(ShmError::new("the file is not this unit's"));
        }
        Ok(Self { map, layout })
    }

    /// The bell that a rank sleeps on.
    pub(super) fn bell(&self, rank: usize) -> &Bell {
        assert!(rank < self.layout.world, "a rank of this unit");
        // SAFETY: within the mapping, page-aligned plus multiples larger than a bell; a bell is atomic and valid for
        // any bytes.
        unsafe { &*self.at(PAGE + rank * BELL_BYTES).cast() }
    }

    /// The words of the ring from one rank to another, and the start of its bytes.
    pub(super) fn ring(&self, from: usize, to: usize) -> (&RingWords, *mut u8) {
        assert!(from < self.layout.world && to < self.layout.world, "ranks of this unit");
        let ring = from * self.layout.world + to;
        // SAFETY: within the mapping, page-aligned plus multiples of the words; they are atomic and valid for any
        // bytes.
        let words = unsafe { &*self.at(self.layout.words + ring * size_of::<RingWords>()).cast() };
        (words, self.at(self.layout.rings + ring * self.layout.ring_bytes))
    }

    /// A rank's end of the memory for rows, in a unit of `world` ranks of which the ascending `ranks`, this one
    /// included, share the memory. Call it once per rank, in that rank's process.
    pub(crate) fn rows<T: Element>(self: &Arc<Self>, rank: usize, ranks: &[usize], world: usize) -> SharedHalves<T> {
        const { assert!(size_of::<T>() <= size_of::<f32>(), "the memory has room for f32") };
        let Layout { elements, rows, rows_stride, .. } = self.layout;
        assert_eq!(ranks.len(), self.layout.world, "the memory for this many ranks");
        let mut buffers = vec![std::ptr::null_mut(); world];
        ranks.iter().enumerate().for_each(|(at, &rank)| buffers[rank] = self.at(rows + at * rows_stride));
        // SAFETY: each rank has its own page-aligned part of the mapping, which the end keeps alive; a rank joins once,
        // and its collectives are those of the unit.
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
        // A power of two, so that positions wrap around as they count up.
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
            _ => Err(ShmError::new(format_args!("{elements} elements for the rows of each of {world} ranks"))),
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
        refused(&file, 3, 8, "not this unit's");
        refused(&file, 2, 7, "bytes, expected");
        refused(&file, 4, 7, "expected at least");
        refused(&file, 65, 7, "65 ranks, expected 1 to 64");
        let mut plain = tempfile::tempfile().unwrap();
        plain.write_all(&vec![0; memory.layout.total]).unwrap();
        refused(&plain, 3, 7, "cannot be used");
        assert!(ShmMemory::create(0, 10, 1).is_err());
        for world in 1..=MAX_SHARED_WORLD {
            let Layout { ring_bytes, total, .. } = Layout::new(world, 10).unwrap();
            assert!(ring_bytes.is_power_of_two() && total <= 300 << 20, "{world}");
        }
    }
}
