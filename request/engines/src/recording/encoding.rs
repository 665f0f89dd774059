//! How engines encode routed experts: base64 of raw little-endian i32, or of a `.npy` file.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::RecordingError;

const NPY_MAGIC: &[u8] = b"\x93NUMPY";

/// The encoding of the bytes inside the base64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Little-endian i32 without a header (SGLang).
    Raw,
    /// A NumPy file (vLLM).
    Npy,
}

/// Decodes the base64 text and detects the encoding inside. The two encodings cannot be confused: the start of a `.npy`
/// file, read as an i32, is not a valid expert.
///
/// # Errors
/// If it is not base64.
pub fn decode_bytes(text: &str) -> Result<(Encoding, Vec<u8>), RecordingError> {
    let bytes = STANDARD.decode(text)?;
    let encoding = if bytes.starts_with(NPY_MAGIC) { Encoding::Npy } else { Encoding::Raw };
    Ok((encoding, bytes))
}

/// Encodes an array of unsigned bytes or 16-bit words in NumPy's format 1.0 and base64, as sent by vLLM.
pub fn encode_npy(shape: &[usize], ids: &[u16], wide: bool) -> String {
    let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
    let comma = if shape.len() == 1 { "," } else { "" };
    let descr = if wide { "<u2" } else { "|u1" };
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}{comma}), }}", dims.join(", "));
    // Magic, version, length and header with its line end are padded to a multiple of 64 bytes.
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

/// Maximum header length, ample for an array with three dimensions.
const MAX_HEADER: usize = 1024;

/// Reads the shape and the values of an array of unsigned bytes or 16-bit words, as written by NumPy.
///
/// # Errors
/// If the array is of another kind or corrupt.
pub(super) fn read_npy(bytes: &[u8]) -> Result<(Vec<usize>, Vec<i32>), RecordingError> {
    let (descr, shape, data) = npy_parts(bytes).ok_or(RecordingError::Array)?;
    let width = match descr {
        "|u1" => 1,
        "<u2" => 2,
        _ => return Err(RecordingError::ArrayType),
    };
    let expected = shape.iter().fold(width, |bytes: usize, dim| bytes.saturating_mul(*dim));
    if expected != data.len() {
        let found = data.len();
        return Err(RecordingError::ArrayBytes { shape, found, expected });
    }
    let ids = match width {
        1 => data.iter().map(|id| i32::from(*id)).collect(),
        _ => data.chunks_exact(2).map(|id| i32::from(u16::from_le_bytes([id[0], id[1]]))).collect(),
    };
    Ok((shape, ids))
}

/// Element type, shape and data.
fn npy_parts(bytes: &[u8]) -> Option<(&str, Vec<usize>, &[u8])> {
    let (version, rest) = bytes.strip_prefix(NPY_MAGIC)?.split_first_chunk::<2>()?;
    let (length, rest) = match version[0] {
        1 => rest.split_first_chunk::<2>().map(|(length, rest)| (u32::from(u16::from_le_bytes(*length)), rest))?,
        _ => rest.split_first_chunk::<4>().map(|(length, rest)| (u32::from_le_bytes(*length), rest))?,
    };
    let length = usize::try_from(length).ok().filter(|length| *length <= MAX_HEADER)?;
    let (header, data) = rest.split_at_checked(length)?;
    let header = std::str::from_utf8(header).ok()?;
    let (descr, rest) = header.strip_prefix("{'descr': '")?.split_once("', 'fortran_order': False, 'shape': (")?;
    let dims = rest.split_once(')')?.0.split(',').map(str::trim).filter(|dim| !dim.is_empty());
    Some((descr, dims.map(|dim| dim.parse().ok()).collect::<Option<_>>()?, data))
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
        assert!(matches!(decode_bytes("AQAAAA="), Err(RecordingError::Base64(_))));
        assert_eq!(read_npy(BY_NUMPY), Ok((vec![1, 3, 2], vec![0, 1, 2, 3, 4, 5])));
    }

    #[test]
    fn arrays_that_are_refused() {
        let mut fortran = BY_NUMPY.to_vec();
        fortran[37..42].copy_from_slice(b"True ");
        let mut signed = BY_NUMPY.to_vec();
        signed[21..24].copy_from_slice(b"|i1");
        let mut long = BY_NUMPY.to_vec();
        long[9] = 0xff;
        for (bytes, reason) in [
            (fortran, "not a NumPy array in C order"),
            (signed, "expected |u1 or <u2"),
            (long, "not a NumPy array"),
            (BY_NUMPY[..40].to_vec(), "not a NumPy array"),
            (BY_NUMPY[..BY_NUMPY.len() - 1].to_vec(), "shape [1, 3, 2] have 5 bytes, expected 6"),
        ] {
            let error = read_npy(&bytes).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        for end in 0..BY_NUMPY.len() {
            assert!(read_npy(&BY_NUMPY[..end]).is_err());
        }
    }
}
