//! The bytes behind a container or another file: a memory map, a buffer, or an aligned copy.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;

use memmap2::Mmap;

use crate::FormatError;

#[derive(Debug)]
pub(crate) enum Storage {
    Mapped(Mmap),
    Owned(Vec<u8>),
    Words(Vec<u64>),
}

impl Storage {
    pub(crate) fn map(path: &Path) -> Result<Self, FormatError> {
        let io = |action| move |source| FormatError::io(action, path, source);
        // Checked before opening, because opening a pipe would block until a writer appears.
        if !std::fs::metadata(path).map_err(io("open"))?.is_file() {
            let source = std::io::Error::other("not a regular file");
            return Err(FormatError::io("open", path, source));
        }
        let file = File::open(path).map_err(io("open"))?;
        Self::map_file(&file).map_err(io("map"))
    }

    pub(crate) fn map_file(file: &File) -> std::io::Result<Self> {
        // SAFETY: the map is read-only and private to this process. The remaining hazard is that the file changes while
        // mapped. Writers of these formats never do that (they rename a finished file into place), every access after
        // validation is bounds-checked, and all element types accept every bit pattern. So a change can yield wrong
        // numbers or, if the file is truncated, a bus error, as in every program that maps files.
        unsafe { Mmap::map(file) }.map(Storage::Mapped)
    }

    /// Releases the pages behind these bytes if the storage is a map. A hint that the system may ignore.
    #[cfg_attr(not(unix), allow(unused_variables, reason = "only Unix has such a call"))]
    pub(crate) fn release(&self, bytes: Range<usize>) {
        #[cfg(unix)]
        if let Storage::Mapped(map) = self
            && bytes.end <= map.len()
            && !bytes.is_empty()
        {
            // SAFETY: the map is read-only and file-backed, never written through, so a released page is read from the
            // file again with the same bytes.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
        }
    }
}

impl Deref for Storage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Storage::Mapped(map) => map,
            Storage::Owned(bytes) => bytes,
            Storage::Words(words) => bytemuck::cast_slice(words),
        }
    }
}
