//! The safetensors container: header, aligned storage, digest and atomic write.
//!
//! We parse and write the header ourselves rather than with the safetensors crate, for three reasons: its metadata hash
//! map makes equal content produce different bytes; it silently keeps the last of two equal keys; and its check of the
//! last offset against the file length can overflow on hostile input. Its reader serves as the oracle in tests.

mod atomic;
mod digest;
mod foreign;
mod header;
mod layout;
mod storage;
mod stream;

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use bytemuck::Pod;

pub(crate) use atomic::is_temporary;
pub use atomic::{directory_of, write as write_atomically};
pub(crate) use digest::Digester;
pub(crate) use foreign::{
    FloatType, Foreign, ForeignTensor, INDEX, MAX_INDEX_BYTES, SINGLE, element_bytes, is_plain_name,
};
pub(crate) use header::Dtype;
use header::{Header, Tensor};
pub(crate) use layout::{Layout, LayoutTensor};

use crate::model::{Metadata, quoted, short};
use crate::{FormatError, ModelInfo, Provenance};
pub(crate) use storage::Storage;
pub(crate) use stream::{Data, Spool};

/// The only version of the three formats so far.
pub(crate) const VERSION: &str = "1";

/// The metadata key under which the digest of the tensors is stored.
pub(crate) const DIGEST_KEY: &str = "digest";

/// Number of bytes digested before their pages are released.
const DIGEST_PIECE_BYTES: usize = 16 << 20;

/// A container with a checked header: tensors are inside the file, aligned, without holes or overlaps.
#[derive(Debug)]
pub(crate) struct Container {
    storage: Storage,
    pub(crate) metadata: Metadata,
    tensors: BTreeMap<String, Tensor>,
    digest: OnceLock<String>,
}

/// The location of a checked tensor's elements, which is cheap to store next to the container.
#[derive(Debug, Clone)]
pub(crate) struct View<T> {
    bytes: Range<usize>,
    element: std::marker::PhantomData<T>,
}

impl Container {
    /// Maps a file, which must have this format.
    pub(crate) fn open(path: &Path, format: &'static str) -> Result<Self, FormatError> {
        Self::from_storage(Storage::map(path)?, format)
    }

    /// Maps an open file, which must have this format.
    pub(crate) fn map(file: &File, format: &'static str) -> Result<Self, FormatError> {
        let storage = Storage::map_file(file);
        let storage = storage.map_err(|source| FormatError::io("map", Path::new("the opened file"), source))?;
        Self::from_storage(storage, format)
    }

    /// Parses an in-memory file.
    pub(crate) fn from_bytes(bytes: Vec<u8>, format: &'static str) -> Result<Self, FormatError> {
        Self::from_storage(Storage::Owned(bytes), format)
    }

    fn from_storage(storage: Storage, format: &'static str) -> Result<Self, FormatError> {
        let Header { metadata, tensors } = header::parse(&storage, format)?;
        let mut container = Container { storage, metadata, tensors, digest: OnceLock::new() };
        container.align();
        Ok(container)
    }

    /// Copies the tensors if one of them is not aligned to its element type.
    fn align(&mut self) {
        let base = self.storage.as_ptr() as usize;
        let aligned = |t: &Tensor| (base + t.bytes.start).is_multiple_of(t.dtype.size());
        if self.tensors.values().all(aligned) {
            return;
        }
        let total: usize = self.tensors.values().map(|t| t.bytes.len().div_ceil(8)).sum();
        let mut words = vec![0u64; total];
        let target: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let mut at = 0;
        for tensor in self.tensors.values_mut() {
            let to = at..at + tensor.bytes.len();
            target[to.clone()].copy_from_slice(&self.storage[tensor.bytes.clone()]);
            at = to.end.next_multiple_of(8);
            tensor.bytes = to;
        }
        self.storage = Storage::Words(words);
    }

    /// Returns the model and the provenance stored in a file of this format; rejects tensors that are not in `known`.
    pub(crate) fn about(&self, format: &'static str, known: &[&str]) -> Result<(ModelInfo, Provenance), FormatError> {
        let model = ModelInfo::from_metadata(&self.metadata)?;
        let provenance = Provenance::from_metadata(&self.metadata)?;
        self.expect_only(format, known)?;
        Ok((model, provenance))
    }

    /// Rejects tensors that are not in `known`.
    pub(crate) fn expect_only(&self, format: &'static str, known: &[&str]) -> Result<(), FormatError> {
        match self.tensors.keys().find(|name| !known.contains(&name.as_str())) {
            None => Ok(()),
            Some(name) => Err(FormatError::UnexpectedTensor { tensor: short(name), format }),
        }
    }

    pub(crate) fn has(&self, tensor: &'static str) -> bool {
        self.tensors.contains_key(tensor)
    }

    pub(crate) fn dtype(&self, tensor: &'static str) -> Result<Dtype, FormatError> {
        Ok(self.tensor(tensor)?.dtype)
    }

    pub(crate) fn shape(&self, tensor: &'static str) -> Result<&[u64], FormatError> {
        Ok(&self.tensor(tensor)?.shape)
    }

    /// Returns the length of a one-dimensional tensor.
    pub(crate) fn len(&self, tensor: &'static str) -> Result<u64, FormatError> {
        match self.shape(tensor)? {
            [n] => Ok(*n),
            other => Err(FormatError::shape(tensor, format!("{other:?}"), "one dimension")),
        }
    }

    /// Views a tensor, requiring this element type and shape.
    pub(crate) fn view<T: Element>(&self, name: &'static str, shape: &[u64]) -> Result<View<T>, FormatError> {
        let tensor = self.tensor(name)?;
        if tensor.dtype != T::DTYPE {
            return Err(FormatError::WrongDtype {
                tensor: name,
                found: tensor.dtype.name().into(),
                expected: T::DTYPE.name().into(),
            });
        }
        if tensor.shape != shape {
            let found = format!("{:?}", tensor.shape);
            return Err(FormatError::shape(name, found, format!("{shape:?}")));
        }
        Ok(View { bytes: tensor.bytes.clone(), element: std::marker::PhantomData })
    }

    /// Returns the elements of a view.
    pub(crate) fn slice<T: Element>(&self, view: &View<T>) -> &[T] {
        bytemuck::cast_slice(&self.storage[view.bytes.clone()])
    }

    /// Releases the pages behind some elements of a view; they are read from the file again on the next access.
    pub(crate) fn release<T: Element>(&self, view: &View<T>, elements: Range<usize>) {
        let size = size_of::<T>();
        let start = view.bytes.start + elements.start * size;
        let end = (view.bytes.start + elements.end * size).min(view.bytes.end);
        self.storage.release(start..end.max(start));
    }

    /// Releases the pages of the whole file; they are read again on the next access.
    pub(crate) fn release_all(&self) {
        self.storage.release(0..self.storage.len());
    }

    /// Returns the SHA-256 over the tensors as lower-case hex; computed once.
    pub(crate) fn digest(&self) -> &str {
        self.digest.get_or_init(|| {
            let mut digester = Digester::default();
            for (name, tensor) in &self.tensors {
                digester.begin(name, tensor.dtype.name(), &tensor.shape, tensor.bytes.len() as u64);
                // In pieces, so that a file larger than memory can be digested.
                for start in tensor.bytes.clone().step_by(DIGEST_PIECE_BYTES) {
                    let piece = start..tensor.bytes.end.min(start + DIGEST_PIECE_BYTES);
                    digester.bytes(&self.storage[piece.clone()]);
                    self.storage.release(piece);
                }
            }
            digester.finish()
        })
    }

    /// Compares the digest stored in the file, if any, with the digest of its tensors.
    pub(crate) fn check_digest(&self) -> Result<(), FormatError> {
        match self.metadata.get(DIGEST_KEY) {
            Some(stored) if stored != self.digest() => {
                let expected = format!("{}, the digest of the tensors in the file", self.digest());
                Err(FormatError::field(DIGEST_KEY, quoted(stored), expected))
            }
            _ => Ok(()),
        }
    }

    /// Returns the container in a form ready for writing. Equal content gives equal bytes, regardless of the previous
    /// layout.
    pub(crate) fn layout(&self) -> Layout<'_> {
        let tensors = self.tensors.iter().map(|(name, tensor)| LayoutTensor {
            name,
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            bytes: Data::Memory(&self.storage[tensor.bytes.clone()]),
        });
        Layout { metadata: self.metadata.clone(), tensors: tensors.collect() }
    }

    fn tensor(&self, tensor: &'static str) -> Result<&Tensor, FormatError> {
        self.tensors.get(tensor).ok_or(FormatError::MissingTensor(tensor))
    }
}

/// A Rust type that can be the element of a tensor.
pub(crate) trait Element: Pod {
    const DTYPE: Dtype;
}

macro_rules! element {
    ($($ty:ty => $dtype:ident),*) => { $(impl Element for $ty { const DTYPE: Dtype = Dtype::$dtype; })* };
}
element!(u8 => U8, u16 => U16, u32 => U32, u64 => U64, i32 => I32, half::f16 => F16, f32 => F32);
