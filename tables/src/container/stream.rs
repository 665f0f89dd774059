//! Writing files larger than memory: tensors that grow in unnamed temporary files until the whole is put together.

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use super::digest::Digester;
use super::layout::{LayoutTensor, header, in_file_order};
use super::{Element, atomic};
use crate::FormatError;
use crate::model::Metadata;

const BUFFER_BYTES: usize = 1 << 20;

/// A tensor on its way to the disk. The file has no name, so that nothing stays behind however the process ends.
#[derive(Debug)]
pub(crate) struct Spool {
    file: BufWriter<File>,
    len_bytes: u64,
}

impl Spool {
    /// In the directory of the file that will be written.
    pub(crate) fn beside(out: &Path) -> Result<Self, FormatError> {
        let file = tempfile::tempfile_in(atomic::directory_of(out)).map_err(|e| FormatError::io("write", out, e))?;
        Ok(Spool { file: BufWriter::with_capacity(BUFFER_BYTES, file), len_bytes: 0 })
    }

    /// Appends elements.
    pub(crate) fn push<T: Element>(&mut self, elements: &[T]) -> std::io::Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        self.len_bytes += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// The pushed elements, to be read.
    pub(crate) fn finish(self) -> std::io::Result<Spooled> {
        let file = self.file.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        Ok(Spooled { file, len_bytes: self.len_bytes })
    }
}

/// A complete tensor on the disk.
#[derive(Debug)]
pub(crate) struct Spooled {
    file: File,
    len_bytes: u64,
}

impl Spooled {
    /// Passes all bytes, in pieces, to `take`.
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

/// Where the bytes of a tensor are.
#[derive(Debug)]
pub(crate) enum Data<'a> {
    Memory(&'a [u8]),
    Disk(&'a Spooled),
}

impl Data<'_> {
    fn len(&self) -> u64 {
        match self {
            Data::Memory(bytes) => bytes.len() as u64,
            Data::Disk(spooled) => spooled.len_bytes,
        }
    }

    fn each(&self, mut take: impl FnMut(&[u8]) -> std::io::Result<()>) -> std::io::Result<()> {
        match self {
            Data::Memory(bytes) => take(bytes),
            Data::Disk(spooled) => spooled.each(take),
        }
    }
}

/// A tensor about to be written.
pub(crate) type StreamTensor<'a> = LayoutTensor<'a, Data<'a>>;

impl<'a> StreamTensor<'a> {
    /// The caller guarantees that the elements fill the shape.
    pub(crate) fn memory<T: Element>(name: &'a str, shape: &[u64], elements: &'a [T]) -> Self {
        let bytes = Data::Memory(bytemuck::cast_slice(elements));
        StreamTensor { name, dtype: T::DTYPE, shape: shape.to_vec(), bytes }
    }

    /// The caller guarantees that the spool was filled with this element type and shape.
    pub(crate) fn disk<T: Element>(name: &'a str, shape: &[u64], spooled: &'a Spooled) -> Self {
        StreamTensor { name, dtype: T::DTYPE, shape: shape.to_vec(), bytes: Data::Disk(spooled) }
    }
}

/// Writes the bytes that [`super::Layout::write`] would for the same content; returns the digest.
pub(crate) fn write(
    path: &Path,
    metadata: &Metadata,
    mut tensors: Vec<StreamTensor<'_>>,
) -> Result<String, FormatError> {
    tensors.sort_by_key(|tensor| tensor.name);
    let mut digester = Digester::default();
    for tensor in &tensors {
        digester.begin(tensor.name, tensor.dtype.name(), &tensor.shape, tensor.bytes.len());
        let bytes = tensor.bytes.each(|bytes| {
            digester.bytes(bytes);
            Ok(())
        });
        bytes.map_err(|e| FormatError::io("read what was written for", path, e))?;
    }
    let digest = digester.finish();
    let tensors = in_file_order(&tensors);
    let header = header(metadata, &digest, &tensors, Data::len).map_err(|e| e.in_file(path))?;
    atomic::write(path, |out| {
        out.write_all(&header)?;
        tensors.iter().try_for_each(|tensor| tensor.bytes.each(|bytes| out.write_all(bytes)))
    })?;
    Ok(digest)
}
