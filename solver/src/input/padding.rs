//! Padding for experts that cannot be divided evenly among the groups: every group has ceil(N/G) slots, some of them
//! empty.
//!
//! The solver treats empty slots as experts that no token activates: every step distributes them like experts, and
//! swapping an expert with an empty slot moves the expert.

use semmoe_tables::{FormatError, LayerIdx, ModelInfo, Placement, Replicas};

use crate::input::error::SolveError;
use crate::input::problem::Problem;

/// Returns the slots per layer with padding: G ceil(N/G).
pub(crate) fn padded_slots(experts: u16, groups: u16) -> usize {
    usize::from(experts).next_multiple_of(usize::from(groups.max(1)))
}

impl Problem {
    /// Extends the counts to `slots` columns per layer, the last of which are never active.
    pub(crate) fn padded(mut self, slots: usize) -> Result<Self, SolveError> {
        let columns = self.layers as u128 * slots as u128;
        if columns > u128::from(u32::MAX) {
            return Err(SolveError::TooLarge { what: "slots", found: columns, limit: u32::MAX.into() });
        }
        let experts = self.experts;
        self.move_columns(slots, |column| column / experts * slots + column % experts);
        Ok(self)
    }
}

/// Converts a placement [L, S] of experts and empty slots to slots: \[S/G\] per group, experts in ascending order, then
/// -1.
pub(crate) fn padded_replicas(
    model: &ModelInfo,
    groups: u16,
    group_of: impl Iterator<Item = Vec<u16>>,
) -> Result<Replicas, FormatError> {
    let slots = padded_slots(model.num_experts, groups);
    let mut logical = Vec::with_capacity(model.layers() * slots);
    for layer in group_of {
        for group in 0..groups {
            let held = (0..model.num_experts).zip(&layer).filter(|(_, of)| **of == group);
            let first = logical.len();
            logical.extend(held.map(|(expert, _)| i32::from(expert)));
            logical.resize((first + slots / usize::from(groups)).max(logical.len()), -1);
        }
    }
    Replicas::new(model, groups, slots, logical)
}

/// Extends one layer of a placement to \[S\] by assigning the empty slots to groups with room.
pub(crate) fn with_empty_slots(layer: &[u16], slots: usize, groups: u16) -> Vec<u16> {
    let mut all = layer.to_vec();
    for group in 0..groups {
        let held = layer.iter().filter(|of| **of == group).count();
        all.extend(std::iter::repeat_n(group, (slots / usize::from(groups)).saturating_sub(held)));
    }
    all
}

/// Assigns experts in contiguous blocks, or expert e to group e mod G. As in vLLM, the first N mod G groups have one
/// extra expert.
pub(crate) fn uneven(experts: u16, groups: u16, round_robin: bool) -> Vec<u16> {
    if round_robin {
        return (0..experts).map(|expert| expert % groups).collect();
    }
    let (each, more) = (experts / groups, experts % groups);
    let held = |group: u16| usize::from(each + u16::from(group < more));
    (0..groups).flat_map(|group| std::iter::repeat_n(group, held(group))).collect()
}

/// Whether each expert has exactly one slot, so that the remaining slots are padding.
pub(crate) fn once_each(slots: &Replicas, placement: &Placement) -> bool {
    let filled = |layer| slots.layer(layer).iter().filter(|expert| **expert >= 0).count();
    LayerIdx::all(placement.layers()).all(|layer| filled(layer) == usize::from(placement.experts()))
}
