//! Decides how each tensor moves and checks that the checkpoint contains all of them, using only names and shapes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::family::{Experts, Family, Part, split_layer};
use super::permutation::LayerPermutation;
use super::source::Source;
use super::{Permutation, PermuteError};
use crate::container::{ForeignTensor, INDEX};

/// Determines how the names and rows of a checkpoint move.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) family: &'static Family,
    pub(super) permutation: &'a Permutation,
    pub(super) hidden_layers: u16,
}

/// How a tensor moves.
#[derive(Debug)]
pub(super) enum Move<'p> {
    /// Name and bytes stay the same.
    Stay,
    /// The bytes stay the same; the name changes to this one.
    Rename(String),
    /// The name stays the same; row p becomes the old row pi(p).
    Rows(&'p LayerPermutation),
}

/// A layer's tensors, keyed by the part of the name after the layer's (and expert's) number.
#[derive(Default)]
struct Layer<'s> {
    /// Tensors whose dimension 0 is the expert.
    rows: BTreeMap<&'s str, Found<'s>>,
    /// Keyed by leaf, then expert.
    experts: BTreeMap<&'s str, BTreeMap<u16, Found<'s>>>,
}

#[derive(Clone, Copy)]
struct Found<'s> {
    name: &'s str,
    shard: usize,
    tensor: &'s ForeignTensor,
}

impl Found<'_> {
    fn form(&self) -> String {
        format!("{} {:?}", self.tensor.dtype, self.tensor.shape)
    }
}

impl<'p> Plan<'p> {
    /// Returns the move of a tensor in a checked checkpoint.
    pub(super) fn movement(&self, name: &str) -> Move<'p> {
        let Some((layer, rest)) = split_layer(name) else { return Move::Stay };
        let Some(permutation) = self.permutation.layers.get(&layer) else { return Move::Stay };
        match self.family.part(rest) {
            Part::Rows => Move::Rows(permutation),
            Part::Expert { expert, leaf } => {
                // In range: the check rejected larger expert numbers.
                let slot = permutation.slot.get(usize::from(expert)).copied().unwrap_or(expert);
                Move::Rename(self.family.expert_name(layer, slot, leaf))
            }
            Part::Unknown | Part::Other => Move::Stay,
        }
    }

    /// Returns the name of a tensor in the permuted checkpoint.
    pub(super) fn new_name(&self, name: &str) -> String {
        match self.movement(name) {
            Move::Rename(new) => new,
            Move::Stay | Move::Rows(_) => name.to_owned(),
        }
    }

    /// Checks that every layer of the permutation has a router and all experts, with equal tensors, types and shapes,
    /// and that no other layer of the main model has experts. Returns the layers beyond the main model (for speculative
    /// decoding), whose experts stay in place.
    pub(super) fn check(&self, source: &Source) -> Result<Vec<u16>, PermuteError> {
        let mut layers: BTreeMap<u16, Layer<'_>> = BTreeMap::new();
        let mut beyond = Vec::new();
        for (name, &shard) in &source.shard_of {
            let Some((layer, rest)) = split_layer(name) else { continue };
            let part = self.family.part(rest);
            if part == Part::Other {
                continue;
            }
            if layer >= self.hidden_layers {
                beyond.push(layer);
                continue;
            }
            let found = Found { name, shard, tensor: &source.shards[shard].file.tensors[name] };
            if !self.permutation.layers.contains_key(&layer) {
                return Err(unexpected(source, found, "no experts in a layer that the tables do not place".to_owned()));
            }
            let entry = layers.entry(layer).or_default();
            match part {
                Part::Expert { expert, leaf } => drop(entry.experts.entry(leaf).or_default().insert(expert, found)),
                Part::Rows => drop(entry.rows.insert(rest, found)),
                Part::Unknown | Part::Other => return Err(unexpected(source, found, self.known_names(layer))),
            }
        }
        for &layer in self.permutation.layers.keys() {
            self.check_layer(source, layer, &layers.remove(&layer).unwrap_or_default())?;
        }
        beyond.sort_unstable();
        beyond.dedup();
        Ok(beyond)
    }

    fn known_names(&self, layer: u16) -> String {
        let leaf = match self.family.experts {
            Experts::Each(projections) => format!("{{{}}}.weight", projections.join(",")),
            Experts::Stacked { projections, .. } => format!("{{{}}}", projections.join(",")),
        };
        format!("names such as {}", self.family.expert_name(layer, 0, &leaf))
    }

    fn check_layer(&self, source: &Source, layer: u16, found: &Layer<'_>) -> Result<(), PermuteError> {
        let missing = |name: String| PermuteError::missing(&whole(source), name);
        for leaf in self.family.router {
            let name = self.family.router_name(layer, leaf);
            if !found.rows.values().any(|row| row.name == name) {
                return Err(missing(name));
            }
        }
        let experts = u64::from(self.permutation.experts);
        for row in found.rows.values() {
            let whole_bytes = (row.tensor.len() as u64).is_multiple_of(experts);
            if row.tensor.shape.first() != Some(&experts) || !whole_bytes {
                return Err(wrong_shape(source, *row, format!("a tensor with {experts} rows, one for each expert")));
            }
        }
        match self.family.experts {
            Experts::Each(projections) => {
                for projection in projections {
                    let has = |leaf: &&str| leaf.split_once('.').is_some_and(|(of, _)| of == *projection);
                    if !found.experts.keys().any(has) {
                        return Err(missing(self.family.expert_name(layer, 0, &format!("{projection}.weight"))));
                    }
                }
                found.experts.iter().try_for_each(|(leaf, of)| self.check_experts(source, layer, leaf, of))
            }
            Experts::Stacked { projections, endings } => {
                projections.iter().try_for_each(|projection| {
                    let name = |ending: &str| self.family.expert_name(layer, 0, &format!("{projection}{ending}"));
                    let has = |ending: &str| found.rows.values().any(|row| row.name == name(ending));
                    // The set of endings whose first tensor is present (otherwise the first set) must be complete.
                    let set = endings.iter().find(|set| has(set[0])).or(endings.first());
                    let lacks = set.and_then(|set| set.iter().find(|ending| !has(ending)));
                    lacks.map_or(Ok(()), |ending| Err(missing(name(ending))))
                })
            }
        }
    }

    /// Checks that every expert has this tensor, with the same type and shape.
    fn check_experts(
        &self,
        source: &Source,
        layer: u16,
        leaf: &str,
        of: &BTreeMap<u16, Found<'_>>,
    ) -> Result<(), PermuteError> {
        let experts = self.permutation.experts;
        if let Some((_, beyond)) = of.range(experts..).next() {
            return Err(unexpected(source, *beyond, format!("experts below {experts}")));
        }
        if let Some(absent) = (0..experts).find(|expert| !of.contains_key(expert)) {
            return Err(PermuteError::missing(&whole(source), self.family.expert_name(layer, absent, leaf)));
        }
        let first = &of[&0];
        match of.values().find(|other| other.form() != first.form()) {
            None => Ok(()),
            Some(other) => Err(wrong_shape(source, *other, format!("{}, as {}", first.form(), first.name))),
        }
    }
}

/// Returns the path to report for a tensor that no file contains.
fn whole(source: &Source) -> PathBuf {
    match &source.index {
        Some(_) => source.dir.join(INDEX),
        None => source.dir.join(&source.shards[0].name),
    }
}

fn unexpected(source: &Source, found: Found<'_>, expected: String) -> PermuteError {
    PermuteError::UnexpectedTensor { path: source.shard_path(found.shard), tensor: found.name.to_owned(), expected }
}

fn wrong_shape(source: &Source, found: Found<'_>, expected: String) -> PermuteError {
    PermuteError::Shape {
        path: source.shard_path(found.shard),
        tensor: found.name.to_owned(),
        found: found.form(),
        expected,
    }
}
