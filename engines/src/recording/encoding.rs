//! How engines write routed experts down: base64 of raw little-endian i32, or of a `.npy` file.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

const NPY_MAGIC: &[u8] = b"\x93NUMPY";

/// What the bytes under the base64 are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Little-endian i32 without a header (SGLang).
    Raw,
    /// A NumPy file (vLLM).
    Npy,
}

/// Takes the base64 off. The two encodings cannot be confused: as an i32 the start of a `.npy` file is no expert.
///
/// # Errors
/// In one sentence, when it is no base64.
pub fn decode_bytes(text: &str) -> Result<(Encoding, Vec<u8>), String> {
    let bytes = STANDARD.decode(text).map_err(|error| format!("routed experts are not base64: {error}"))?;
    let encoding = if bytes.starts_with(NPY_MAGIC) { Encoding::Npy } else { Encoding::Raw };
    Ok((encoding, bytes))
}

/// Base64 of an array of unsigned bytes or words as NumPy saves it, version 1.0: what vLLM sends.
pub fn encode_npy(shape: &[usize], ids: &[u16], wide: bool) -> String {
    let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
    let comma = if shape.len() == 1 { "," } else { "" };
    let descr = if wide { "<u2" } else { "|u1" };
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}{comma}), }}", dims.join(", "));
    // Magic, version, length and header with its line end fill blocks of 64 bytes.
    let padding = (64 - (10 + header.len() + 1) % 64) % 64;
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    let mut bytes = NPY_MAGIC.to_vec();
    bytes.extend_from_slice(&[1, 0]);
    bytes.extend_from_slice(&(header.len() as u16).to_le_bytes());
    bytes.extend_from_slice(header.as_bytes());
    match wide {
        true => ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes())),
        false => bytes.extend(ids.iter().map(|&id| id as u8)),
    }
    STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `numpy.save` of `numpy.arange(6, dtype=numpy.uint8).reshape(1, 3, 2)`, NumPy 2.4.
    const BY_NUMPY: &[u8] = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (1, 3, 2), }                                                       \n\x00\x01\x02\x03\x04\x05";

    #[test]
    fn as_numpy_writes_it() {
        let text = encode_npy(&[1, 3, 2], &[0, 1, 2, 3, 4, 5], false);
        assert_eq!(decode_bytes(&text), Ok((Encoding::Npy, BY_NUMPY.to_vec())));
        assert_eq!(decode_bytes("AQAAAA=="), Ok((Encoding::Raw, vec![1, 0, 0, 0])));
        assert!(decode_bytes("AQAAAA=").unwrap_err().contains("not base64"));
    }
}
