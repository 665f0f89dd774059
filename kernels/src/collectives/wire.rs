//! The wire format of messages, in little-endian memory layout. If the receiver reads rows from the sender's memory,
//! the message contains their location instead of the rows.
//!
//! | collective | fields |
//! |---|---|
//! | reduce-scatter | the split's digest u64, rows T `[m, H]` |
//! | allgather | the split's digest u64, rows T `[m, H]`, labels u16 `[m, w]` |
//! | dispatch | rows r u32, pairs p u32, rows T `[r, H]` or tokens u32 `[r]`, weights f32 `[p]`, experts u16 `[p]`, pairs of each row u16 `[r]`; an empty message if r is 0 |
//! | combine | rows T `[r, H]`, or the first row's index u32 |

use bytemuck::Pod;

use crate::dispatch::RankRows;

#[cfg(target_endian = "big")]
compile_error!("messages are little-endian and are copied from memory as they are");

/// Size of a digest, and of a dispatch message's header. It keeps the rows that follow aligned.
pub(super) const HEADER_BYTES: usize = 8;

/// Bytes per pair in a dispatch message: weight and expert.
pub(super) const PAIR_BYTES: usize = 4 + 2;

/// Bytes per row of a dispatch message in addition to its elements: the number of pairs.
pub(super) const ROW_BYTES: usize = 2;

/// An invalid message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum MessageError {
    #[error("a message of {found} bytes, expected {expected}")]
    Length { found: usize, expected: usize },
    #[error("it split the rows of the step differently")]
    Split,
    #[error("rows of {found} bytes, expected {expected}")]
    Rows { found: usize, expected: usize },
    #[error("dispatch message of {0} bytes, expected at least {HEADER_BYTES}")]
    Header(usize),
    #[error(
        "a dispatch message of {found} bytes after its header, expected {expected} for {rows} rows and {pairs} pairs"
    )]
    Dispatch { found: usize, expected: u64, rows: u32, pairs: u32 },
    #[error("pair counts sum to {counted}, expected {pairs} with no zero count")]
    Pairs { counted: usize, pairs: usize },
    #[error("row {row} is out of range: its memory has {limit} rows")]
    Place { row: u32, limit: usize },
    #[error("row label {label}, expected below {bound}")]
    Label { label: u16, bound: usize },
    #[error("gather message of {0} bytes is too short for its own rows")]
    Gather(usize),
    #[error("it does not divide the unit into nodes, expected {0} nodes")]
    NoNodes(usize),
    #[error("it divides the unit into {found} nodes, expected {expected}")]
    Nodes { found: u32, expected: usize },
}

/// Appends plain values.
pub(super) fn put<T: Pod>(values: &[T], out: &mut Vec<u8>) {
    out.extend_from_slice(bytemuck::cast_slice(values));
}

/// Reads values at any alignment.
pub(super) fn values<T: Pod>(bytes: &[u8]) -> impl ExactSizeIterator<Item = T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned)
}

/// Returns the bytes after the digest of a split, which must equal this rank's digest.
///
/// # Errors
/// If a value is not the expected one; the error states both.
pub(super) fn after_digest(message: &[u8], digest: u64, expected: usize) -> Result<&[u8], MessageError> {
    let Some((found, body)) = message.split_first_chunk::<HEADER_BYTES>() else {
        return Err(MessageError::Length { found: message.len(), expected: HEADER_BYTES + expected });
    };
    if u64::from_le_bytes(*found) != digest {
        return Err(MessageError::Split);
    }
    exactly(body, expected)
}

/// Returns the message if it has exactly the expected length.
///
/// # Errors
/// If it does not; the error states both lengths.
pub(super) fn exactly(message: &[u8], expected: usize) -> Result<&[u8], MessageError> {
    let found = message.len();
    if found == expected { Ok(message) } else { Err(MessageError::Rows { found, expected }) }
}

/// Appends one rank's dispatch message; `place` writes the rows or their location.
pub(super) fn put_dispatch(rows: RankRows<'_>, out: &mut Vec<u8>, place: impl FnOnce(&mut Vec<u8>)) {
    if rows.tokens.is_empty() {
        return;
    }
    put(&[rows.tokens.len() as u32, rows.experts.len() as u32], out);
    place(out);
    put(rows.weights, out);
    put(rows.experts, out);
    put(rows.pairs, out);
}

/// The parts of a dispatch message. They are bytes because they may be misaligned.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DispatchParts<'a> {
    /// r
    pub(super) rows: usize,
    /// T `[r, H]`, or u32 `[r]`
    pub(super) place: &'a [u8],
    /// f32 `[p]`
    pub(super) weights: &'a [u8],
    /// u16 `[p]`; not yet checked
    pub(super) experts: &'a [u8],
    /// u16 `[r]`, all nonzero; they sum to p
    pub(super) pair_counts: &'a [u8],
}

/// Splits a dispatch message with `place_bytes` bytes per row, and checks every length against the message's.
///
/// # Errors
/// If a value is not the expected one; the error states both.
pub(super) fn split_dispatch(message: &[u8], place_bytes: usize) -> Result<DispatchParts<'_>, MessageError> {
    if message.is_empty() {
        return Ok(DispatchParts::default());
    }
    let Some((header, body)) = message.split_first_chunk::<HEADER_BYTES>() else {
        return Err(MessageError::Header(message.len()));
    };
    let [rows, pairs]: [u32; 2] = bytemuck::pod_read_unaligned(header);
    // Cannot overflow: for any header, a u32 times a small number fits in u64.
    let expected = u64::from(rows) * (place_bytes + ROW_BYTES) as u64 + u64::from(pairs) * PAIR_BYTES as u64;
    if rows == 0 || body.len() as u64 != expected {
        return Err(MessageError::Dispatch { found: body.len(), expected, rows, pairs });
    }
    let (rows, pairs) = (rows as usize, pairs as usize);
    let (place, body) = body.split_at(place_bytes * rows);
    let (weights, body) = body.split_at(4 * pairs);
    let (experts, pair_counts) = body.split_at(2 * pairs);
    let (mut counted, mut has_empty) = (0, false);
    for count in values::<u16>(pair_counts) {
        counted += usize::from(count);
        has_empty |= count == 0;
    }
    match counted == pairs && !has_empty {
        true => Ok(DispatchParts { rows, place, weights, experts, pair_counts }),
        false => Err(MessageError::Pairs { counted, pairs }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Vec<u8> {
        let rows = RankRows { tokens: &[0, 2], pairs: &[1, 2], experts: &[7, 3, 5], weights: &[0.5, 0.25, 0.125] };
        let mut message = Vec::new();
        put_dispatch(rows, &mut message, |out| put(&[1.0f32, 2.0, 3.0, 4.0], out));
        message
    }

    #[test]
    fn a_dispatch_message_comes_back() {
        let message = message();
        assert_eq!(message.len(), HEADER_BYTES + 2 * (8 + ROW_BYTES) + 3 * PAIR_BYTES);
        let parts = split_dispatch(&message, 8).unwrap();
        assert_eq!(parts.rows, 2);
        assert_eq!(values::<u16>(parts.pair_counts).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(values::<u16>(parts.experts).collect::<Vec<_>>(), [7, 3, 5]);
        assert_eq!(values::<f32>(parts.weights).collect::<Vec<_>>(), [0.5, 0.25, 0.125]);
        assert_eq!(values::<f32>(parts.place).collect::<Vec<_>>(), [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn damaged_messages_are_refused() {
        let good = message();
        for cut in 1..good.len() {
            assert!(split_dispatch(&good[..cut], 8).is_err(), "{cut}");
        }
        let mut huge = good.clone();
        huge[..8].fill(0xff);
        assert!(split_dispatch(&huge, 1 << 26).is_err());
        let mut miscounted = good.clone();
        let last = good.len() - 1;
        miscounted[last - 1] += 1;
        assert!(split_dispatch(&miscounted, 8).unwrap_err().to_string().contains("sum to 4"));
        assert!(split_dispatch(&[0; 8], 8).is_err());
        assert!(exactly(&[0; 7], 8).is_err() && after_digest(&[0; 7], 0, 0).is_err());
        assert_eq!(split_dispatch(&[], 8).unwrap().rows, 0);
    }
}
