//! Where the experts of a model are: the part of a unit's layout that dispatch needs.

use semmoe_tables::{ExpertCopies, ExpertId, GroupId, LayerIdx, RankId};
use serde::{Deserialize, Serialize};

use super::layout::ExpertLayout;

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
    pub fn has(&self, rank: RankId, layer: LayerIdx, expert: ExpertId) -> bool {
        let host = GroupId::new(self.layout.host(rank.index()) as u16);
        self.layout == ExpertLayout::Tp || self.copies.holds(host, layer, expert)
    }

    /// The experts of a layer that a rank has, or has slices of, in ascending id.
    pub fn experts_of(&self, rank: RankId, layer: LayerIdx) -> impl Iterator<Item = ExpertId> {
        (0..self.copies.experts()).map(ExpertId::new).filter(move |&expert| self.has(rank, layer, expert))
    }
}
