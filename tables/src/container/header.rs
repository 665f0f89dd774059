//! The safetensors header: its length in eight bytes, then JSON. Parsed with a size cap and checked arithmetic.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::VERSION;
use crate::FormatError;
use crate::model::{Metadata, short, text};

/// Maximum size of a header, which is far above any header of these formats (a few kB) and still cheap to parse.
pub(super) const MAX_HEADER_BYTES: u64 = 1 << 20;
/// The key of the string metadata.
pub(super) const METADATA_KEY: &str = "__metadata__";
const LENGTH_BYTES: usize = 8;

/// The element types that these formats use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Dtype {
    U8,
    U16,
    U32,
    U64,
    I32,
    F16,
    F32,
}

impl Dtype {
    const ALL: [Dtype; 7] = [Dtype::U8, Dtype::U16, Dtype::U32, Dtype::U64, Dtype::I32, Dtype::F16, Dtype::F32];

    /// Bytes of one element, and its alignment.
    pub(crate) fn size(self) -> usize {
        match self {
            Dtype::U8 => 1,
            Dtype::U16 | Dtype::F16 => 2,
            Dtype::U32 | Dtype::I32 | Dtype::F32 => 4,
            Dtype::U64 => 8,
        }
    }

    /// Name of the type in safetensors.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Dtype::U8 => "U8",
            Dtype::U16 => "U16",
            Dtype::U32 => "U32",
            Dtype::U64 => "U64",
            Dtype::I32 => "I32",
            Dtype::F16 => "F16",
            Dtype::F32 => "F32",
        }
    }
}

/// A tensor of a checked header.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// Byte range in the storage, which is the mapped file or, once aligned, a copy of the data.
    pub(super) bytes: Range<usize>,
}

/// A header, either raw (as in the JSON, without duplicate keys) or with checked tensors.
pub(super) struct Header<T> {
    pub(super) metadata: Metadata,
    pub(super) tensors: BTreeMap<String, T>,
}

/// Parses and checks the header of a file of this format.
pub(super) fn parse(file: &[u8], format: &'static str) -> Result<Header<Tensor>, FormatError> {
    let (raw, data_start) = read(file, MAX_HEADER_BYTES)?;
    // Checks the format before the tensors, so that a file in another format is reported as such.
    check_format(&raw.metadata, format)?;
    check_coverage(&raw.tensors, file.len() - data_start)?;
    let tensors = checked(raw.tensors, |name, tensor| check_tensor(name, tensor, data_start))?;
    Ok(Header { metadata: raw.metadata, tensors })
}

/// Converts every tensor with `check`.
pub(super) fn checked<T>(
    tensors: BTreeMap<String, RawTensor>,
    check: impl Fn(&str, RawTensor) -> Result<T, FormatError>,
) -> Result<BTreeMap<String, T>, FormatError> {
    let check = |(name, tensor): (String, RawTensor)| check(&name, tensor).map(|checked| (name, checked));
    tensors.into_iter().map(check).collect()
}

/// Parses the header of any safetensors file, regardless of its metadata and element types; also returns the offset of
/// its data. Checks that the tensors cover the data without holes or overlaps.
pub(super) fn parse_any(file: &[u8], max_header_bytes: u64) -> Result<(Header<RawTensor>, usize), FormatError> {
    let (raw, data_start) = read(file, max_header_bytes)?;
    check_coverage(&raw.tensors, file.len() - data_start)?;
    Ok((raw, data_start))
}

fn read(file: &[u8], max_header_bytes: u64) -> Result<(Header<RawTensor>, usize), FormatError> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(damaged("file length", file.len(), "at least 8 bytes"));
    };
    let length = u64::from_le_bytes(*length);
    if length > max_header_bytes {
        return Err(damaged("header length", length, format!("at most {max_header_bytes}")));
    }
    let Some((json, _)) = rest.split_at_checked(length as usize) else {
        return Err(damaged("header length", length, format!("at most {}", rest.len())));
    };
    let raw = serde_json::from_slice(json).map_err(FormatError::Header)?;
    Ok((raw, LENGTH_BYTES + length as usize))
}

fn check_format(metadata: &Metadata, expected: &'static str) -> Result<(), FormatError> {
    let found = text(metadata, "format")?;
    if found != expected {
        return Err(FormatError::WrongFormat { found: short(found), expected });
    }
    let found = text(metadata, "version")?;
    if found != VERSION {
        return Err(FormatError::UnknownVersion { format: expected, found: short(found), expected: VERSION });
    }
    Ok(())
}

/// Checks that the tensors cover the data without holes or overlaps.
fn check_coverage(raw: &BTreeMap<String, RawTensor>, data_len: usize) -> Result<(), FormatError> {
    let mut order: Vec<(&String, [u64; 2])> = raw.iter().map(|(n, t)| (n, t.data_offsets)).collect();
    order.sort_by_key(|(_, offsets)| *offsets);
    let mut covered = 0u64;
    for (name, [start, end]) in order {
        if start != covered || end < start || end > data_len as u64 {
            let what = format!("data_offsets of `{}`", short(name));
            let expected = format!("a range from {covered} to at most {data_len}");
            return Err(damaged(what, format!("[{start}, {end}]"), expected));
        }
        covered = end;
    }
    if covered != data_len as u64 {
        return Err(damaged("file length", format!("{data_len} bytes of data"), covered));
    }
    Ok(())
}

fn check_tensor(name: &str, tensor: RawTensor, data_start: usize) -> Result<Tensor, FormatError> {
    let Some(dtype) = Dtype::ALL.into_iter().find(|d| d.name() == tensor.dtype) else {
        let what = format!("dtype of `{}`", short(name));
        return Err(damaged(what, short(&tensor.dtype), "U8, U16, U32, U64, I32, F16 or F32"));
    };
    check_size(name, &tensor, dtype.size() as u64)?;
    Ok(Tensor { dtype, bytes: tensor.bytes(data_start), shape: tensor.shape })
}

/// Checks that the byte range matches the shape, for elements of `element_bytes` bytes.
pub(super) fn check_size(name: &str, tensor: &RawTensor, element_bytes: u64) -> Result<(), FormatError> {
    let [start, end] = tensor.data_offsets;
    let size = tensor.shape.iter().try_fold(element_bytes, |size, dim| size.checked_mul(*dim));
    if size == Some(end - start) {
        return Ok(());
    }
    let what = format!("size of `{}`", short(name));
    let expected = format!("the size of {} {:?}", short(&tensor.dtype), tensor.shape);
    Err(damaged(what, end - start, expected))
}

fn damaged(
    what: impl Into<std::borrow::Cow<'static, str>>,
    found: impl ToString,
    expected: impl ToString,
) -> FormatError {
    FormatError::Container { what: what.into(), found: found.to_string(), expected: expected.to_string() }
}

/// A tensor entry as written in the JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawTensor {
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    /// Byte range within the data section.
    pub(super) data_offsets: [u64; 2],
}

impl RawTensor {
    /// Returns the byte range within the file. Cannot overflow, because the range was checked to be inside the file,
    /// which is in memory.
    pub(super) fn bytes(&self, data_start: usize) -> Range<usize> {
        let [start, end] = self.data_offsets;
        data_start + start as usize..data_start + end as usize
    }
}

impl<'de> Deserialize<'de> for Header<RawTensor> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header<RawTensor>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut metadata = None;
        let mut tensors = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let fresh = if key == METADATA_KEY {
                metadata.replace(map.next_value::<UniqueStrings>()?.0).is_none()
            } else {
                tensors.insert(key, map.next_value::<RawTensor>()?).is_none()
            };
            if !fresh {
                return Err(A::Error::custom("duplicate key"));
            }
        }
        Ok(Header { metadata: metadata.unwrap_or_default(), tensors })
    }
}

/// String metadata without duplicate keys.
struct UniqueStrings(Metadata);

impl<'de> Deserialize<'de> for UniqueStrings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringsVisitor;
        impl<'de> Visitor<'de> for StringsVisitor {
            type Value = UniqueStrings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueStrings, A::Error> {
                let mut strings = Metadata::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if strings.insert(key, value).is_some() {
                        return Err(A::Error::custom("duplicate metadata key"));
                    }
                }
                Ok(UniqueStrings(strings))
            }
        }
        deserializer.deserialize_map(StringsVisitor)
    }
}
