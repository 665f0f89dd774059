//! Errors for operands that a kernel rejects before it writes anything.

/// Operands are out of range or do not match each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KernelError {
    /// An id is not below its bound.
    #[error("{what} {index} is {found}, expected below {bound}")]
    OutOfRange {
        /// The kind of id.
        what: &'static str,
        /// Position of the id in its slice.
        index: usize,
        /// The id.
        found: usize,
        /// The exclusive upper bound.
        bound: usize,
    },
    /// A row has no experts.
    #[error("row {row} has no pairs, expected at least 1")]
    NoPairs {
        /// The row.
        row: usize,
    },
    /// A slice's length does not match the others.
    #[error("{what}: {found} elements, expected {expected}")]
    Length {
        /// The slice.
        what: &'static str,
        /// Length of the slice.
        found: usize,
        /// The required length.
        expected: usize,
    },
    /// A collective without ranks.
    #[error("there are 0 ranks, expected at least 1")]
    NoRanks,
    /// The ranks do not split evenly over the nodes.
    #[error("{ranks} ranks cannot be split evenly over {nodes} nodes")]
    Nodes {
        /// Number of nodes requested.
        nodes: usize,
        /// Number of ranks in the unit.
        ranks: usize,
    },
    /// The offsets of the ranks' parts are not ascending.
    #[error("offset {index} is {found}, expected at least the previous one, {before}")]
    Descending {
        /// Index of the offset.
        index: usize,
        /// The offset.
        found: u32,
        /// The previous offset.
        before: u32,
    },
    /// A permutation contains a token twice.
    #[error("token {token} at position {index} is a duplicate")]
    Twice {
        /// The second position.
        index: usize,
        /// The token.
        token: usize,
    },
    /// There are more items than 32-bit positions can count.
    #[error("{found} items exceed the limit of {limit} per call")]
    TooMany {
        /// Number of items requested.
        found: usize,
        /// Maximum number of items in one call.
        limit: usize,
    },
}

/// Positions are `u32`.
pub(crate) const MAX_ITEMS: usize = u32::MAX as usize;

/// Checks the length of a slice.
///
/// # Errors
/// If the lengths differ.
pub fn check_len(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found == expected { Ok(()) } else { Err(KernelError::Length { what, found, expected }) }
}

/// Checks that the id at `index` is below its bound.
///
/// # Errors
/// If the id is out of range.
#[inline]
pub fn check_below(what: &'static str, index: usize, found: usize, bound: usize) -> Result<(), KernelError> {
    if found < bound { Ok(()) } else { Err(KernelError::OutOfRange { what, index, found, bound }) }
}

pub(crate) fn check_count(found: usize) -> Result<(), KernelError> {
    if found <= MAX_ITEMS { Ok(()) } else { Err(KernelError::TooMany { found, limit: MAX_ITEMS }) }
}
