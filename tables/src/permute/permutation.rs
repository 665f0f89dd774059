//! Which expert moves where: from a placement to a permutation of each layer's experts.

use std::collections::BTreeMap;

use super::PermuteError;
use crate::{LayerIdx, Tables};

/// For every MoE layer of the model: new slot p takes old expert pi(p), so that p / (N / G) is the group of pi(p).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Permutation {
    /// By the model's layer number.
    pub(super) layers: BTreeMap<u16, LayerPermutation>,
    /// N.
    pub(super) experts: u16,
}

/// One layer's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LayerPermutation {
    /// pi: \[slot\]
    pub(super) old: Vec<u16>,
    /// Its inverse: \[old expert\]
    pub(super) slot: Vec<u16>,
}

impl Permutation {
    /// The permutation that makes the contiguous placement the one of the tables.
    ///
    /// # Errors
    /// [`PermuteError::Replicas`] for tables with more slots than experts.
    pub fn of(tables: &Tables) -> Result<Self, PermuteError> {
        let experts = tables.model().num_experts;
        let slots_each = tables.slots_per_layer();
        if slots_each != usize::from(experts) {
            return Err(PermuteError::Replicas { experts, slots: slots_each });
        }
        let layer_of = |layer| {
            // As many slots as experts, and every expert in one: no padding, each once.
            let old: Vec<u16> = tables.slots(layer).into_iter().map(|expert| expert as u16).collect();
            let mut slot = vec![0; old.len()];
            (0u16..).zip(&old).for_each(|(p, &expert)| slot[usize::from(expert)] = p);
            LayerPermutation { old, slot }
        };
        let ids = &tables.model().layer_ids;
        let layers = ids.iter().copied().zip(LayerIdx::all(ids.len()).map(layer_of)).collect();
        Ok(Self { layers, experts })
    }

    /// The old expert of each new slot of one of the model's layers; `None` for layers without experts.
    pub fn old_experts(&self, layer: u16) -> Option<&[u16]> {
        self.layers.get(&layer).map(|layer| &layer.old[..])
    }

    /// Whether a model that first chooses among `n_group` groups of N / `n_group` neighbours still chooses the same:
    /// every group of new slots must be a group of old experts. `n_group` divides N.
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
