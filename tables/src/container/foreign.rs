//! Safetensors files of others, checkpoints above all: any element type, any metadata. Names, shapes and bytes matter.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path};

use half::{bf16, f16};

use super::header::{METADATA_KEY, RawTensor, check_size, checked, parse_any};
use super::layout::{Entry, encode};
use super::storage::Storage;
use crate::FormatError;
use crate::model::Metadata;

/// A checkpoint's only file with weights.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The index of a checkpoint with several.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// 62 layers of 256 experts have an index of 6 MB.
pub(crate) const MAX_INDEX_BYTES: usize = 256 << 20;
/// The limit of the safetensors library itself.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A mapped file whose header was checked: tensors lie without holes and overlaps, inside the file.
#[derive(Debug)]
pub(crate) struct Foreign {
    storage: Storage,
    metadata: Metadata,
    /// By name.
    pub(crate) tensors: BTreeMap<String, ForeignTensor>,
    data_start: usize,
}

/// A tensor of such a file.
#[derive(Clone, Debug)]
pub(crate) struct ForeignTensor {
    /// As the file spells it.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    /// Of the data.
    offsets: [u64; 2],
    /// Of the file.
    bytes: Range<usize>,
}

impl ForeignTensor {
    /// Bytes of the tensor.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }
}

impl Foreign {
    /// Maps a file and checks its header. The sizes of tensors are checked for the element types that are known here.
    pub(crate) fn open(path: &Path) -> Result<Self, FormatError> {
        Self::from_storage(Storage::map(path)?).map_err(|error| error.in_file(path))
    }

    /// Takes the bytes of such a file.
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

    /// The bytes of one of them.
    pub(crate) fn bytes(&self, tensor: &ForeignTensor) -> &[u8] {
        &self.storage[tensor.bytes.clone()]
    }

    /// Bytes of all tensors together.
    pub(crate) fn data_len(&self) -> u64 {
        (self.storage.len() - self.data_start) as u64
    }

    /// The bytes of the header, its length included.
    pub(crate) fn header(&self) -> &[u8] {
        &self.storage[..self.data_start]
    }

    /// A header for the same data under other names: element types, shapes, offsets and metadata stay.
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

    /// The tensors in the order of their bytes.
    pub(crate) fn in_file_order(&self) -> Vec<(&str, &ForeignTensor)> {
        let mut order: Vec<_> = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        order.sort_by_key(|(_, tensor)| tensor.offsets);
        order
    }
}

/// An element type whose values fit into f32.
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

    /// Bytes of one.
    pub(crate) fn size(self) -> usize {
        if let Self::F32 = self { 4 } else { 2 }
    }

    /// From as many bytes as it has.
    pub(crate) fn decode(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Self::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (Self::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            _ => f32::NAN,
        }
    }
}

/// A name without directories.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}

/// Bytes of an element of a type, if it is known and has whole bytes.
pub(crate) fn element_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => Some(1),
        "U16" | "I16" | "F16" | "BF16" => Some(2),
        "U32" | "I32" | "F32" => Some(4),
        "U64" | "I64" | "F64" | "C64" => Some(8),
        _ => None,
    }
}
