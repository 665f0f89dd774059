//! Where `/server_info` shows the deployed placement: `init_expert_location`, SGLang's argument of that name.

use semmoe_tables::{Tables, export};
use serde::Deserialize;

use super::ServerInfo;

/// A placement that runs, as far as an engine shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShownPlacement {
    /// Experts in order, slot p holds expert p modulo the number of experts.
    Trivial,
    /// Inline JSON: the expert in each physical slot, per layer of the model.
    Map(Vec<Vec<i32>>),
}

/// How a shown placement differs from tables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementDifference {
    /// Other shapes.
    #[error("it has {found} {what}, the tables have {expected}")]
    Shape {
        /// Layers or slots.
        what: &'static str,
        /// The engine's.
        found: usize,
        /// The tables'.
        expected: usize,
    },
    /// Other experts on a group of a layer.
    #[error("group {group} of layer {layer} holds experts {found:?}, the tables say {expected:?}")]
    Experts {
        /// The model's layer.
        layer: usize,
        /// The EP rank.
        group: usize,
        /// The engine's, ascending (the first 8).
        found: Vec<i32>,
        /// The tables', ascending (the first 8).
        expected: Vec<i32>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpertLocation {
    physical_to_logical_map: Vec<Vec<i32>>,
}

impl ServerInfo {
    /// The placement, where it shows. A path shows nothing, nor do counts from which the engine makes a placement
    /// itself.
    pub fn shown_placement(&self) -> Option<ShownPlacement> {
        match self.init_expert_location.as_deref()?.trim() {
            "trivial" => Some(ShownPlacement::Trivial),
            inline if inline.starts_with('{') => serde_json::from_str::<ExpertLocation>(inline)
                .ok()
                .map(|location| ShownPlacement::Map(location.physical_to_logical_map)),
            _ => None,
        }
    }
}

impl ShownPlacement {
    /// Compares the groups' experts in every MoE layer; the order of slots inside a group does not matter. Tables that
    /// SGLang cannot be given (padding, unknown layers) are not compared.
    ///
    /// # Errors
    /// `PlacementDifference`: the first slot that differs.
    pub fn check(&self, tables: &Tables) -> Result<(), PlacementDifference> {
        let expected = export::sglang(tables).ok().and_then(|text| serde_json::from_str::<ExpertLocation>(&text).ok());
        let Some(ExpertLocation { physical_to_logical_map: expected }) = expected else { return Ok(()) };
        let experts = tables.placement().experts().max(1);
        let trivial = |row: &Vec<i32>| (0..row.len()).map(|slot| (slot % usize::from(experts)) as i32).collect();
        let found = match self {
            Self::Trivial => expected.iter().map(trivial).collect(),
            Self::Map(rows) => rows.clone(),
        };
        same("layers", found.len(), expected.len())?;
        for layer in tables.model().layer_ids.iter().map(|layer| usize::from(*layer)) {
            let (Some(found), Some(expected)) = (found.get(layer), expected.get(layer)) else { continue };
            same("slots in a layer", found.len(), expected.len())?;
            let slots = (expected.len() / usize::from(tables.groups().max(1))).max(1);
            for (group, (found, expected)) in found.chunks(slots).zip(expected.chunks(slots)).enumerate() {
                let (found, expected) = (sorted(found), sorted(expected));
                if found != expected {
                    let first = |experts: Vec<i32>| experts.into_iter().take(8).collect();
                    let (found, expected) = (first(found), first(expected));
                    return Err(PlacementDifference::Experts { layer, group, found, expected });
                }
            }
        }
        Ok(())
    }
}

fn same(what: &'static str, found: usize, expected: usize) -> Result<(), PlacementDifference> {
    if found == expected { Ok(()) } else { Err(PlacementDifference::Shape { what, found, expected }) }
}

fn sorted(experts: &[i32]) -> Vec<i32> {
    let mut experts = experts.to_vec();
    experts.sort_unstable();
    experts
}
