//! Memory mapped by several processes: an unnamed file, which leaves nothing behind if a process is killed.

use std::fs::File;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, fcntl_get_seals, memfd_create};

use crate::error::RankError;

/// Creates and maps `bytes` zero bytes. Only the owner can access the file (mode 0600), and its size is fixed. Pass it
/// to the other processes (inherited, over a socket, or by its path under `/proc`), which call [`attach_memory`].
///
/// # Errors
/// If memory cannot be allocated.
pub fn create_memory(name: &str, bytes: usize) -> Result<(File, MmapRaw), RankError> {
    let file = create_file(name, bytes)?;
    let map = MmapOptions::new().len(bytes).map_raw(&file).map_err(RankError::memory)?;
    Ok((file, map))
}

/// Creates the file behind [`create_memory`] without mapping it.
pub(crate) fn create_file(name: &str, bytes: usize) -> Result<File, RankError> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(RankError::memory)?;
    fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(RankError::memory)?;
    let file = File::from(fd);
    file.set_len(bytes as u64).map_err(RankError::memory)?;
    // Seals the file against truncation, which would kill a process that accesses it.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(RankError::memory)?;
    Ok(file)
}

/// Maps all of the memory created by another process, which must have at least `least` bytes.
///
/// # Errors
/// If the file could be truncated or is too short.
pub fn attach_memory(file: &File, least: usize) -> Result<MmapRaw, RankError> {
    let length = sealed_bytes(file, least)?;
    MmapOptions::new().len(length).map_raw(file).map_err(RankError::memory)
}

/// Returns the size of a file that cannot be truncated and has at least `least` bytes.
pub(crate) fn sealed_bytes(file: &File, least: usize) -> Result<usize, RankError> {
    let seals = fcntl_get_seals(file).map_err(RankError::memory)?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(RankError::memory("the file can be truncated, expected a sealed one"));
    }
    let length = file.metadata().map_err(RankError::memory)?.len();
    let length = usize::try_from(length).map_err(RankError::memory)?;
    if length < least {
        return Err(RankError::memory(format_args!("the file has {length} bytes, expected at least {least}")));
    }
    Ok(length)
}
