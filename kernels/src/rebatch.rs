//! The paper's Algorithm 3 as a caller sees it: tokens to their groups (`rebatch_tokens`), and back (`resume_tokens`).
//!
//! Line 2, the choice between the tables T and A, is not made here: it gives the destination of each token. Lines 3 to 6 are
//! [`rebatch`]. Line 7 and the collectives of lines 15 and 17 are one step each, a shuffled reduce-scatter and a shuffled
//! allgather; the latter writes rows where they came from, so that lines 10 to 12 cost nothing. [`resume_rows`] is those lines on
//! their own.

use crate::argsort::{RankOrder, argsort_by_rank};
use crate::element::Element;
use crate::error::{KernelError, check_len};
use crate::split::even_offsets;

/// What line 5, `align`, does. The paper does not say. Here it knows destinations alone; who knows what tokens lose elsewhere makes
/// parts even before (`EvenGroups` of semmoe-tables, as the worker does), and takes them as they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Alignment {
    /// Groups keep their sizes: for destinations that are even already, and collectives that take uneven parts, as ours do.
    #[default]
    Uneven,
    /// Every group gets n / P tokens, the first n mod P groups one more: for collectives that only know even parts. The last
    /// tokens of a group that is too large go to the first groups with room.
    Even,
}

/// Scratch of [`rebatch`], reused between calls.
#[derive(Clone, Debug, Default)]
pub struct RebatchScratch {
    destinations: Vec<u32>,
    /// Room left in each group.
    room: Vec<u32>,
}

/// Lines 3 to 6: the order of n tokens by destination, stable, aligned if asked for. `destinations` is `[n]`.
///
/// # Errors
/// A destination out of range, by its index.
pub fn rebatch(
    destinations: &[u16],
    ranks: usize,
    alignment: Alignment,
    scratch: &mut RebatchScratch,
    out: &mut RankOrder,
) -> Result<(), KernelError> {
    if alignment == Alignment::Uneven {
        return argsort_by_rank(destinations, ranks, out);
    }
    let offsets = even_offsets(destinations.len(), ranks)?;
    let RebatchScratch { destinations: aligned, room } = scratch;
    room.clear();
    room.extend(offsets.windows(2).map(|pair| pair[1] - pair[0]));
    aligned.clear();
    for (index, &destination) in destinations.iter().enumerate() {
        let found = usize::from(destination);
        let Some(room) = room.get_mut(found) else {
            return Err(KernelError::OutOfRange { what: "destination", index, found, bound: ranks });
        };
        aligned.push(if *room == 0 { NO_GROUP } else { u32::from(destination) });
        *room = room.saturating_sub(1);
    }
    let mut open = 0;
    for destination in aligned.iter_mut().filter(|destination| **destination == NO_GROUP) {
        // The room of all groups is n in all, so that there is one with room for each token without a group.
        while room[open] == 0 {
            open += 1;
        }
        room[open] -= 1;
        *destination = open as u32;
    }
    argsort_by_rank(aligned, ranks, out)
}

/// The token found its group full.
const NO_GROUP: u32 = u32::MAX;

/// Lines 10 to 12: rows in shuffled order `[n, H]` back into the order of the tokens, `out` `[n, H]`.
///
/// # Errors
/// Lengths that do not fit the order.
pub fn resume_rows<T: Element>(
    shuffled: &[T],
    order: &RankOrder,
    hidden: usize,
    out: &mut [T],
) -> Result<(), KernelError> {
    let elements = order.inverse().len() * hidden;
    check_len("shuffled", shuffled.len(), elements)?;
    check_len("out", out.len(), elements)?;
    if hidden == 0 {
        return Ok(());
    }
    for (&position, row) in order.inverse().iter().zip(out.chunks_exact_mut(hidden)) {
        row.copy_from_slice(&shuffled[position as usize * hidden..][..hidden]);
    }
    Ok(())
}
