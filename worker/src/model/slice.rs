//! Experts tp: the part of every expert's intermediate width that a rank keeps. It has these columns of gate and up (rows of the
//! checkpoint's tensors) and these rows of down (their columns), so that the ranks' results sum up to the expert's.

use std::ops::Range;

use super::{ModelConfig, ModelError};

/// A rank's slice of every expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ExpertSlice {
    rank: usize,
    ranks: usize,
}

impl ExpertSlice {
    /// Every expert whole.
    pub(crate) const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// An even part for each rank.
    ///
    /// # Errors
    /// A width that so many ranks do not divide.
    pub(crate) fn new(config: &ModelConfig, rank: usize, ranks: usize) -> Result<Self, ModelError> {
        let width = config.expert_width;
        if ranks == 0 || !width.is_multiple_of(ranks) {
            return Err(ModelError::ExpertWidth { width, ranks });
        }
        Ok(Self { rank, ranks })
    }

    /// Its part of a width that the ranks divide.
    pub(super) fn columns(self, width: usize) -> Range<usize> {
        let part = width / self.ranks;
        self.rank * part..(self.rank + 1) * part
    }
}
