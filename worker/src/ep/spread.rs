//! Where the experts of a model are: the part of a unit's layout that dispatch needs.

use std::fmt;

use semmoe_tables::{ExpertCopies, ExpertId, GroupId, LayerIdx, RankId};
use serde::{Deserialize, Serialize};

/// How the experts of a model are divided among ranks. All ranks of a unit must be given the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum ExpertLayout {
    /// Expert parallel: each expert lies whole on the rank that the placement names.
    #[default]
    Ep,
    /// Tensor parallel: every rank has a slice of every expert, an even part of its intermediate width. Tokens are
    /// gathered by all ranks, and their partial sums scattered back, summed in rank order.
    Tp,
}

impl fmt::Display for ExpertLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ep => "ep",
            Self::Tp => "tp",
        })
    }
}

/// How the experts of every layer are divided among the ranks of a unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertSpread {
    /// Whole experts, or a slice of each on every rank.
    pub layout: ExpertLayout,
    /// The ranks that hold each expert where experts are whole; of slices only its shape counts.
    pub copies: ExpertCopies,
}

impl ExpertSpread {
    /// Whether a rank has this expert, or its slice of it.
    #[must_use]
    pub fn has(&self, rank: RankId, layer: LayerIdx, expert: ExpertId) -> bool {
        match self.layout {
            ExpertLayout::Ep => self.copies.holds(GroupId::new(rank.get()), layer, expert),
            ExpertLayout::Tp => true,
        }
    }

    /// The experts of a layer that a rank has, or has slices of, in ascending id.
    pub fn experts_of(&self, rank: RankId, layer: LayerIdx) -> impl Iterator<Item = ExpertId> {
        (0..self.copies.experts()).map(ExpertId::new).filter(move |&expert| self.has(rank, layer, expert))
    }
}
