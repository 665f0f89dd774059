//! Routed experts per token: base64 of raw little-endian i32, no header, rows x layers x k.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// Why routed experts are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoutedExpertsError {
    /// Not base64.
    #[error("routed experts are not base64: {cause}")]
    Base64 {
        /// The decoder's message.
        cause: String,
    },
    /// Another number of values than the shape needs.
    #[error("routed experts hold {found} values, expected {rows} rows x {layers} layers x {top_k} experts")]
    Length {
        /// Values found (i32 each; rounded down).
        found: usize,
        /// Rows expected.
        rows: usize,
        /// Layers expected.
        layers: usize,
        /// Experts per token and layer expected.
        top_k: usize,
    },
    /// An id that is no expert.
    #[error("routed experts name expert {found} at row {row}, expected -1 (none) or below {num_experts}")]
    Expert {
        /// The id.
        found: i32,
        /// Row it is in.
        row: usize,
        /// Experts per layer.
        num_experts: u16,
    },
}

/// Encodes ids in the order rows x layers x k.
pub fn encode_routed_experts(ids: &[i32]) -> String {
    let mut bytes = Vec::with_capacity(ids.len() * 4);
    for id in ids {
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    STANDARD.encode(bytes)
}

/// How many rows `data` holds for this many layers and experts per token; some builds ignore
/// `routed_experts_start_len`, so that the count shows what was sent.
///
/// # Errors
/// `RoutedExpertsError` for base64 or a length that is no whole number of rows.
pub fn routed_rows(data: &str, layers: usize, top_k: usize) -> Result<usize, RoutedExpertsError> {
    let found = decoded_bytes(data) / 4;
    let row = layers.checked_mul(top_k).filter(|row| *row > 0);
    match row {
        Some(row) if found.is_multiple_of(row) && decoded_bytes(data).is_multiple_of(4) => Ok(found / row),
        _ => Err(RoutedExpertsError::Length { found, rows: found / row.unwrap_or(1), layers, top_k }),
    }
}

/// Decodes and checks `rows` x `layers` x `top_k` ids; -1 marks "no expert" (dense layers occupy rows too).
///
/// Allocates no more than the input is long, whatever shape the caller expects.
///
/// # Errors
/// As `routed_rows`.
pub fn decode_routed_experts(
    data: &str,
    rows: usize,
    layers: usize,
    top_k: usize,
    num_experts: u16,
) -> Result<Vec<i32>, RoutedExpertsError> {
    let found = decoded_bytes(data);
    let expected = layers.checked_mul(top_k).and_then(|row| row.checked_mul(rows)).and_then(|n| n.checked_mul(4));
    let wrong_length = |found| RoutedExpertsError::Length { found, rows, layers, top_k };
    if expected != Some(found) {
        return Err(wrong_length(found / 4));
    }
    let bytes = STANDARD.decode(data).map_err(|error| RoutedExpertsError::Base64 { cause: error.to_string() })?;
    if expected != Some(bytes.len()) {
        return Err(wrong_length(bytes.len() / 4));
    }
    let mut ids = Vec::with_capacity(bytes.len() / 4);
    for (index, value) in bytes.chunks_exact(4).enumerate() {
        let id = i32::from_le_bytes([value[0], value[1], value[2], value[3]]);
        if id < -1 || id >= i32::from(num_experts) {
            // A value exists, so neither factor is zero.
            return Err(RoutedExpertsError::Expert { found: id, row: index / (layers * top_k), num_experts });
        }
        ids.push(id);
    }
    Ok(ids)
}

/// Bytes that padded base64 of this length stands for.
fn decoded_bytes(data: &str) -> usize {
    let padding = data.bytes().rev().take(2).take_while(|byte| *byte == b'=').count();
    (data.len() / 4 * 3).saturating_sub(padding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trip(rows in 0usize..6, layers in 1usize..5, top_k in 1usize..5, seed in any::<u64>()) {
            let count = rows * layers * top_k;
            let ids: Vec<i32> = (0..count).map(|i| ((seed.rotate_left(i as u32) % 33) as i32) - 1).collect();
            let data = encode_routed_experts(&ids);
            prop_assert_eq!(routed_rows(&data, layers, top_k), Ok(rows));
            prop_assert_eq!(decode_routed_experts(&data, rows, layers, top_k, 32), Ok(ids));
            prop_assert!(decode_routed_experts(&data, rows + 1, layers, top_k, 32).is_err());
        }

        #[test]
        fn any_text_is_refused_or_decoded(data in "\\PC{0,40}", rows in 0usize..4, layers in any::<usize>(), top_k in 0usize..4) {
            let _ = routed_rows(&data, layers, top_k);
            let _ = decode_routed_experts(&data, rows, layers, top_k, 8);
        }
    }

    #[test]
    fn little_endian_and_range() {
        let data = encode_routed_experts(&[1, -1, 258, 3]);
        assert_eq!(data, "AQAAAP////8CAQAAAwAAAA==");
        let error = decode_routed_experts(&data, 2, 1, 2, 32).unwrap_err();
        assert_eq!(error, RoutedExpertsError::Expert { found: 258, row: 1, num_experts: 32 });
        assert!(decode_routed_experts("AAAA!AAA", 1, 1, 1, 32).is_err());
        assert!(decode_routed_experts("", usize::MAX, usize::MAX, 2, 32).is_err());
    }
}
