//! Safetensors files written by other programs, mainly checkpoints, with any element types and metadata.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path};

use half::{bf16, f16};

use super::header::{METADATA_KEY, RawTensor, check_size, checked, parse_any};
use super::layout::{Entry, encode};
use super::storage::Storage;
use crate::FormatError;
use crate::model::Metadata;

/// The weights file of a single-file checkpoint.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The index of a sharded checkpoint.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Maximum size of an index. For scale, 62 layers of 256 experts need an index of 6 MB.
pub(crate) const MAX_INDEX_BYTES: usize = 256 << 20;
/// Maximum size of a header, the same as in the safetensors library.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A mapped file with a checked header: the tensors cover the data section without holes or overlaps.
#[derive(Debug)]
pub(crate) struct Foreign {
    storage: Storage,
    metadata: Metadata,
    /// Tensors by name.
    pub(crate) tensors: BTreeMap<String, ForeignTensor>,
    data_start: usize,
}

/// One tensor of the file.
#[derive(Clone, Debug)]
pub(crate) struct ForeignTensor {
    /// Element type as the file spells it.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    /// Byte range within the data section.
    offsets: [u64; 2],
    /// Byte range within the file.
    bytes: Range<usize>,
}

impl ForeignTensor {
    /// Size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }
}

impl Foreign {
    /// Maps a file and checks its header. Tensor sizes are checked only for known element types.
    pub(crate) fn open(path: &Path) -> Result<Self, FormatError> {
        Self::from_storage(Storage::map(path)?).map_err(|error| error.in_file(path))
    }

    /// Parses an in-memory file.
    pub(crate) fn from_bytes(bytes: Vec<u8>) -> Result<Self, FormatError> {
        Self::from_storage(Storage::Owned(bytes))
    }

    fn from_storage(storage: Storage) -> Result<Self, FormatError> {
        let (raw, data_start) = parse_any(&storage, MAX_HEADER_BYTES)?;
        let tensors = checked(raw.tensors, |name, tensor| {
            if let Some(element_bytes) = element_bytes(&tensor.dtype) {
                check_size(name, &tensor, element_bytes)?;
            }
            let bytes = tensor.bytes(data_start);
            let RawTensor { dtype, shape, data_offsets: offsets } = tensor;
            Ok(ForeignTensor { dtype, shape, offsets, bytes })
        })?;
        Ok(Foreign { storage, metadata: raw.metadata, tensors, data_start })
    }

    /// The bytes of a tensor.
    pub(crate) fn bytes(&self, tensor: &ForeignTensor) -> &[u8] {
        &self.storage[tensor.bytes.clone()]
    }

    /// Returns the size of all tensors together, in bytes.
    pub(crate) fn data_len(&self) -> u64 {
        (self.storage.len() - self.data_start) as u64
    }

    /// Returns the bytes of the header, including its length field.
    pub(crate) fn header(&self) -> &[u8] {
        &self.storage[..self.data_start]
    }

    /// Builds a header for the same data with renamed tensors. Element types, shapes, offsets and metadata stay the
    /// same.
    pub(crate) fn renamed_header(&self, name: impl Fn(&str) -> String) -> Result<Vec<u8>, FormatError> {
        let mut entries = BTreeMap::new();
        if !self.metadata.is_empty() {
            entries.insert(METADATA_KEY.to_owned(), Entry::Metadata(&self.metadata));
        }
        for (old, ForeignTensor { dtype, shape, offsets, .. }) in &self.tensors {
            entries.insert(name(old), Entry::Tensor { dtype, shape, data_offsets: *offsets });
        }
        encode(&entries, MAX_HEADER_BYTES)
    }

    /// Returns the tensors in file order.
    pub(crate) fn in_file_order(&self) -> Vec<(&str, &ForeignTensor)> {
        let mut order: Vec<_> = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        order.sort_by_key(|(_, tensor)| tensor.offsets);
        order
    }
}

/// An element type whose values are exact in f32.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FloatType {
    F32,
    F16,
    Bf16,
}

impl FloatType {
    pub(crate) fn of(dtype: &str) -> Option<Self> {
        match dtype {
            "F32" => Some(Self::F32),
            "F16" => Some(Self::F16),
            "BF16" => Some(Self::Bf16),
            _ => None,
        }
    }

    /// Bytes per element.
    pub(crate) fn size(self) -> usize {
        if let Self::F32 = self { 4 } else { 2 }
    }

    /// Decodes one element from its little-endian bytes.
    pub(crate) fn decode(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Self::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (Self::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            _ => f32::NAN,
        }
    }
}

/// Whether this is a file name without directories.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}

/// Returns the bytes per element of a type, or `None` if the type is unknown or smaller than a byte.
pub(crate) fn element_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => Some(1),
        "U16" | "I16" | "F16" | "BF16" => Some(2),
        "U32" | "I32" | "F32" => Some(4),
        "U64" | "I64" | "F64" | "C64" => Some(8),
        _ => None,
    }
}
