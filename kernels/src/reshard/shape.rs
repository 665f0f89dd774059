//! An expert's arrays and where they may be split; nodes and ranks.

use std::ops::Range;

use super::error::ReshardError;
use crate::nodes::NodeGrid;

/// Ids have 16 bits, and the highest one never denotes an expert.
pub(super) const MAX_IDS: usize = u16::MAX as usize;

impl NodeGrid {
    /// Creates a grid of N nodes with P ranks each, between which experts move. Under TP, rank r has slice r mod P of
    /// every expert, so each node has all experts.
    ///
    /// # Errors
    /// If there are no nodes, no ranks, or more than 65,535 ranks in total.
    pub fn of_nodes(nodes: usize, width: usize) -> Result<Self, ReshardError> {
        check_count("nodes", nodes)?;
        check_count("ranks per node", width)?;
        check_count("ranks", nodes * width)?;
        Ok(Self { nodes, width })
    }
}

/// One array of an expert, row-major `[outer, width, inner]`; TP splits the `width` axis, which all arrays share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertArray {
    /// Number of rows, each of which TP splits along `width`: 2 for gate and up together, H for down.
    pub outer: usize,
    /// Bytes of one step along `width`.
    pub inner_bytes: usize,
}

/// An expert's arrays, in slot order. The width is counted in *steps*, the smallest units that may be split off: one
/// intermediate column, a block of columns that share a scale, or a packed slice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertShape {
    width: usize,
    arrays: Vec<ExpertArray>,
}

impl ExpertShape {
    /// Creates a shape from arbitrary arrays with `width` steps each.
    ///
    /// # Errors
    /// If there are no steps or arrays, an array is empty, or the size exceeds the address space.
    pub fn new(width: usize, arrays: Vec<ExpertArray>) -> Result<Self, ReshardError> {
        let limit = isize::MAX as usize;
        let positive = |what, found| match found {
            1.. if found <= limit => Ok(()),
            _ => Err(ReshardError::Count { what, found, limit }),
        };
        positive("steps per expert", width)?;
        positive("arrays per expert", arrays.len())?;
        for array in &arrays {
            positive("rows per expert array", array.outer)?;
            positive("bytes per step", array.inner_bytes)?;
        }
        let bytes = arrays.iter().try_fold(0usize, |sum, array| {
            array.outer.checked_mul(array.inner_bytes)?.checked_mul(width)?.checked_add(sum)
        });
        bytes.filter(|&bytes| bytes <= limit).ok_or(ReshardError::TooLarge)?;
        Ok(Self { width, arrays })
    }

    /// Creates a shape with row-major gate and up, `[2, I, H]`, then down, `[H, I]`, with `element_bytes` bytes per
    /// element.
    ///
    /// # Errors
    /// See [`ExpertShape::new`].
    pub fn rows(hidden: usize, intermediate: usize, element_bytes: usize) -> Result<Self, ReshardError> {
        let row = hidden.checked_mul(element_bytes).ok_or(ReshardError::TooLarge)?;
        let gate_up = ExpertArray { outer: 2, inner_bytes: row };
        Self::new(intermediate, vec![gate_up, ExpertArray { outer: hidden, inner_bytes: element_bytes }])
    }

    /// Creates an FP8 shape with one scale per block of `block x block` weights: gate and up, `[2, I, H]`, down, `[H,
    /// I]`, then the scales of both. TP splits only between blocks, so no two slices share a scale.
    ///
    /// # Errors
    /// If H or I is not a multiple of the block size; see also [`ExpertShape::new`].
    pub fn fp8_blocks(
        hidden: usize,
        intermediate: usize,
        block: usize,
        scale_bytes: usize,
    ) -> Result<Self, ReshardError> {
        for (what, found) in [("hidden size", hidden), ("intermediate size", intermediate)] {
            if block == 0 || !found.is_multiple_of(block) {
                return Err(ReshardError::Divides { what, found, divisor: block });
            }
        }
        let product = |a: usize, b: usize| a.checked_mul(b).ok_or(ReshardError::TooLarge);
        let arrays = vec![
            ExpertArray { outer: 2, inner_bytes: product(block, hidden)? },
            ExpertArray { outer: hidden, inner_bytes: block },
            ExpertArray { outer: 2, inner_bytes: product(hidden / block, scale_bytes)? },
            ExpertArray { outer: hidden / block, inner_bytes: scale_bytes },
        ];
        Self::new(intermediate / block, arrays)
    }

    /// Creates a shape with `slices` slices of equal size, each packed separately (gate, up and down of its columns). A
    /// switch then copies entire slices under any placement E, and all offsets are multiples of `slice_bytes`.
    ///
    /// # Errors
    /// See [`ExpertShape::new`].
    pub fn slice_major(slices: usize, slice_bytes: usize) -> Result<Self, ReshardError> {
        Self::new(slices, vec![ExpertArray { outer: 1, inner_bytes: slice_bytes }])
    }

    /// The arrays of an expert.
    pub fn arrays(&self) -> &[ExpertArray] {
        &self.arrays
    }

    /// Returns the size of `steps` steps of one array.
    pub(super) fn part_bytes(&self, array: usize, steps: usize) -> usize {
        self.arrays[array].outer * steps * self.arrays[array].inner_bytes
    }

    /// Returns the size of `steps` steps of the first `arrays` arrays.
    pub(super) fn first_bytes(&self, arrays: usize, steps: usize) -> usize {
        (0..arrays).map(|array| self.part_bytes(array, steps)).sum()
    }

    /// Bytes of one expert.
    pub fn bytes(&self) -> usize {
        self.first_bytes(self.arrays.len(), self.width)
    }

    /// Steps of the width.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns the steps of one of `slices` slices: the first `width % slices` slices have one step more.
    pub fn steps(&self, slice: usize, slices: usize) -> Range<usize> {
        let (each, more) = (self.width / slices, self.width % slices);
        let start = |slice: usize| slice * each + slice.min(more);
        start(slice)..start(slice + 1)
    }
}

pub(super) fn check_count(what: &'static str, found: usize) -> Result<(), ReshardError> {
    match found {
        1..=MAX_IDS => Ok(()),
        _ => Err(ReshardError::Count { what, found, limit: MAX_IDS }),
    }
}

/// Checks that a count matches the expected one.
pub(super) fn check_equal(what: &'static str, found: usize, expected: usize) -> Result<(), ReshardError> {
    if found == expected { Ok(()) } else { Err(ReshardError::Differs { what, found, expected }) }
}
