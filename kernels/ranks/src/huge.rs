//! A shared mapping that starts at a huge page boundary, so that it can use huge pages.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::ptr::null_mut;

use libc::{
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE,
    c_int,
};

use crate::error::RankError;

/// Assumed size of a huge page.
const HUGE: usize = 2 << 20;

/// Linux 6.1: moves the mapping's contents to huge pages now, regardless of the setting for shared memory.
const MADV_COLLAPSE: c_int = 25;

/// A file mapping.
#[derive(Debug)]
pub(crate) struct HugeMap {
    /// The first byte.
    pub(crate) at: *mut u8,
    bytes: usize,
    /// The reserved address range, large enough to contain a huge page boundary.
    reserved: *mut u8,
    reserved_bytes: usize,
}

// SAFETY: any thread may use the memory; the user coordinates writes.
unsafe impl Send for HugeMap {}
// SAFETY: as above; this type itself neither reads nor writes the memory.
unsafe impl Sync for HugeMap {}

impl HugeMap {
    /// Maps the first `bytes` bytes of a file that is at least as long and cannot be truncated.
    pub(crate) fn of(file: &File, bytes: usize) -> Result<Self, RankError> {
        let failed =
            || RankError::memory(format_args!("cannot map {bytes} bytes: {}", std::io::Error::last_os_error()));
        let reserved_bytes =
            bytes.checked_next_multiple_of(HUGE).and_then(|bytes| bytes.checked_add(HUGE)).ok_or_else(failed)?;
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        // SAFETY: this creates a new mapping without memory, at an address chosen by the system.
        let reserved = unsafe { libc::mmap(null_mut(), reserved_bytes, PROT_NONE, flags, -1, 0) };
        if reserved == MAP_FAILED {
            return Err(failed());
        }
        let reserved = reserved.cast::<u8>();
        let map = Self { at: reserved.wrapping_add(reserved.align_offset(HUGE)), bytes, reserved, reserved_bytes };
        // SAFETY: the range is within the reservation just made, which nothing else uses.
        let at = unsafe {
            libc::mmap(map.at.cast(), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.as_raw_fd(), 0)
        };
        if at == MAP_FAILED { Err(failed()) } else { Ok(map) }
    }

    /// Moves written bytes into huge pages, for each huge page that lies entirely in the range. If none are available,
    /// small pages remain in use.
    pub(crate) fn collapse(&self, written: Range<usize>) {
        let end = written.end.min(self.bytes);
        for at in (written.start.next_multiple_of(HUGE)..(end / HUGE * HUGE)).step_by(HUGE) {
            // SAFETY: these are full pages of this mapping, and their contents do not change.
            let _ = unsafe { libc::madvise(self.at.wrapping_add(at).cast(), HUGE, MADV_COLLAPSE) };
        }
    }
}

impl Drop for HugeMap {
    fn drop(&mut self) {
        // SAFETY: the reservation and the mapping in it are no longer used.
        unsafe { libc::munmap(self.reserved.cast(), self.reserved_bytes) };
    }
}
