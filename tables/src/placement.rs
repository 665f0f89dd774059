//! Placements: the group that holds each expert, layer by layer (the matrix E).

use crate::container::{Digester, Element, LayoutTensor};
use crate::model::quoted;
use crate::{ExpertId, FormatError, GroupId, LayerIdx};

/// E: [L, N] -> group. Every group holds the same number of experts in every layer.
///
/// Only the placement that [`crate::Tables::placement`] derives from replicas may be uneven.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    groups: u16,
    experts: u16,
    /// [L, N]
    group_of: Vec<u16>,
}

impl Placement {
    /// Builds a placement from the group of each expert, one list per layer.
    ///
    /// # Errors
    /// If there is no layer or group, a group is out of range, layers differ in their number of experts, or groups do.
    pub fn new(groups: u16, layers: Vec<Vec<u16>>) -> Result<Self, FormatError> {
        let experts = layers.first().map_or(0, Vec::len);
        if let Some(layer) = layers.iter().position(|layer| layer.len() != experts) {
            let found = format!("{} experts in layer {layer}", layers[layer].len());
            return Err(FormatError::shape("E", found, format!("{experts}, as in layer 0")));
        }
        let experts = u16::try_from(experts)
            .map_err(|_| FormatError::shape("E", format!("{experts} experts"), "at most 65534"))?;
        Self::from_flat(groups, experts, layers.concat())
    }

    /// Builds a placement from a flat [L, N] vector.
    pub(crate) fn from_flat(groups: u16, experts: u16, group_of: Vec<u16>) -> Result<Self, FormatError> {
        if group_of.is_empty() || experts == 0 {
            return Err(FormatError::shape("E", "[0]", "at least one layer and one expert"));
        }
        check_divides(groups, experts)?;
        let mut held = vec![0u16; usize::from(groups)];
        for (layer, row) in group_of.chunks_exact(usize::from(experts)).enumerate() {
            held.fill(0);
            for (expert, &group) in row.iter().enumerate() {
                let Some(held) = held.get_mut(usize::from(group)) else {
                    let at = format!("layer {layer}, expert {expert}");
                    return Err(FormatError::value("E", at, group, format!("groups below {groups}")));
                };
                *held += 1;
            }
            let each = experts / groups;
            if let Some(group) = held.iter().position(|&n| n != each) {
                let found = format!("{} experts in group {group}", held[group]);
                let expected = format!("{each}, as in every other group");
                return Err(FormatError::value("E", format!("layer {layer}"), found, expected));
            }
        }
        Ok(Placement { groups, experts, group_of })
    }

    /// Builds the default placement of engines: experts in order, N / G in each group.
    ///
    /// # Errors
    /// If G does not divide N; the error lists the numbers that do.
    pub fn contiguous(layers: usize, experts: u16, groups: u16) -> Result<Self, FormatError> {
        check_divides(groups, experts)?;
        let each = experts / groups;
        let row: Vec<u16> = (0..experts).map(|expert| expert / each).collect();
        Self::from_flat(groups, experts, row.repeat(layers))
    }

    /// Creates a placement whose groups may hold different numbers of experts.
    pub(crate) fn unbalanced(groups: u16, experts: u16, group_of: Vec<u16>) -> Self {
        Placement { groups, experts, group_of }
    }

    /// Number of groups, G.
    pub fn groups(&self) -> u16 {
        self.groups
    }

    /// Number of MoE layers, L.
    pub fn layers(&self) -> usize {
        self.group_of.len() / usize::from(self.experts)
    }

    /// N: experts per layer.
    pub fn experts(&self) -> u16 {
        self.experts
    }

    /// Returns the group that holds an expert.
    ///
    /// # Panics
    /// If the layer or the expert is out of range.
    pub fn group_of(&self, layer: LayerIdx, expert: ExpertId) -> GroupId {
        GroupId::new(self.layer(layer)[expert.index()])
    }

    /// Returns the group of each expert of a layer, \[N\].
    ///
    /// # Panics
    /// If the layer is out of range.
    pub fn layer(&self, layer: LayerIdx) -> &[u16] {
        let n = usize::from(self.experts);
        &self.group_of[layer.index() * n..(layer.index() + 1) * n]
    }

    /// Iterates over the experts that a group holds in a layer, ascending, which is their slot order.
    ///
    /// # Panics
    /// If the layer is out of range.
    pub fn experts_of(&self, layer: LayerIdx, group: GroupId) -> impl Iterator<Item = ExpertId> {
        let held = (0..self.experts).zip(self.layer(layer));
        held.filter(move |(_, of)| **of == group.get()).map(|(expert, _)| ExpertId::new(expert))
    }

    /// Returns the `placement_digest`: SHA-256 over E and G as lower-case hex.
    pub fn digest(&self) -> String {
        placement_digest("E", &[self.layers(), usize::from(self.experts)], &self.group_of, self.groups)
    }

    pub(crate) fn tensor(&self) -> LayoutTensor<'_> {
        LayoutTensor::new("E", &[self.layers(), usize::from(self.experts)], &self.group_of)
    }
}

/// Returns the digest of the placement tensor and of the number of groups (u16 [1] named `groups`).
pub(crate) fn placement_digest<T: Element>(name: &str, shape: &[usize], elements: &[T], groups: u16) -> String {
    let mut digester = Digester::default();
    digester.tensor(name, shape, elements);
    digester.tensor("groups", &[1], &[groups]);
    digester.finish()
}

/// Checks that G divides N, so that all groups can hold the same number of experts.
fn check_divides(groups: u16, experts: u16) -> Result<(), FormatError> {
    if groups > 0 && experts.is_multiple_of(groups) && experts > 0 {
        return Ok(());
    }
    let divisors: Vec<String> = (1..=experts).filter(|d| experts.is_multiple_of(*d)).map(|d| d.to_string()).collect();
    let list = quoted(&divisors.join(", "));
    let expected = format!("a number that divides the {experts} experts: {}", list.replace('"', ""));
    Err(FormatError::field("groups", groups, expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_names_the_divisors() {
        let error = Placement::contiguous(2, 32, 5).unwrap_err().to_string();
        assert!(error.contains("1, 2, 4, 8, 16, 32"), "{error}");
        assert!(Placement::contiguous(2, 32, 0).is_err());
        assert!(Placement::contiguous(0, 32, 4).is_err());
    }

    #[test]
    fn experts_of_a_group_ascend() {
        let placement = Placement::new(2, vec![vec![0, 1, 0, 1], vec![1, 1, 0, 0]]).unwrap();
        let of = |layer, group| -> Vec<u16> {
            placement.experts_of(LayerIdx::new(layer), GroupId::new(group)).map(ExpertId::get).collect()
        };
        assert_eq!((of(0, 0), of(0, 1), of(1, 0), of(1, 1)), (vec![0, 2], vec![1, 3], vec![2, 3], vec![0, 1]));
    }

    #[test]
    fn unequal_groups_and_ragged_layers_are_refused() {
        for (layers, part) in [
            (vec![vec![0, 0, 0, 1]], "3 experts in group 0"),
            (vec![vec![0, 1, 0, 2]], "groups below 2"),
            (vec![vec![0, 1], vec![0, 1, 0, 1]], "as in layer 0"),
            (vec![], "at least one layer"),
        ] {
            let error = Placement::new(2, layers).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn the_digest_depends_on_the_placement_and_on_the_groups() {
        let a = Placement::contiguous(2, 8, 2).unwrap();
        assert_eq!(a.digest(), Placement::contiguous(2, 8, 2).unwrap().digest());
        assert_ne!(a.digest(), Placement::contiguous(2, 8, 4).unwrap().digest());
        assert_ne!(a.digest(), Placement::contiguous(1, 8, 2).unwrap().digest());
        assert_eq!(a.digest().len(), 64);
    }
}
