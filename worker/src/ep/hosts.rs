//! Where the experts of one layer are, as a rank looks them up.

use semmoe_tables::{ExpertCopies, ExpertId, GroupId, LayerIdx, RankId};

use super::layout::ExpertLayout;
use super::spread::ExpertSpread;

/// Where the experts of one layer are.
pub(super) struct LayerHosts {
    /// `[N]`: the rank, or node, whose copy of each expert this rank's tokens use; empty where every rank has a slice
    /// of each.
    pub(super) rank_of: Vec<u16>,
    /// `[N]`: this rank's slot of each expert, [`NOT_HERE`] for the others'.
    pub(super) slot_of: Vec<u16>,
    /// How many experts this rank has.
    pub(super) slots: usize,
}

/// In place of a slot: the expert is another rank's.
pub(super) const NOT_HERE: u16 = u16::MAX;

impl LayerHosts {
    /// Of every layer.
    pub(super) fn of_spread(spread: &ExpertSpread, rank: RankId) -> Vec<Self> {
        let layers = (0..spread.copies.layers()).map(|layer| LayerIdx::new(layer as u16));
        layers
            .map(|layer| match spread.layout {
                ExpertLayout::Ep | ExpertLayout::Hybrid(_) => {
                    Self::new(&spread.copies, layer, GroupId::new(spread.layout.host(rank.index()) as u16))
                }
                ExpertLayout::Tp => Self::everywhere(spread.copies.experts()),
            })
            .collect()
    }

    /// Every rank has a slice of each: the slot of an expert is its id.
    fn everywhere(experts: u16) -> Self {
        Self { rank_of: Vec::new(), slot_of: (0..experts).collect(), slots: experts.into() }
    }

    fn new(copies: &ExpertCopies, layer: LayerIdx, host: GroupId) -> Self {
        let mut slots = 0;
        let mut slot_of = Vec::new();
        for expert in 0..copies.experts() {
            if copies.holds(host, layer, ExpertId::new(expert)) {
                slot_of.push(slots);
                slots += 1;
            } else {
                slot_of.push(NOT_HERE);
            }
        }
        Self { rank_of: copies.used_at(host.get().into(), layer).to_vec(), slot_of, slots: slots.into() }
    }
}
