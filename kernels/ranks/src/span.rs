//! A typed range in the symmetric buffer, equal on every rank.

use std::marker::PhantomData;
use std::ops::Range;

use crate::error::RankError;

/// Alignment of a span's start, in bytes.
pub const ALIGNMENT: usize = 16;

/// `len` values of `T` at a byte offset in every rank's symmetric buffer.
#[derive(Clone, Copy, Debug)]
pub struct Span<T> {
    offset: usize,
    len: usize,
    of: PhantomData<fn() -> T>,
}

impl<T: bytemuck::Pod> Span<T> {
    /// Creates a span of `len` values at byte `offset`, a multiple of [`ALIGNMENT`].
    ///
    /// # Errors
    /// If the offset is misaligned, or the span ends past the address space.
    pub fn new(offset: usize, len: usize) -> Result<Self, RankError> {
        if !offset.is_multiple_of(ALIGNMENT) {
            return Err(RankError::Misaligned { what: "a span", found: offset, alignment: ALIGNMENT });
        }
        let limit = isize::MAX as u64;
        let found = size_of::<T>() as u128 * len as u128 + offset as u128;
        if found > u128::from(limit) {
            let found = u64::try_from(found).unwrap_or(u64::MAX);
            return Err(RankError::TooLarge { what: "bytes of a span", found, limit });
        }
        Ok(Self { offset, len, of: PhantomData })
    }

    /// Returns the offset in bytes from the start of the symmetric buffer.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the offset at which the next span can start.
    #[must_use]
    pub fn next(&self) -> usize {
        self.end().next_multiple_of(ALIGNMENT)
    }

    pub(crate) fn end(&self) -> usize {
        self.offset + self.len * size_of::<T>()
    }

    pub(crate) fn bytes(&self) -> Range<usize> {
        self.offset..self.end()
    }
}

/// Whether two ranges of a buffer overlap.
pub(crate) fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}
