//! A shared mapping that can lie in huge pages: it begins at a multiple of one.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::ptr::null_mut;

use libc::{
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE,
    c_int,
};

use crate::error::RankError;

/// Bytes of a huge page where there are none of another size.
const HUGE: usize = 2 << 20;

/// Linux 6.1: what the mapping holds becomes huge pages now, whatever the setting for shared memory is.
const MADV_COLLAPSE: c_int = 25;

/// A file, mapped whole.
#[derive(Debug)]
pub(crate) struct HugeMap {
    /// The first byte.
    pub(crate) at: *mut u8,
    bytes: usize,
    /// The reservation, large enough to contain a multiple of the huge page size.
    reserved: *mut u8,
    reserved_bytes: usize,
}

// SAFETY: memory that any thread may use; what may be written when is the user's part.
unsafe impl Send for HugeMap {}
// SAFETY: as above; nothing here reads or writes it.
unsafe impl Sync for HugeMap {}

impl HugeMap {
    /// Maps the first `bytes` bytes of a file that has as many and cannot be cut short.
    pub(crate) fn of(file: &File, bytes: usize) -> Result<Self, RankError> {
        let failed =
            || RankError::memory(format_args!("{bytes} bytes cannot be mapped: {}", std::io::Error::last_os_error()));
        let reserved_bytes =
            bytes.checked_next_multiple_of(HUGE).and_then(|bytes| bytes.checked_add(HUGE)).ok_or_else(failed)?;
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        // SAFETY: a new mapping of no memory, wherever the system wants it.
        let reserved = unsafe { libc::mmap(null_mut(), reserved_bytes, PROT_NONE, flags, -1, 0) };
        if reserved == MAP_FAILED {
            return Err(failed());
        }
        let reserved = reserved.cast::<u8>();
        let map = Self { at: reserved.wrapping_add(reserved.align_offset(HUGE)), bytes, reserved, reserved_bytes };
        // SAFETY: within what was just reserved, which nothing else uses.
        let at = unsafe {
            libc::mmap(map.at.cast(), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.as_raw_fd(), 0)
        };
        if at == MAP_FAILED { Err(failed()) } else { Ok(map) }
    }

    /// Moves bytes that were written into huge pages, as far as whole ones lie in the range. Where there are none
    /// everything works, on small pages.
    pub(crate) fn collapse(&self, written: Range<usize>) {
        let end = written.end.min(self.bytes);
        for at in (written.start.next_multiple_of(HUGE)..(end / HUGE * HUGE)).step_by(HUGE) {
            // SAFETY: whole pages of this mapping; their content stays.
            let _ = unsafe { libc::madvise(self.at.wrapping_add(at).cast(), HUGE, MADV_COLLAPSE) };
        }
    }
}

impl Drop for HugeMap {
    fn drop(&mut self) {
        // SAFETY: the reservation and the mapping in it, which nothing uses any more.
        unsafe { libc::munmap(self.reserved.cast(), self.reserved_bytes) };
    }
}
