//! Lookup tables for the locations of one layer's experts, from one rank's point of view.

use semmoe_tables::{ExpertId, LayerIdx, RankId};

use super::layout::ExpertLayout;
use super::placement::ExpertPlacement;

/// The locations of one layer's experts, as seen by one rank.
pub(crate) struct LayerHosts {
    /// `[N]`: the rank or node whose replica of each expert serves this rank's tokens; empty if every rank has a slice
    /// of every expert.
    pub(super) rank_of: Vec<u16>,
    /// `[N]`: the local slot of each expert, or [`NOT_HERE`] if it is not on this rank.
    pub(super) slot_of: Vec<u16>,
    /// The number of experts on this rank.
    pub(crate) slots: usize,
}

/// Marks an expert that is not on this rank.
pub(super) const NOT_HERE: u16 = u16::MAX;

/// A row was sent for an expert that this rank does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("received a token for expert {expert}, which is not on this rank")]
pub(crate) struct NotHere {
    /// The rank that sent the row.
    pub(crate) from: usize,
    pub(super) expert: u16,
}

impl LayerHosts {
    /// Returns the tables in the form that GPU kernels read: `[N]` slots, then the ranks, if there are any. The slot of
    /// an expert that is not on this rank is not below [`LayerHosts::slots`].
    #[cfg(feature = "gpu")]
    pub(crate) fn words(&self) -> impl Iterator<Item = u32> + '_ {
        self.slot_of.iter().chain(&self.rank_of).map(|&word| word.into())
    }

    /// Fills `slots` with the local slot of each pair's expert; `source` maps a pair to the rank that sent it.
    ///
    /// # Errors
    /// An expert is not on this rank.
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

    /// Builds the expert locations for every layer.
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
            ExpertLayout::Ep | ExpertLayout::Hybrid(_) => placement.used_by(rank, layer),
        };
        Self { rank_of, slot_of, slots: slots.into() }
    }
}
