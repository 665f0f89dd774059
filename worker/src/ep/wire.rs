//! The bytes of one dispatch and of one combine message.
//!
//! Dispatch, little-endian, nothing at all when there are no rows:
//!
//! | field | type | what |
//! |---|---|---|
//! | rows r | u32 | tokens sent to this rank |
//! | pairs m | u32 | (expert, weight) pairs of all rows |
//! | pair counts | u16 `[r]` | pairs of each row, at least 1 |
//! | experts | u16 `[m]` | logical ids |
//! | weights | f32 `[m]` | router weights |
//! | x | f32 `[r, H]` | the rows |
//!
//! Combine: f32 `[r, H]`, one row for each that was sent, in the same order.

use semmoe_kernels::RankRows;

#[cfg(target_endian = "big")]
compile_error!("messages are little-endian and are copied as they lie in memory");

/// Bytes of a dispatch message before its rows.
pub(super) const HEADER_BYTES: usize = 8;

/// The size of the message that carries `rows`.
pub(super) fn dispatch_bytes(rows: RankRows<'_>, hidden: usize) -> usize {
    if rows.tokens.is_empty() {
        return 0;
    }
    HEADER_BYTES + dispatch_row_bytes(hidden) * rows.tokens.len() + PAIR_BYTES * rows.experts.len()
}

const PAIR_BYTES: usize = 2 + 4;

const fn dispatch_row_bytes(hidden: usize) -> usize {
    2 + 4 * hidden
}

/// What one row with so many pairs takes in its dispatch message and in the combine message that answers it.
pub(super) fn row_bytes(pairs: usize, hidden: usize) -> u64 {
    (dispatch_row_bytes(hidden) + PAIR_BYTES * pairs + size_of::<f32>() * hidden) as u64
}

/// Appends the dispatch message of one rank; `x` `[n, H]` holds the rows of all tokens.
pub(super) fn encode_dispatch(rows: RankRows<'_>, x: &[f32], hidden: usize, out: &mut Vec<u8>) {
    if rows.tokens.is_empty() {
        return;
    }
    let before = out.len();
    out.reserve(dispatch_bytes(rows, hidden));
    out.extend_from_slice(&(rows.tokens.len() as u32).to_le_bytes());
    out.extend_from_slice(&(rows.experts.len() as u32).to_le_bytes());
    out.extend_from_slice(bytemuck::cast_slice(rows.pairs));
    out.extend_from_slice(bytemuck::cast_slice(rows.experts));
    out.extend_from_slice(bytemuck::cast_slice(rows.weights));
    for &token in rows.tokens {
        out.extend_from_slice(bytemuck::cast_slice(&x[token as usize * hidden..][..hidden]));
    }
    debug_assert_eq!(out.len() - before, dispatch_bytes(rows, hidden));
}

/// The parts of a dispatch message, as bytes because nothing aligns them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DispatchParts<'a> {
    /// r
    pub(super) rows: usize,
    /// u16 `[r]`; not yet checked to sum to m
    pub(super) pair_counts: &'a [u8],
    /// u16 `[m]`; not yet checked
    pub(super) experts: &'a [u8],
    /// f32 `[m]`
    pub(super) weights: &'a [u8],
    /// f32 `[r, H]`
    pub(super) x: &'a [u8],
}

/// Splits a dispatch message; every length is checked against the message's.
pub(super) fn split_dispatch(message: &[u8], hidden: usize) -> Result<DispatchParts<'_>, String> {
    if message.is_empty() {
        return Ok(DispatchParts::default());
    }
    let Some((header, body)) = message.split_first_chunk::<HEADER_BYTES>() else {
        return Err(format!("a dispatch message of {} bytes, expected at least {HEADER_BYTES}", message.len()));
    };
    let [r0, r1, r2, r3, m0, m1, m2, m3] = *header;
    let rows = u32::from_le_bytes([r0, r1, r2, r3]) as usize;
    let pairs = u32::from_le_bytes([m0, m1, m2, m3]) as usize;
    // u32 x small fits u64 whatever the header says.
    let expected = rows as u64 * dispatch_row_bytes(hidden) as u64 + pairs as u64 * PAIR_BYTES as u64;
    if rows == 0 || body.len() as u64 != expected {
        return Err(format!(
            "a dispatch message of {} bytes after its header, expected {expected} for {rows} rows and {pairs} pairs",
            body.len()
        ));
    }
    let (pair_counts, body) = body.split_at(2 * rows);
    let (experts, body) = body.split_at(2 * pairs);
    let (weights, x) = body.split_at(4 * pairs);
    Ok(DispatchParts { rows, pair_counts, experts, weights, x })
}

/// Little-endian u16s, wherever they lie.
pub(super) fn u16s(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
}

/// Little-endian f32s, wherever they lie.
pub(super) fn f32s(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value))
}

/// Appends `bytes` as f32 values; a trailing part of one is left out.
pub(super) fn append_f32s(bytes: &[u8], out: &mut Vec<f32>) {
    let before = out.len();
    let bytes = &bytes[..bytes.len() / 4 * 4];
    out.resize(before + bytes.len() / 4, 0.0);
    bytemuck::cast_slice_mut(&mut out[before..]).copy_from_slice(bytes);
}

/// Appends rows as they are.
pub(super) fn encode_rows(rows: &[f32], out: &mut Vec<u8>) {
    out.extend_from_slice(bytemuck::cast_slice(rows));
}

/// Fills `rows` from a combine message, which must have exactly as many.
pub(super) fn decode_rows(message: &[u8], rows: &mut [f32]) -> Result<(), String> {
    let to: &mut [u8] = bytemuck::cast_slice_mut(rows);
    if message.len() != to.len() {
        return Err(format!("a combine message of {} bytes, expected {}", message.len(), to.len()));
    }
    to.copy_from_slice(message);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> RankRows<'static> {
        RankRows { tokens: &[0, 2], pairs: &[1, 2], experts: &[7, 3, 5], weights: &[0.5, 0.25, 0.125] }
    }

    fn message() -> Vec<u8> {
        let mut message = Vec::new();
        encode_dispatch(rows(), &[1.0, 2.0, -1.0, -2.0, 3.0, 4.0], 2, &mut message);
        message
    }

    #[test]
    fn a_dispatch_message_comes_back() {
        let message = message();
        assert_eq!(message.len(), dispatch_bytes(rows(), 2));
        let parts = split_dispatch(&message, 2).unwrap();
        assert_eq!(parts.rows, 2);
        assert_eq!(u16s(parts.pair_counts).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(u16s(parts.experts).collect::<Vec<_>>(), [7, 3, 5]);
        let mut x = vec![9.0];
        append_f32s(parts.x, &mut x);
        assert_eq!(x, [9.0, 1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn damaged_messages_are_refused() {
        let good = message();
        for cut in 1..good.len() {
            assert!(split_dispatch(&good[..cut], 2).is_err(), "{cut}");
        }
        let mut huge = good.clone();
        huge[..8].fill(0xff);
        assert!(split_dispatch(&huge, 1 << 24).is_err());
        assert!(split_dispatch(&[0; 8], 2).is_err());
        assert!(decode_rows(&[0; 7], &mut [0.0; 2]).is_err());
        assert_eq!(split_dispatch(&[], 2).unwrap().rows, 0);
    }
}
