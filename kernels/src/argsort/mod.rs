//! Stable counting sort of items by destination: O(n + P), where a comparison sort needs O(n log n).

#[cfg(target_arch = "x86_64")]
mod wide;

use crate::error::{KernelError, check_below, check_count, check_len};

/// The order of n items by destination; reused between calls.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RankOrder {
    permutation: Vec<u32>,
    inverse: Vec<u32>,
    offsets: Vec<u32>,
}

impl RankOrder {
    /// Returns the item at each sorted position, `[n]`. Items with one destination keep their order.
    pub fn permutation(&self) -> &[u32] {
        &self.permutation
    }

    /// Returns each item's sorted position, `[n]`.
    pub fn inverse(&self) -> &[u32] {
        &self.inverse
    }

    /// Returns `[P + 1]` offsets: destination p has the sorted positions `offsets[p]..offsets[p + 1]`.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// Returns the items of one destination, ascending. Panics if there is no such destination.
    pub fn items(&self, destination: usize) -> &[u32] {
        let (from, to) = (self.offsets[destination], self.offsets[destination + 1]);
        &self.permutation[from as usize..to as usize]
    }
}

/// An integer that identifies a rank: `u16` in tables, `u32` in kernels.
pub trait Destination: Copy + sealed::Sealed {
    /// Converts to an index.
    fn index(self) -> usize;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u16 {}
    impl Sealed for u32 {}
}

impl Destination for u16 {
    fn index(self) -> usize {
        usize::from(self)
    }
}

impl Destination for u32 {
    fn index(self) -> usize {
        self as usize
    }
}

/// Sorts items by destination, stably; `destinations` is `[n]`, each below `ranks`. The previous contents of `out` are
/// lost, even on an error. Implements line 3 of the paper's Algorithm 3, and computes the offsets that lines 4 to 6
/// need.
///
/// # Errors
/// If a destination is out of range; the error includes its index.
pub fn argsort_by_rank<D: Destination>(
    destinations: &[D],
    ranks: usize,
    out: &mut RankOrder,
) -> Result<(), KernelError> {
    check_count(destinations.len())?;
    let RankOrder { permutation, inverse, offsets } = out;
    permutation.resize(destinations.len(), 0);
    inverse.resize(destinations.len(), 0);
    offsets.resize(ranks + 1, 0);
    argsort_into(destinations, permutation, inverse, offsets)
}

/// Sorts items by destination, stably, into slices: `permutation` and `inverse` are `[n]`, `offsets` is `[P + 1]`.
///
/// # Errors
/// See [`argsort_by_rank`]; also if a slice has the wrong length.
pub fn argsort_into<D: Destination>(
    destinations: &[D],
    permutation: &mut [u32],
    inverse: &mut [u32],
    offsets: &mut [u32],
) -> Result<(), KernelError> {
    check_count(destinations.len())?;
    check_len("permutation", permutation.len(), destinations.len())?;
    check_len("inverse", inverse.len(), destinations.len())?;
    let ranks = offsets.len().checked_sub(1).ok_or(KernelError::NoRanks)?;
    #[cfg(target_arch = "x86_64")]
    if ranks <= wide::MAX_RANKS && wide::available() {
        // SAFETY: the CPU has the required features.
        if unsafe { wide::sort(destinations, permutation, inverse, offsets) } {
            return Ok(());
        }
        // A destination is out of range; the loop below reports which.
    }
    offsets.fill(0);
    for (index, &destination) in destinations.iter().enumerate() {
        check_below("destination", index, destination.index(), ranks)?;
        offsets[destination.index() + 1] += 1;
    }
    for p in 0..ranks {
        offsets[p + 1] += offsets[p];
    }
    // The start of each destination serves as its cursor, which ends up at the start of the next destination.
    place((0..).zip(destinations), offsets, permutation, inverse);
    offsets.rotate_right(1);
    offsets[0] = 0;
    Ok(())
}

/// Places each item at the cursor of its destination.
#[inline(always)]
fn place<'a, D: Destination + 'a>(
    items: impl Iterator<Item = (usize, &'a D)>,
    cursors: &mut [u32],
    permutation: &mut [u32],
    inverse: &mut [u32],
) {
    for (item, destination) in items {
        let cursor = &mut cursors[destination.index()];
        permutation[*cursor as usize] = item as u32;
        inverse[item] = *cursor;
        *cursor += 1;
    }
}
