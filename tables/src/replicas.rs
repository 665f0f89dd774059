//! Placements with replicas: the expert in each physical slot.

use crate::container::LayoutTensor;
use crate::placement::placement_digest;
use crate::{ExpertId, FormatError, GroupId, LayerIdx, ModelInfo, Placement};

const TENSOR: &str = "physical_to_logical";
/// The content of an empty slot.
pub(crate) const PADDING: i32 = -1;

/// `physical_to_logical`: [L, S] experts in slots, S / G slots per group, ascending within a group, -1 = padding
/// (anywhere in the group). Every expert has at least one slot, and at most one in each group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Replicas {
    groups: u16,
    experts: u16,
    slots: usize,
    /// [L, S]
    logical: Vec<i32>,
}

impl Replicas {
    /// Builds a placement from a flat [L, S] vector.
    ///
    /// # Errors
    /// Names the layer and the slot that violate a rule of [`Replicas`].
    pub fn new(model: &ModelInfo, groups: u16, slots: usize, logical: Vec<i32>) -> Result<Self, FormatError> {
        if groups == 0 || slots == 0 || !slots.is_multiple_of(usize::from(groups)) {
            return Err(FormatError::shape(TENSOR, format!("{slots} slots"), format!("a multiple of {groups} groups")));
        }
        if model.layers().checked_mul(slots) != Some(logical.len()) {
            let expected = format!("[{}, {slots}]", model.layers());
            return Err(FormatError::shape(TENSOR, format!("{} elements", logical.len()), expected));
        }
        let replicas = Replicas { groups, experts: model.num_experts, slots, logical };
        replicas.validate()?;
        Ok(replicas)
    }

    fn validate(&self) -> Result<(), FormatError> {
        let per_group = self.slots / usize::from(self.groups);
        for (layer, row) in self.logical.chunks_exact(self.slots).enumerate() {
            let mut held = vec![false; usize::from(self.experts)];
            let mut before = PADDING;
            for (slot, &expert) in row.iter().enumerate() {
                if slot.is_multiple_of(per_group) {
                    before = PADDING;
                }
                if expert == PADDING {
                    continue;
                }
                let at = || format!("layer {layer}, slot {slot}");
                let held = usize::try_from(expert).ok().and_then(|expert| held.get_mut(expert));
                let Some(held) = held else {
                    let expected = format!("-1, or experts below {}", self.experts);
                    return Err(FormatError::value(TENSOR, at(), expert, expected));
                };
                if expert <= before {
                    let expected = format!("more than {before}, the previous expert in its group");
                    return Err(FormatError::value(TENSOR, at(), expert, expected));
                }
                *held = true;
                before = expert;
            }
            if let Some(expert) = held.iter().position(|held| !held) {
                let found = format!("no slot for expert {expert}");
                return Err(FormatError::value(TENSOR, format!("layer {layer}"), found, "at least one"));
            }
        }
        Ok(())
    }

    /// Number of groups, G.
    pub fn groups(&self) -> u16 {
        self.groups
    }

    /// Number of MoE layers, L.
    pub fn layers(&self) -> usize {
        self.logical.len() / self.slots
    }

    /// S: slots per layer, over all groups.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the slots of a layer, group by group, \[S\], with -1 for padding.
    ///
    /// # Panics
    /// If the layer is out of range.
    pub fn layer(&self, layer: LayerIdx) -> &[i32] {
        &self.logical[layer.index() * self.slots..(layer.index() + 1) * self.slots]
    }

    /// Iterates over the groups that hold an expert, ascending.
    ///
    /// # Panics
    /// If the layer is out of range.
    pub fn groups_of(&self, layer: LayerIdx, expert: ExpertId) -> impl Iterator<Item = GroupId> {
        let per_group = self.slots / usize::from(self.groups);
        let slots = self.layer(layer).iter().enumerate();
        let mine = slots.filter(move |(_, held)| **held == i32::from(expert.get()));
        mine.map(move |(slot, _)| GroupId::new((slot / per_group) as u16))
    }

    /// Returns the `placement_digest`: SHA-256 over the slots and G as lower-case hex.
    pub fn digest(&self) -> String {
        placement_digest(TENSOR, &[self.layers(), self.slots], &self.logical, self.groups)
    }

    /// Chooses one group per expert, for readers without support for replicas: of the groups that hold it, the one with
    /// the fewest experts so far, the lowest one on ties. The groups may be uneven.
    pub fn primary(&self) -> Placement {
        let mut group_of = Vec::with_capacity(self.layers() * usize::from(self.experts));
        for layer in LayerIdx::all(self.layers()) {
            let mut load = vec![0u32; usize::from(self.groups)];
            for holders in self.holders(layer) {
                let first = holders.into_iter().min_by_key(|&g| (load[usize::from(g)], g)).unwrap_or(0);
                load[usize::from(first)] += 1;
                group_of.push(first);
            }
        }
        Placement::unbalanced(self.groups, self.experts, group_of)
    }

    /// Returns the placement without slots if every expert has exactly one slot and all groups hold the same number of
    /// experts.
    pub fn to_placement(&self) -> Option<Placement> {
        (self.slots == usize::from(self.experts)).then(|| self.primary())
    }

    /// Returns the groups of every expert in a layer, ascending.
    ///
    /// # Panics
    /// If the layer is out of range.
    pub fn holders(&self, layer: LayerIdx) -> Vec<Vec<u16>> {
        let per_group = self.slots / usize::from(self.groups);
        let mut holders = vec![Vec::new(); usize::from(self.experts)];
        for (slot, &expert) in self.layer(layer).iter().enumerate().filter(|(_, e)| **e != PADDING) {
            holders[expert as usize].push((slot / per_group) as u16);
        }
        holders
    }

    pub(crate) fn tensor(&self) -> LayoutTensor<'_> {
        LayoutTensor::new(TENSOR, &[self.layers(), self.slots], &self.logical)
    }
}
