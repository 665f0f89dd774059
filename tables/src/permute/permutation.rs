//! Derives a permutation of each layer's experts from a placement.

use std::collections::BTreeMap;

use super::PermuteError;
use crate::{LayerIdx, Tables};

/// For every MoE layer, the old expert pi(p) that moves to new slot p, such that p / (N / G) is the group of pi(p).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Permutation {
    /// Keyed by the model's layer number.
    pub(super) layers: BTreeMap<u16, LayerPermutation>,
    /// Number of experts, N.
    pub(super) experts: u16,
}

/// The permutation of one layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LayerPermutation {
    /// pi: \[slot\]
    pub(super) old: Vec<u16>,
    /// The inverse of `old`: \[old expert\]
    pub(super) slot: Vec<u16>,
}

impl Permutation {
    /// Returns the permutation that turns the contiguous placement into that of the tables.
    ///
    /// # Errors
    /// [`PermuteError::Replicas`] if there are more slots than experts.
    pub fn of(tables: &Tables) -> Result<Self, PermuteError> {
        let experts = tables.model().num_experts;
        let slots_each = tables.slots_per_layer();
        if slots_each != usize::from(experts) {
            return Err(PermuteError::Replicas { experts, slots: slots_each });
        }
        let layer_of = |layer| {
            // There are as many slots as experts and every expert has one, so there is no padding.
            let old: Vec<u16> = tables.slots(layer).into_iter().map(|expert| expert as u16).collect();
            let mut slot = vec![0; old.len()];
            (0u16..).zip(&old).for_each(|(p, &expert)| slot[usize::from(expert)] = p);
            LayerPermutation { old, slot }
        };
        let ids = &tables.model().layer_ids;
        let layers = ids.iter().copied().zip(LayerIdx::all(ids.len()).map(layer_of)).collect();
        Ok(Self { layers, experts })
    }

    /// Returns the old expert of each new slot of a layer, or `None` for layers without experts.
    pub fn old_experts(&self, layer: u16) -> Option<&[u16]> {
        self.layers.get(&layer).map(|layer| &layer.old[..])
    }

    /// Checks that a model that first chooses among `n_group` groups of N / `n_group` consecutive experts still makes
    /// the same choices: every group of new slots must be a group of old experts. `n_group` divides N.
    pub(super) fn keeps_gating_groups(&self, n_group: u16) -> Result<(), PermuteError> {
        let each = self.experts / n_group.max(1);
        for (&layer, permutation) in &self.layers {
            for group in permutation.old.chunks_exact(usize::from(each)) {
                let first = group[0];
                if let Some(&second) = group.iter().find(|&&expert| expert / each != first / each) {
                    return Err(PermuteError::SplitsGatingGroup { layer, first, second, n_group });
                }
            }
        }
        Ok(())
    }
}
