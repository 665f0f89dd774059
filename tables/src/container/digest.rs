//! SHA-256 over names, element types, shapes and bytes of tensors.

use sha2::{Digest, Sha256};

use super::Element;

/// Digests tensors fed piece by piece, in ascending order of their names. For each tensor, hashes name, dtype name,
/// shape and bytes, each preceded by its length as a little-endian u64; dimensions are u64 as well.
#[derive(Default)]
pub(crate) struct Digester(Sha256);

impl Digester {
    /// Begins a tensor of `len_bytes` bytes.
    pub(crate) fn begin(&mut self, name: &str, dtype: &str, shape: &[u64], len_bytes: u64) {
        let hash = &mut self.0;
        sized(hash, name.as_bytes());
        sized(hash, dtype.as_bytes());
        hash.update((shape.len() as u64).to_le_bytes());
        shape.iter().for_each(|dim| hash.update(dim.to_le_bytes()));
        hash.update(len_bytes.to_le_bytes());
    }

    /// Feeds the next bytes of the tensor.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Feeds an in-memory tensor.
    pub(crate) fn tensor<T: Element>(&mut self, name: &str, shape: &[usize], elements: &[T]) {
        let shape: Vec<u64> = shape.iter().map(|&dim| dim as u64).collect();
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        self.begin(name, T::DTYPE.name(), &shape, bytes.len() as u64);
        self.bytes(bytes);
    }

    /// Returns the digest as lower-case hex.
    pub(crate) fn finish(self) -> String {
        format!("{:x}", self.0.finalize())
    }
}

fn sized(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}
