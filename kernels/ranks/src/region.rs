//! The memory of a group: of one process, or shared between processes.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::error::RankError;
use crate::member::{Member, RawGroup, check_world};
use crate::memory::{attach_memory, create_memory};
use crate::signals::SIGNAL_BYTES;

/// First in shared memory, so that other files are not taken for a group.
const MAGIC: u64 = u64::from_le_bytes(*b"semranks");
const VERSION: u64 = 1;
/// Magic, version, world, bytes of a buffer; padded so that what follows begins a page.
const HEADER_BYTES: usize = 4096;
const HEADER_WORDS: usize = 4;
const PAGE: usize = 4096;

/// P members for P threads of this process, with symmetric buffers of `buffer_bytes` bytes, zeroed.
///
/// # Errors
/// Worlds that there are not, and memory that cannot be had.
pub fn threads(world: usize, buffer_bytes: usize, timeout: Duration) -> Result<Vec<Member>, RankError> {
    let layout = Layout::new(world, buffer_bytes)?;
    let map: MmapRaw = MmapOptions::new().len(layout.total).map_anon().map_err(RankError::memory)?.into();
    // A hint: without huge pages it works as well, only slower.
    let _ = map.advise(Advice::HugePage);
    let map = Arc::new(map);
    (0..world).map(|rank| layout.member(&map, rank, timeout)).collect()
}

/// Memory that several processes map: a file without a name, which cannot shrink.
#[derive(Debug)]
pub struct Shared {
    file: File,
    map: Arc<MmapRaw>,
    layout: Layout,
}

impl Shared {
    /// Makes the memory of a group, zeroed. Give [`Shared::file`] to the other processes (inherited, over a socket, or by its path
    /// under `/proc`), which call [`Shared::attach`].
    ///
    /// # Errors
    /// Worlds that there are not, and memory that cannot be had.
    pub fn create(world: usize, buffer_bytes: usize) -> Result<Self, RankError> {
        let layout = Layout::new(world, buffer_bytes)?;
        let (file, map) = create_memory("semmoe-ranks", layout.total)?;
        let shared = Self { file, map: Arc::new(map), layout };
        shared.layout.write_header(&shared.map);
        Ok(shared)
    }

    /// Maps what another process has created.
    ///
    /// # Safety
    /// No process writes to the file but through members of this crate.
    ///
    /// # Errors
    /// A file that is no group's memory, or could be cut short.
    pub unsafe fn attach(file: File) -> Result<Self, RankError> {
        let map = Arc::new(attach_memory(&file, HEADER_BYTES)?);
        let length = map.len();
        let layout = Layout::read_header(&map)?;
        if layout.total != length {
            let expected = layout.total;
            return Err(RankError::memory(format_args!("the file has {length} bytes, expected {expected}")));
        }
        Ok(Self { file, map, layout })
    }

    /// What other processes attach to.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// P
    #[must_use]
    pub fn world(&self) -> usize {
        self.layout.world
    }

    /// Joins as a rank, once.
    ///
    /// # Errors
    /// A rank that there is not, or that has joined before.
    pub fn member(&self, rank: usize, timeout: Duration) -> Result<Member, RankError> {
        self.layout.member(&self.map, rank, timeout)
    }
}

/// Header, signals of all ranks, buffers of all ranks, each beginning a page.
#[derive(Clone, Copy, Debug)]
struct Layout {
    world: usize,
    buffer_bytes: usize,
    stride: usize,
    buffers: usize,
    total: usize,
}

impl Layout {
    fn new(world: usize, buffer_bytes: usize) -> Result<Self, RankError> {
        check_world(world)?;
        let buffers = HEADER_BYTES + (world * SIGNAL_BYTES).next_multiple_of(PAGE);
        let stride = buffer_bytes.checked_next_multiple_of(PAGE);
        let total = stride.and_then(|stride| stride.checked_mul(world)?.checked_add(buffers));
        match (stride, total) {
            (Some(stride), Some(total)) if total <= isize::MAX as usize => {
                Ok(Self { world, buffer_bytes, stride, buffers, total })
            }
            _ => {
                let (found, limit) = (buffer_bytes as u64, isize::MAX as u64 / world as u64);
                Err(RankError::TooLarge { what: "bytes of a symmetric buffer", found, limit })
            }
        }
    }

    fn write_header(&self, map: &MmapRaw) {
        let words = [MAGIC, VERSION, self.world as u64, self.buffer_bytes as u64];
        // SAFETY: the map is longer than a header and aligned to pages, and nobody else has it yet.
        unsafe { map.as_mut_ptr().cast::<[u64; HEADER_WORDS]>().write(words) };
    }

    fn read_header(map: &MmapRaw) -> Result<Self, RankError> {
        // SAFETY: the map is at least a header long (checked) and aligned to pages; members never write the header.
        let [magic, version, world, bytes] = unsafe { map.as_ptr().cast::<[u64; HEADER_WORDS]>().read() };
        if magic != MAGIC || version != VERSION {
            let message =
                format_args!("it begins with {magic:#x}, version {version}; expected {MAGIC:#x}, version {VERSION}");
            return Err(RankError::memory(message));
        }
        let limit = usize::MAX;
        Self::new(usize::try_from(world).unwrap_or(limit), usize::try_from(bytes).unwrap_or(limit))
    }

    fn member(&self, map: &Arc<MmapRaw>, rank: usize, timeout: Duration) -> Result<Member, RankError> {
        let base = map.as_mut_ptr();
        // Within the map: `total` is the end of the last.
        let buffers: Vec<*mut u8> =
            (0..self.world).map(|p| base.wrapping_add(self.buffers + p * self.stride)).collect();
        let signals: Vec<*mut u8> =
            (0..self.world).map(|p| base.wrapping_add(HEADER_BYTES + p * SIGNAL_BYTES)).collect();
        let group = RawGroup { rank, buffers: &buffers, buffer_bytes: self.buffer_bytes, signals: &signals, timeout };
        // SAFETY: the layout keeps all parts apart and in the map, which begins as zeros and lives as long as the member holds it;
        // a rank joins once, and members keep to the collectives.
        unsafe { Member::with_memory(group, Some(Box::new(Arc::clone(map)))) }
    }
}
