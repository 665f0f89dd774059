//! SHA-256 over names, element types, shapes and bytes of tensors.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use super::LayoutTensor;

/// The digest of tensors given in ascending order of their names. For each: name, dtype name, shape and bytes, every one
/// preceded by its length as a little-endian u64; dimensions are u64 as well.
pub(crate) fn digest<'a>(tensors: impl Iterator<Item = LayoutTensor<'a>>) -> String {
    let mut hash = Sha256::new();
    for tensor in tensors {
        sized(&mut hash, tensor.name.as_bytes());
        sized(&mut hash, tensor.dtype.name().as_bytes());
        hash.update((tensor.shape.len() as u64).to_le_bytes());
        tensor.shape.iter().for_each(|dim| hash.update(dim.to_le_bytes()));
        sized(&mut hash, tensor.bytes);
    }
    hex(&hash.finalize())
}

fn sized(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

/// Lower-case hexadecimal.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
