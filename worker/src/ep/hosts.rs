//! The locations of one layer's experts, in the form in which a rank looks them up.

use semmoe_tables::{ExpertId, LayerIdx, RankId};

use super::layout::ExpertLayout;
use super::placement::ExpertPlacement;

/// The places of one layer's experts.
pub(crate) struct LayerHosts {
    /// `[N]`: the rank, or node, whose replica of each expert this rank's tokens use; empty if every rank has a slice
    /// of each.
    pub(super) rank_of: Vec<u16>,
    /// `[N]`: this rank's slot of each expert; [`NOT_HERE`] for others.
    pub(super) slot_of: Vec<u16>,
    /// How many experts this rank has.
    pub(crate) slots: usize,
}

/// Marks an expert of another rank.
pub(super) const NOT_HERE: u16 = u16::MAX;

/// A row for an expert that this rank does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a token for expert {expert}, which is not on this rank")]
pub(crate) struct NotHere {
    /// The rank that sent it.
    pub(crate) from: usize,
    pub(super) expert: u16,
}

impl LayerHosts {
    /// Fills `slots` with this rank's slot of each expert; `source` maps a pair to its sending rank.
    ///
    /// # Errors
    /// An expert that is not on this rank.
    pub(crate) fn slots_of(
        &self,
        experts: &[u16],
        source: impl Fn(usize) -> usize,
        slots: &mut Vec<u16>,
    ) -> Result<(), NotHere> {
        slots.clear();
        for (pair, &expert) in experts.iter().enumerate() {
            match self.slot_of.get(usize::from(expert)) {
                Some(&slot) if slot != NOT_HERE => slots.push(slot),
                _ => return Err(NotHere { from: source(pair), expert }),
            }
        }
        Ok(())
    }

    /// The places for every layer.
    pub(super) fn of_placement(placement: &ExpertPlacement, rank: RankId) -> Vec<Self> {
        (0..placement.replicas.layers()).map(|layer| Self::new(placement, rank, LayerIdx::new(layer as u16))).collect()
    }

    fn new(placement: &ExpertPlacement, rank: RankId, layer: LayerIdx) -> Self {
        let mut slots = 0;
        let slot = |expert| {
            let has = placement.has(rank, layer, ExpertId::new(expert));
            slots += u16::from(has);
            if has { slots - 1 } else { NOT_HERE }
        };
        let slot_of = (0..placement.replicas.experts()).map(slot).collect();
        let rank_of = match placement.layout {
            ExpertLayout::Tp | ExpertLayout::Groups(_) => Vec::new(),
            layout => placement.replicas.used_at(layout.host(rank.index()), layer).to_vec(),
        };
        Self { rank_of, slot_of, slots: slots.into() }
    }
}
