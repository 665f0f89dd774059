//! Files larger than memory: tensors grow in unnamed temporary files until the final file is assembled.

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::{Element, atomic};
use crate::FormatError;

const BUFFER_BYTES: usize = 1 << 20;

/// A tensor being spooled to disk. The spool file has no name, so nothing is left behind however the process ends.
#[derive(Debug)]
pub(crate) struct Spool {
    file: BufWriter<File>,
    len_bytes: u64,
    /// The final file, for messages.
    out: PathBuf,
}

impl Spool {
    /// Creates a spool in the directory of the final file.
    pub(crate) fn beside(out: &Path) -> Result<Self, FormatError> {
        let file = tempfile::tempfile_in(atomic::directory_of(out)).map_err(|e| FormatError::io("write", out, e))?;
        Ok(Spool { file: BufWriter::with_capacity(BUFFER_BYTES, file), len_bytes: 0, out: out.to_path_buf() })
    }

    /// Appends elements.
    pub(crate) fn push<T: Element>(&mut self, elements: &[T]) -> Result<(), FormatError> {
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        self.len_bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| FormatError::io("write", &self.out, e))
    }

    /// Finishes writing and makes the elements readable.
    pub(crate) fn finish(self) -> Result<Spooled, FormatError> {
        let file = self.file.into_inner().map_err(|e| FormatError::io("write", &self.out, e.into_error()))?;
        Ok(Spooled { file, len_bytes: self.len_bytes })
    }
}

/// A complete tensor on disk.
#[derive(Debug)]
pub(crate) struct Spooled {
    file: File,
    len_bytes: u64,
}

impl Spooled {
    /// Passes all bytes to `take`, piece by piece.
    fn each(&self, mut take: impl FnMut(&[u8]) -> std::io::Result<()>) -> std::io::Result<()> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0))?;
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut left = self.len_bytes;
        while left > 0 {
            let piece = usize::try_from(left).unwrap_or(usize::MAX).min(BUFFER_BYTES);
            file.read_exact(&mut buffer[..piece])?;
            take(&buffer[..piece])?;
            left -= piece as u64;
        }
        Ok(())
    }
}

/// The location of a tensor's bytes.
#[derive(Debug)]
pub(crate) enum Data<'a> {
    Memory(&'a [u8]),
    Disk(&'a Spooled),
}

impl<'a, T: Element> From<&'a [T]> for Data<'a> {
    fn from(elements: &'a [T]) -> Self {
        Self::Memory(bytemuck::cast_slice(elements))
    }
}

impl<'a> From<&'a Spooled> for Data<'a> {
    fn from(spooled: &'a Spooled) -> Self {
        Self::Disk(spooled)
    }
}

impl Data<'_> {
    pub(super) fn len(&self) -> u64 {
        match self {
            Data::Memory(bytes) => bytes.len() as u64,
            Data::Disk(spooled) => spooled.len_bytes,
        }
    }

    /// Passes all bytes to `take`, piece by piece if they are on disk.
    pub(super) fn each(&self, mut take: impl FnMut(&[u8]) -> std::io::Result<()>) -> std::io::Result<()> {
        match self {
            Data::Memory(bytes) => take(bytes),
            Data::Disk(spooled) => spooled.each(take),
        }
    }
}
