//! Writing: sorted header keys, tensors ordered so that each is aligned to its element type.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde::Serialize;

use super::header::{Dtype, MAX_HEADER_BYTES, METADATA_KEY};
use super::{DIGEST_KEY, Element, VERSION, atomic, digest};
use crate::model::Metadata;
use crate::{FormatError, ModelInfo, Provenance};

/// A tensor about to be written, with its bytes or where they are.
#[derive(Clone, Debug)]
pub(crate) struct LayoutTensor<'a, B = &'a [u8]> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: B,
}

impl<'a> LayoutTensor<'a> {
    /// The caller guarantees that the elements fill the shape; the reader checks it again.
    pub(crate) fn new<T: Element>(name: &'a str, shape: &[usize], elements: &'a [T]) -> Self {
        let shape = shape.iter().map(|&dim| dim as u64).collect();
        LayoutTensor { name, dtype: T::DTYPE, shape, bytes: bytemuck::cast_slice(elements) }
    }
}

/// A container about to be written.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    pub(crate) metadata: Metadata,
    /// In any order.
    pub(crate) tensors: Vec<LayoutTensor<'a>>,
}

/// The value of a header key.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Entry<'a> {
    Metadata(&'a Metadata),
    Tensor { dtype: &'a str, shape: &'a [u64], data_offsets: [u64; 2] },
}

/// The length and the JSON, keys sorted, padded with spaces to a multiple of eight bytes.
pub(super) fn encode<K: Serialize + Ord>(
    entries: &BTreeMap<K, Entry<'_>>,
    max_bytes: u64,
) -> Result<Vec<u8>, FormatError> {
    let mut json = serde_json::to_vec(entries).map_err(|source| FormatError::Header { source })?;
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
    /// Starts the metadata of a file.
    pub(crate) fn format(format: &str) -> Metadata {
        Metadata::from([("format".into(), format.into()), ("version".into(), VERSION.into())])
    }

    /// Starts the metadata of a file about a model.
    pub(crate) fn metadata(format: &str, model: &ModelInfo, provenance: &Provenance) -> Metadata {
        let mut metadata = Self::format(format);
        model.to_metadata(&mut metadata);
        provenance.to_metadata(&mut metadata);
        metadata
    }

    /// SHA-256 over the tensors, lower-case hex.
    pub(crate) fn digest(&self) -> String {
        let mut sorted = self.tensors.clone();
        sorted.sort_by(|a, b| a.name.cmp(b.name));
        digest(sorted.into_iter())
    }

    /// The whole file in memory.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        let header = self.header(&self.digest())?;
        let data_len: usize = self.tensors.iter().map(|t| t.bytes.len()).sum();
        let mut bytes = Vec::with_capacity(header.len() + data_len);
        bytes.extend_from_slice(&header);
        in_file_order(&self.tensors).iter().for_each(|t| bytes.extend_from_slice(t.bytes));
        Ok(bytes)
    }

    /// Writes the file: a temporary file in the same directory, flushed to the disk, then renamed. Returns the digest.
    pub(crate) fn write(&self, path: &Path) -> Result<String, FormatError> {
        let digest = self.digest();
        let header = self.header(&digest).map_err(|e| e.in_file(path))?;
        atomic::write(path, |out| self.write_to(&header, out))?;
        Ok(digest)
    }

    fn write_to(&self, header: &[u8], out: &mut dyn Write) -> std::io::Result<()> {
        out.write_all(header)?;
        in_file_order(&self.tensors).iter().try_for_each(|t| out.write_all(t.bytes))
    }

    fn header(&self, digest: &str) -> Result<Vec<u8>, FormatError> {
        header(&self.metadata, digest, &in_file_order(&self.tensors), |bytes| bytes.len() as u64)
    }
}

/// Widest elements first, so that no padding is needed (safetensors allows none); then by name.
pub(super) fn in_file_order<'t, 'a, B>(tensors: &'t [LayoutTensor<'a, B>]) -> Vec<&'t LayoutTensor<'a, B>> {
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|t| (std::cmp::Reverse(t.dtype.size()), t.name));
    order
}

/// The header of tensors in the order of the file.
pub(super) fn header<B>(
    metadata: &Metadata,
    digest: &str,
    tensors: &[&LayoutTensor<'_, B>],
    len_bytes: impl Fn(&B) -> u64,
) -> Result<Vec<u8>, FormatError> {
    let mut metadata = metadata.clone();
    metadata.insert(DIGEST_KEY.into(), digest.into());
    let mut entries = BTreeMap::from([(METADATA_KEY, Entry::Metadata(&metadata))]);
    let mut at = 0u64;
    for LayoutTensor { name, dtype, shape, bytes } in tensors {
        let data_offsets = [at, at + len_bytes(bytes)];
        at = data_offsets[1];
        entries.insert(*name, Entry::Tensor { dtype: dtype.name(), shape, data_offsets });
    }
    encode(&entries, MAX_HEADER_BYTES)
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
