//! The frame header that precedes every message between ranks.
//!
//! 24 bytes, little-endian: magic u32, kind u32, number u64, length u64. `number` is the index of the collective
//! between the two ranks (data) or the failed rank (failure). The header is followed by `length` bytes: the message, or
//! the cause of the failure (UTF-8).

use semmoe_kernels::collectives::MAX_MESSAGE_BYTES;

pub(super) const HEADER_BYTES: usize = 24;
/// Longer causes are truncated.
pub(super) const MAX_CAUSE_BYTES: usize = 512;

const MAGIC: u32 = u32::from_le_bytes(*b"smEP");
const DATA: u32 = 1;
const FAILURE: u32 = 2;

/// A decoded and validated header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Header {
    /// A message of one collective.
    Data { collective: u64, length: usize },
    /// The sender gives up because a rank failed.
    Failure { rank: u16, length: usize },
}

/// An invalid header.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum HeaderError {
    #[error("a frame begins with {0:#010x}, expected {MAGIC:#010x}")]
    Magic(u32),
    #[error("a frame has {found} bytes, expected at most {limit}")]
    Length { found: u64, limit: usize },
    #[error("a frame has kind {kind} and number {number}, expected data or a failure")]
    Kind { kind: u32, number: u64 },
}

impl Header {
    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let (kind, number, length) = match self {
            Self::Data { collective, length } => (DATA, collective, length),
            Self::Failure { rank, length } => (FAILURE, u64::from(rank), length),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&number.to_le_bytes());
        bytes[16..].copy_from_slice(&(length as u64).to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, HeaderError> {
        let word = |index: usize| u32::from_le_bytes(bytes.as_chunks().0[index]);
        let long = |index: usize| u64::from(word(index)) | (u64::from(word(index + 1)) << 32);
        let (magic, kind, number, length) = (word(0), word(1), long(2), long(4));
        if magic != MAGIC {
            return Err(HeaderError::Magic(magic));
        }
        let limit = if kind == DATA { MAX_MESSAGE_BYTES } else { MAX_CAUSE_BYTES };
        if length > limit as u64 {
            return Err(HeaderError::Length { found: length, limit });
        }
        let length = length as usize;
        match (kind, u16::try_from(number)) {
            (DATA, _) => Ok(Self::Data { collective: number, length }),
            (FAILURE, Ok(rank)) => Ok(Self::Failure { rank, length }),
            _ => Err(HeaderError::Kind { kind, number }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_and_damage_is_reported() {
        for header in [Header::Data { collective: u64::MAX, length: 7 }, Header::Failure { rank: 3, length: 0 }] {
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
        let good = Header::Data { collective: 1, length: 1 }.encode();
        for (at, what) in [(0, "begins with"), (4, "kind"), (22, "at most")] {
            let mut bad = good;
            bad[at] = 0x7f;
            let error = Header::decode(&bad).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
