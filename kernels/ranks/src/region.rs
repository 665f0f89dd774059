//! Memory for a group whose ranks are threads of one process.

use std::sync::Arc;
use std::time::Duration;

use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::communicator::{Communicator, RawGroup, check_world};
use crate::error::RankError;
use crate::signals::SIGNAL_BYTES;

const PAGE: usize = 4096;

/// Creates P communicators for P threads of this process, with zeroed symmetric buffers of `buffer_bytes` bytes.
///
/// # Errors
/// If the world is invalid, or memory cannot be allocated.
pub fn threads(world: usize, buffer_bytes: usize, timeout: Duration) -> Result<Vec<Communicator>, RankError> {
    check_world(world)?;
    let (found, limit) = (buffer_bytes as u64, isize::MAX as u64 / world as u64);
    let too_large = || RankError::TooLarge { what: "bytes of a symmetric buffer", found, limit };
    // The signals of all ranks, then their buffers, each of which starts on a new page.
    let all_signals = (world * SIGNAL_BYTES).next_multiple_of(PAGE);
    let stride = buffer_bytes.checked_next_multiple_of(PAGE).ok_or_else(too_large)?;
    let bytes = stride.checked_mul(world).and_then(|buffers| buffers.checked_add(all_signals));
    let bytes = bytes.filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or_else(too_large)?;
    let map: MmapRaw = MmapOptions::new().len(bytes).map_anon().map_err(RankError::memory)?.into();
    // Only a hint: without huge pages, access is merely slower.
    let _ = map.advise(Advice::HugePage);
    let (base, map) = (map.as_mut_ptr(), Arc::new(map));
    let signals: Vec<*mut u8> = (0..world).map(|rank| base.wrapping_add(rank * SIGNAL_BYTES)).collect();
    let buffers: Vec<*mut u8> = (0..world).map(|rank| base.wrapping_add(all_signals + rank * stride)).collect();
    let comm = |rank| {
        let group = RawGroup { rank, buffers: &buffers, buffer_bytes, signals: &signals, timeout };
        // SAFETY: all parts are disjoint in the map, which is zero at first and lives as long as any communicator; each
        // rank joins once.
        unsafe { Communicator::with_memory(group, Some(Box::new(Arc::clone(&map)))) }
    };
    (0..world).map(comm).collect()
}
