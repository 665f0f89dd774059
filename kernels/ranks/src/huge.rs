//! A shared mapping that can use huge pages: it starts at a multiple of one.

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

/// Linux 6.1: converts the mapping's content to huge pages now, whatever the setting for shared memory.
const MADV_COLLAPSE: c_int = 25;

/// A file mapped in full.
#[derive(Debug)]
pub(crate) struct HugeMap {
    /// The first byte.
    pub(crate) at: *mut u8,
    bytes: usize,
    /// The reservation, large enough to contain a multiple of the huge page size.
    reserved: *mut u8,
    reserved_bytes: usize,
}

// SAFETY: memory that any thread may use; the user coordinates writes.
unsafe impl Send for HugeMap {}
// SAFETY: as above; nothing here reads or writes it.
unsafe impl Sync for HugeMap {}

impl HugeMap {
    /// Maps the first `bytes` bytes of a file that is at least as long and cannot be truncated.
    pub(crate) fn of(file: &File, bytes: usize) -> Result<Self, RankError> {
        let failed =
            || RankError::memory(format_args!("{bytes} bytes cannot be mapped: {}", std::io::Error::last_os_error()));
        let reserved_bytes =
            bytes.checked_next_multiple_of(HUGE).and_then(|bytes| bytes.checked_add(HUGE)).ok_or_else(failed)?;
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        // SAFETY: a new mapping without memory, at an address chosen by the system.
        let reserved = unsafe { libc::mmap(null_mut(), reserved_bytes, PROT_NONE, flags, -1, 0) };
        if reserved == MAP_FAILED {
            return Err(failed());
        }
        let reserved = reserved.cast::<u8>();
        let map = Self { at: reserved.wrapping_add(reserved.align_offset(HUGE)), bytes, reserved, reserved_bytes };
        // SAFETY: within the reservation just made, which nothing else uses.
        let at = unsafe {
            libc::mmap(map.at.cast(), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.as_raw_fd(), 0)
        };
        if at == MAP_FAILED { Err(failed()) } else { Ok(map) }
    }

    /// Moves written bytes into huge pages, as far as the range contains entire ones. If none are available, small
    /// pages work as well.
    pub(crate) fn collapse(&self, written: Range<usize>) {
        let end = written.end.min(self.bytes);
        for at in (written.start.next_multiple_of(HUGE)..(end / HUGE * HUGE)).step_by(HUGE) {
            // SAFETY: full pages of this mapping; their content stays.
            let _ = unsafe { libc::madvise(self.at.wrapping_add(at).cast(), HUGE, MADV_COLLAPSE) };
        }
    }
}

impl Drop for HugeMap {
    fn drop(&mut self) {
        // SAFETY: the reservation and the mapping in it, which are no longer used.
        unsafe { libc::munmap(self.reserved.cast(), self.reserved_bytes) };
    }
}
