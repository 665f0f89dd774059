//! Operands that a kernel refuses before it writes anything.

/// Operands that do not fit together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KernelError {
    /// An id is not below its bound.
    #[error("{what} {index} is {found}, expected below {bound}")]
    OutOfRange {
        /// The kind of id.
        what: &'static str,
        /// Where it stands.
        index: usize,
        /// The id.
        found: usize,
        /// The first number that is too large.
        bound: usize,
    },
    /// A row that goes to no expert.
    #[error("row {row} has no pairs, expected at least 1")]
    NoPairs {
        /// Which row.
        row: usize,
    },
    /// A slice has another length than the others ask for.
    #[error("{what} has {found} elements, expected {expected}")]
    Length {
        /// The slice.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length that fits.
        expected: usize,
    },
    /// A collective over no ranks at all.
    #[error("there are 0 ranks, expected at least 1")]
    NoRanks,
    /// Nodes that cannot have the same number of ranks each.
    #[error("{nodes} nodes cannot share {ranks} ranks evenly")]
    Nodes {
        /// Nodes asked for.
        nodes: usize,
        /// Ranks of the unit.
        ranks: usize,
    },
    /// Offsets of the ranks' parts go back.
    #[error("offset {index} is {found}, expected at least {before}, the one before")]
    Descending {
        /// Which offset.
        index: usize,
        /// The offset.
        found: u32,
        /// The one before.
        before: u32,
    },
    /// A permutation has a token twice.
    #[error("position {index} has token {token}, which an earlier position has too")]
    Twice {
        /// The second position.
        index: usize,
        /// The token.
        token: usize,
    },
    /// More items than positions can be counted in 32 bits.
    #[error("{found} items are more than the {limit} that one call takes")]
    TooMany {
        /// Items asked for.
        found: usize,
        /// The limit.
        limit: usize,
    },
}

/// Positions are `u32`.
pub(crate) const MAX_ITEMS: usize = u32::MAX as usize;

/// Whether a slice has the length that the others ask for.
///
/// # Errors
/// Another length.
pub fn check_len(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found == expected { Ok(()) } else { Err(KernelError::Length { what, found, expected }) }
}

/// Whether the id at `index` is below its bound.
///
/// # Errors
/// An id that is not.
#[inline]
pub fn check_below(what: &'static str, index: usize, found: usize, bound: usize) -> Result<(), KernelError> {
    if found < bound { Ok(()) } else { Err(KernelError::OutOfRange { what, index, found, bound }) }
}

pub(crate) fn check_count(found: usize) -> Result<(), KernelError> {
    if found <= MAX_ITEMS { Ok(()) } else { Err(KernelError::TooMany { found, limit: MAX_ITEMS }) }
}
