//! The layout and placement of a model's experts, as dispatch uses them.

use semmoe_tables::{ExpertCopies, ExpertId, GroupId, LayerIdx, RankId};
use serde::{Deserialize, Serialize};

use super::layout::ExpertLayout;

/// The layout and placement of every layer's experts in a unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertPlacement {
    /// How experts are divided among ranks.
    pub layout: ExpertLayout,
    /// The ranks that host each expert if experts are whole; for sliced experts, only the shape is used.
    #[serde(rename = "copies")]
    pub replicas: ExpertCopies,
}

impl ExpertPlacement {
    /// Whether a rank has this expert, or a slice of it.
    pub fn has(&self, rank: RankId, layer: LayerIdx, expert: ExpertId) -> bool {
        let host = GroupId::new(self.layout.host(rank.index()) as u16);
        self.layout.is_sliced() || self.replicas.holds(host, layer, expert)
    }

    /// Returns the experts of a layer that a rank hosts, whole or sliced, in ascending id order.
    pub fn experts_of(&self, rank: RankId, layer: LayerIdx) -> impl Iterator<Item = ExpertId> {
        (0..self.replicas.experts()).map(ExpertId::new).filter(move |&expert| self.has(rank, layer, expert))
    }
}
