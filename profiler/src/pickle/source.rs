//! A file, or bytes in memory, read at offsets: only what is asked for is held.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::PickleError;

/// Where the bytes are.
#[derive(Debug)]
pub struct Source(Place);

#[derive(Debug)]
enum Place {
    File { file: File, length: u64 },
    Memory(Vec<u8>),
}

impl Source {
    /// Opens a file.
    ///
    /// # Errors
    /// When it cannot be opened, or is no regular file: the length of others is not known.
    pub fn open(path: &Path) -> Result<Self, PickleError> {
        // Asked before opening: to open a pipe may wait for ever.
        if !std::fs::metadata(path)?.is_file() {
            return Err(PickleError::Kind { found: "not a regular file", expected: "one" });
        }
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        Ok(Self(Place::File { file, length }))
    }

    /// Bytes in memory.
    #[must_use]
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(Place::Memory(bytes))
    }

    /// All bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        match &self.0 {
            Place::File { length, .. } => *length,
            Place::Memory(bytes) => bytes.len() as u64,
        }
    }

    /// A part, checked against the length before anything is allocated.
    pub(super) fn read(&self, what: &'static str, from: u64, length: u64) -> Result<Vec<u8>, PickleError> {
        let short = || PickleError::Short { what, found: self.length().saturating_sub(from), expected: length };
        let end = from.checked_add(length).filter(|end| *end <= self.length()).ok_or_else(short)?;
        match &self.0 {
            Place::File { file, .. } => {
                let mut bytes = vec![0; usize::try_from(length).map_err(|_| short())?];
                file.read_exact_at(&mut bytes, from)?;
                Ok(bytes)
            }
            // Within a slice, so both fit into usize.
            Place::Memory(bytes) => Ok(bytes[from as usize..end as usize].to_vec()),
        }
    }
}
