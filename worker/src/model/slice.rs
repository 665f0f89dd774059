//! Experts tp and hybrid: the part of an expert's intermediate width that a rank keeps. It has these columns of gate
//! and up (rows of the checkpoint's tensors) and these rows of down (their columns), so that the ranks' results sum up
//! to the expert's.

use std::ops::Range;

use super::{ModelConfig, ModelError};
use crate::ep::ExpertLayout;

/// A rank's slice of every expert that it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ExpertSlice {
    rank: usize,
    ranks: usize,
}

impl ExpertSlice {
    /// Every expert whole.
    const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// An even part for each rank that has the same experts, in a unit of `world`.
    ///
    /// # Errors
    /// A width that so many ranks do not divide.
    pub(crate) fn new(
        config: &ModelConfig,
        layout: ExpertLayout,
        rank: usize,
        world: usize,
    ) -> Result<Self, ModelError> {
        let (rank, ranks) = match layout {
            ExpertLayout::Ep => return Ok(Self::WHOLE),
            ExpertLayout::Tp => (rank, world),
            ExpertLayout::Hybrid(nodes) => (rank % usize::from(nodes.width()), nodes.width().into()),
        };
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
