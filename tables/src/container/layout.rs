//! Writes containers: sorted header keys, and tensors ordered so that each is aligned to its element type.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde::Serialize;

use super::digest::Digester;
use super::header::{Dtype, MAX_HEADER_BYTES, METADATA_KEY};
use super::stream::Data;
use super::{DIGEST_KEY, Element, VERSION, atomic};
use crate::model::Metadata;
use crate::{FormatError, ModelInfo, Provenance};

/// A tensor to be written.
#[derive(Debug)]
pub(crate) struct LayoutTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Data<'a>,
}

impl<'a> LayoutTensor<'a> {
    /// Creates a tensor. The caller guarantees that the elements fill the shape; the reader checks this again.
    pub(crate) fn new<T: Element>(name: &'a str, shape: &[usize], elements: &'a [T]) -> Self {
        Self::of(name, T::DTYPE, shape, elements.into())
    }

    /// Creates a tensor. The caller guarantees that the data are elements of this type that fill the shape.
    pub(crate) fn of(name: &'a str, dtype: Dtype, shape: &[usize], bytes: Data<'a>) -> Self {
        LayoutTensor { name, dtype, shape: shape.iter().map(|&dim| dim as u64).collect(), bytes }
    }
}

/// A container to be written.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    pub(crate) metadata: Metadata,
    /// Tensors in any order.
    pub(crate) tensors: Vec<LayoutTensor<'a>>,
}

/// The value of a header key.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Entry<'a> {
    Metadata(&'a Metadata),
    Tensor { dtype: &'a str, shape: &'a [u64], data_offsets: [u64; 2] },
}

/// Encodes the header length and the JSON with sorted keys, padded with spaces to a multiple of eight bytes.
pub(super) fn encode<K: Serialize + Ord>(
    entries: &BTreeMap<K, Entry<'_>>,
    max_bytes: u64,
) -> Result<Vec<u8>, FormatError> {
    let mut json = serde_json::to_vec(entries).map_err(FormatError::Header)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > max_bytes {
        return Err(FormatError::Container {
            what: "header length".into(),
            found: json.len().to_string(),
            expected: format!("at most {max_bytes}"),
        });
    }
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}

impl Layout<'_> {
    /// Returns the metadata that every file contains.
    pub(crate) fn format(format: &str) -> Metadata {
        Metadata::from([("format".into(), format.into()), ("version".into(), VERSION.into())])
    }

    /// Returns the metadata that every file about a model contains.
    pub(crate) fn metadata(format: &str, model: &ModelInfo, provenance: &Provenance) -> Metadata {
        let mut metadata = Self::format(format);
        model.to_metadata(&mut metadata);
        provenance.to_metadata(&mut metadata);
        metadata
    }

    /// Returns the SHA-256 over the tensors as lower-case hex.
    fn digest(&self) -> std::io::Result<String> {
        let mut sorted: Vec<_> = self.tensors.iter().collect();
        sorted.sort_by_key(|tensor| tensor.name);
        let mut digester = Digester::default();
        for LayoutTensor { name, dtype, shape, bytes } in sorted {
            digester.begin(name, dtype.name(), shape, bytes.len());
            bytes.each(|bytes| {
                digester.bytes(bytes);
                Ok(())
            })?;
        }
        Ok(digester.finish())
    }

    /// Encodes the file in memory.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        let io = |error| FormatError::io("write", Path::new("(in memory)"), error);
        let header = self.header(&self.digest().map_err(io)?)?;
        let data_len: u64 = self.tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        let mut bytes = Vec::with_capacity(header.len() + data_len as usize);
        self.write_to(&header, &mut bytes).map_err(io)?;
        Ok(bytes)
    }

    /// Writes the file atomically (temporary file, flush, rename). Returns the digest.
    pub(crate) fn write(&self, path: &Path) -> Result<String, FormatError> {
        let digest = self.digest().map_err(|e| FormatError::io("read the spooled tensors of", path, e))?;
        let header = self.header(&digest).map_err(|e| e.in_file(path))?;
        atomic::write(path, |out| self.write_to(&header, out))?;
        Ok(digest)
    }

    fn write_to(&self, header: &[u8], out: &mut dyn Write) -> std::io::Result<()> {
        out.write_all(header)?;
        self.in_file_order().iter().try_for_each(|tensor| tensor.bytes.each(|bytes| out.write_all(bytes)))
    }

    /// Orders tensors by element size, largest first, so that no padding is needed (safetensors allows none), then by
    /// name.
    fn in_file_order(&self) -> Vec<&LayoutTensor<'_>> {
        let mut order: Vec<_> = self.tensors.iter().collect();
        order.sort_by_key(|tensor| (std::cmp::Reverse(tensor.dtype.size()), tensor.name));
        order
    }

    fn header(&self, digest: &str) -> Result<Vec<u8>, FormatError> {
        let mut metadata = self.metadata.clone();
        metadata.insert(DIGEST_KEY.into(), digest.into());
        let mut entries = BTreeMap::from([(METADATA_KEY, Entry::Metadata(&metadata))]);
        let mut at = 0u64;
        for LayoutTensor { name, dtype, shape, bytes } in self.in_file_order() {
            let data_offsets = [at, at + bytes.len()];
            at = data_offsets[1];
            entries.insert(*name, Entry::Tensor { dtype: dtype.name(), shape, data_offsets });
        }
        encode(&entries, MAX_HEADER_BYTES)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_an_error_of_the_write() {
        let tensors = vec![LayoutTensor::new("t", &[100_000], &[0u8; 100_000])];
        let layout = Layout { metadata: Metadata::new(), tensors };
        let mut full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let header = layout.header("").unwrap();
        let error = layout.write_to(&header, &mut full).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    }
}
