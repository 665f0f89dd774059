//! Maps physical experts back to logical ones, using the map in the dump.

use semmoe_tables::{Arrays, ModelInfo};

use super::{integers, layer_rows};

const NAME: &str = "last_physical_to_logical_map";

/// `last_physical_to_logical_map`: the logical expert in every slot, for the MoE layers.
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
    /// Reads the map, which must contain exactly the model's experts.
    pub(super) fn of(arrays: &Arrays, model: &ModelInfo) -> Result<Self, String> {
        let array = integers(arrays, NAME)?.ok_or_else(|| format!("there is no `{NAME}`"))?;
        let &[depth, slots] = array.shape() else {
            return Err(format!("{NAME} has shape {:?}, expected [layers, slots]", array.shape()));
        };
        let rows = layer_rows(model, depth).map_err(|cause| format!("{NAME} has {cause}"))?;
        let experts = model.num_experts;
        let layer = |row: &usize| -> Result<Vec<u16>, String> {
            let mut seen = vec![false; usize::from(experts)];
            let mut layer = Vec::with_capacity(slots as usize);
            for slot in 0..slots as usize {
                let found = array.int(&[*row, slot]);
                let logical = found.and_then(|id| u16::try_from(id).ok()).filter(|id| *id < experts);
                let logical = logical.ok_or_else(|| {
                    let found = found.map_or("no integer".to_owned(), |id| id.to_string());
                    format!("{NAME} holds {found} at layer {row}, slot {slot}, expected experts below {experts}")
                })?;
                seen[usize::from(logical)] = true;
                layer.push(logical);
            }
            match seen.iter().position(|seen| !seen) {
                None => Ok(layer),
                Some(missing) => Err(format!(
                    "{NAME} has no slot for expert {missing} of layer {row}, expected all {experts} of the model"
                )),
            }
        };
        Ok(Self { layers: rows.iter().map(layer).collect::<Result<_, _>>()?, slots, rows, depth })
    }

    /// The logical expert of a slot in the `layer`-th MoE layer.
    pub(super) fn logical(&self, layer: usize, slot: i64) -> Option<u16> {
        let slot = usize::try_from(slot).ok()?;
        self.layers[layer].get(slot).copied()
    }
}
