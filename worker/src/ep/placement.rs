//! The layout and placement of a model's experts, as dispatch uses them.

use semmoe_tables::{ExpertCopies, ExpertId, LayerIdx, RankId};
use serde::{Deserialize, Serialize};

use super::layout::ExpertLayout;

/// The layout and placement of every layer's experts in a unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertPlacement {
    /// How experts are divided among ranks.
    pub layout: ExpertLayout,
    /// The ranks that host each expert if experts are whole; for sliced experts, only the shape is used. With hybrid
    /// experts, groups are nodes, or ranks if the unit can switch: a node then has the experts of its ranks.
    #[serde(rename = "copies")]
    pub replicas: ExpertCopies,
}

impl ExpertPlacement {
    /// Whether a rank has this expert, or a slice of it.
    pub fn has(&self, rank: RankId, layer: LayerIdx, expert: ExpertId) -> bool {
        let host = self.layout.host(rank.index());
        self.layout.is_sliced() || self.hosts_of(layer, expert).any(|of| of == host)
    }

    /// Returns the experts of a layer that a rank hosts, whole or sliced, in ascending id order.
    pub fn experts_of(&self, rank: RankId, layer: LayerIdx) -> impl Iterator<Item = ExpertId> {
        (0..self.replicas.experts()).map(ExpertId::new).filter(move |&expert| self.has(rank, layer, expert))
    }

    /// Returns, for each expert of a layer, the host whose copy a rank's tokens use, `[N]`: the rank's own host if that
    /// has a copy.
    pub(super) fn used_by(&self, rank: RankId, layer: LayerIdx) -> Vec<u16> {
        let (host, each) = (self.layout.host(rank.index()), self.groups_of_host());
        if each == 1 {
            return self.replicas.used_at(host, layer).to_vec();
        }
        let used = (0..).map(ExpertId::new).zip(self.replicas.used_at(rank.index(), layer));
        let nearest = |(expert, group): (ExpertId, &u16)| match self.has(rank, layer, expert) {
            true => host as u16,
            false => (usize::from(*group) / each) as u16,
        };
        used.map(nearest).collect()
    }

    /// Returns the ranks or nodes that host an expert, in ascending order. A node is repeated for each of its ranks
    /// that hosts the expert.
    fn hosts_of(&self, layer: LayerIdx, expert: ExpertId) -> impl Iterator<Item = usize> {
        let each = self.groups_of_host();
        self.replicas.held_by(layer, expert).iter().map(move |&group| usize::from(group) / each)
    }

    /// Returns the number of placement groups per rank or node.
    fn groups_of_host(&self) -> usize {
        self.layout.nodes().map_or(1, |nodes| usize::from(self.replicas.groups() / nodes.nodes).max(1))
    }
}

#[cfg(test)]
mod tests {
    use semmoe_tables::{ModelInfo, Replicas};

    use super::*;

    /// Two nodes of two ranks, each with all experts.
    #[test]
    fn a_node_uses_its_own_copy_of_an_expert() {
        let model = ModelInfo {
            model: "m".into(),
            tokenizer_sha256: None,
            num_experts: 4,
            top_k: 2,
            vocab_size: 3,
            num_hidden_layers: 1,
            layer_ids: vec![0],
        };
        let replicas = Replicas::new(&model, 4, 8, vec![0, 1, 2, 3, 2, 3, 0, 1]).unwrap();
        let placement =
            ExpertPlacement { layout: "hybrid:2x2".parse().unwrap(), replicas: ExpertCopies::from(&replicas) };
        let used = |rank| placement.used_by(RankId::new(rank), LayerIdx::new(0));
        for rank in 0..4 {
            assert_eq!(used(rank), [rank / 2; 4], "rank {rank}");
        }
    }
}
