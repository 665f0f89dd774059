//! Stable order of items by destination, by counting: O(n + P), against O(n log n) of a comparison sort.

use crate::error::{KernelError, check_count};

/// The order of n items by destination; reused between calls.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RankOrder {
    permutation: Vec<u32>,
    inverse: Vec<u32>,
    offsets: Vec<u32>,
}

impl RankOrder {
    /// `[n]`: the item at each sorted position. Items of one destination keep their order.
    #[must_use]
    pub fn permutation(&self) -> &[u32] {
        &self.permutation
    }

    /// `[n]`: the sorted position of each item.
    #[must_use]
    pub fn inverse(&self) -> &[u32] {
        &self.inverse
    }

    /// `[P + 1]`: destination p has the sorted positions `offsets[p]..offsets[p + 1]`.
    #[must_use]
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// The items of one destination, ascending. Panics if there is no such destination.
    #[must_use]
    pub fn items(&self, destination: usize) -> &[u32] {
        let (from, to) = (self.offsets[destination], self.offsets[destination + 1]);
        &self.permutation[from as usize..to as usize]
    }
}

/// Sorts items by destination; `destinations` is `[n]`, each below `ranks`. What `out` held is lost, on an error too.
///
/// # Errors
/// A destination out of range, by its index.
pub fn argsort_by_rank(destinations: &[u16], ranks: usize, out: &mut RankOrder) -> Result<(), KernelError> {
    check_count(destinations.len())?;
    let offsets = &mut out.offsets;
    offsets.clear();
    offsets.resize(ranks + 1, 0);
    for (index, &destination) in destinations.iter().enumerate() {
        let found = usize::from(destination);
        if found >= ranks {
            return Err(KernelError::OutOfRange { what: "destination", index, found, bound: ranks });
        }
        offsets[found + 1] += 1;
    }
    for p in 0..ranks {
        offsets[p + 1] += offsets[p];
    }
    out.permutation.resize(destinations.len(), 0);
    out.inverse.resize(destinations.len(), 0);
    for (item, &destination) in destinations.iter().enumerate() {
        // The start of each destination serves as its cursor, and is restored below.
        let cursor = &mut offsets[usize::from(destination)];
        out.permutation[*cursor as usize] = item as u32;
        out.inverse[item] = *cursor;
        *cursor += 1;
    }
    // Each cursor stands now at the start of the next destination.
    offsets.rotate_right(1);
    offsets[0] = 0;
    Ok(())
}
