//! Physical slots: experts as engines lay them out, group after group, whether the tables have replicas or not.

use crate::{GroupId, LayerIdx, Tables};

/// The experts of a layer slot by slot: \[S\], S / G slots per group, ascending inside a group, -1 = padding. Without
/// replicas S is N.
pub(crate) fn slots(tables: &Tables, layer: LayerIdx) -> Vec<i32> {
    if let Some(replicas) = tables.physical_to_logical() {
        return replicas.layer(layer).to_vec();
    }
    let groups = (0..tables.groups()).map(GroupId::new);
    groups.flat_map(|group| tables.placement().experts_of(layer, group)).map(|expert| i32::from(expert.get())).collect()
}

/// S: slots per layer.
pub(crate) fn slots_per_layer(tables: &Tables) -> usize {
    tables.physical_to_logical().map_or(usize::from(tables.model().num_experts), |replicas| replicas.slots())
}
