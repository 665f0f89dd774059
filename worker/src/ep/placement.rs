//! Where the experts of a model are, as far as dispatch needs to know.

use semmoe_tables::{ExpertCopies, ExpertId, GroupId, LayerIdx, RankId};
use serde::{Deserialize, Serialize};

use super::layout::ExpertLayout;

/// The layout and placement of every layer's experts in a unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertPlacement {
    /// Whole experts, or a slice of each on every rank.
    pub layout: ExpertLayout,
    /// The ranks that host each expert, if experts are whole; for slices only its shape is used.
    #[serde(rename = "copies")]
    pub replicas: ExpertCopies,
}

impl ExpertPlacement {
    /// Whether a rank has this expert, or a slice of it.
    pub fn has(&self, rank: RankId, layer: LayerIdx, expert: ExpertId) -> bool {
        let host = GroupId::new(self.layout.host(rank.index()) as u16);
        self.layout.is_sliced() || self.replicas.holds(host, layer, expert)
    }

    /// The experts of a layer of which a rank has the whole or a slice, in ascending id.
    pub fn experts_of(&self, rank: RankId, layer: LayerIdx) -> impl Iterator<Item = ExpertId> {
        (0..self.replicas.experts()).map(ExpertId::new).filter(move |&expert| self.has(rank, layer, expert))
    }
}
