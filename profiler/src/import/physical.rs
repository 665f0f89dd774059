//! Maps physical experts back to logical experts, using the map in the dump.

use semmoe_tables::{Arrays, ModelInfo};

use super::{ContentError, integers, layer_rows};

const NAME: &str = "last_physical_to_logical_map";

/// The array `last_physical_to_logical_map`: the logical expert in every slot of the MoE layers.
pub(super) struct PhysicalMap {
    /// Logical expert of each slot, [L][slots].
    layers: Vec<Vec<u16>>,
    /// Number of slots per layer.
    pub(super) slots: u64,
    /// The dump's row for each MoE layer.
    pub(super) rows: Vec<usize>,
    /// Number of layers in the dump, including dense ones.
    pub(super) depth: u64,
}

impl PhysicalMap {
    /// Reads the map, which must contain all of the model's experts and no others.
    pub(super) fn of(arrays: &Arrays, model: &ModelInfo) -> Result<Self, ContentError> {
        let array = integers(arrays, NAME)?.ok_or(ContentError::Missing(format!("`{NAME}`")))?;
        let &[depth, slots] = array.shape() else {
            return Err(ContentError::shape(NAME, array.shape(), "[layers, slots]"));
        };
        let rows = layer_rows(&format!("{NAME} has"), model, depth)?;
        let experts = model.num_experts;
        let layer = |row: &usize| -> Result<Vec<u16>, ContentError> {
            let mut seen = vec![false; usize::from(experts)];
            let mut layer = Vec::with_capacity(slots as usize);
            for slot in 0..slots as usize {
                let found = array.int(&[*row, slot]);
                let logical = found.and_then(|id| u16::try_from(id).ok()).filter(|id| *id < experts);
                let logical = logical.ok_or_else(|| {
                    let found = found.map_or("no integer".to_owned(), |id| id.to_string());
                    let found = format!("{NAME} contains {found} at layer {row}, slot {slot}");
                    ContentError::unexpected(found, format!("experts below {experts}"))
                })?;
                seen[usize::from(logical)] = true;
                layer.push(logical);
            }
            match seen.iter().position(|seen| !seen) {
                None => Ok(layer),
                Some(missing) => Err(ContentError::unexpected(
                    format!("{NAME} has no slot for expert {missing} of layer {row}"),
                    format!("all {experts} of the model"),
                )),
            }
        };
        Ok(Self { layers: rows.iter().map(layer).collect::<Result<_, _>>()?, slots, rows, depth })
    }

    /// Returns the logical expert in a slot of the `layer`-th MoE layer.
    pub(super) fn logical(&self, layer: usize, slot: i64) -> Option<u16> {
        let slot = usize::try_from(slot).ok()?;
        self.layers[layer].get(slot).copied()
    }
}
