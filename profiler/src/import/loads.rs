//! Loads of all experts, without tokens: the most that plain counts can show.

use std::path::Path;

use semmoe_tables::{ExpertId, FormatError, LayerIdx, ModelInfo, Profile, Provenance};
use serde::Serialize;

use crate::ProfilerError;
use crate::summary::LayerSummary;

/// Loads of all experts.
#[derive(Clone, Debug, Serialize)]
pub struct Loads {
    /// Always `semmoe.loads`.
    pub format: &'static str,
    /// The model.
    pub model: ModelInfo,
    /// Origin of the counts in these loads.
    pub provenance: Provenance,
    /// One per MoE layer.
    pub layers: Vec<LayerLoads>,
}

/// Loads of a layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerLoads {
    /// The model's layer number.
    pub layer_id: u16,
    /// Activations of each expert.
    pub counts: Vec<u64>,
    /// Total activations.
    pub activations: u64,
    /// The busiest expert.
    pub busiest: ExpertId,
    /// Load of the busiest expert over the mean; 1 if balanced.
    pub max_over_mean: f64,
    /// Entropy of the loads relative to balanced loads, 0..1.
    pub entropy: f64,
    /// Distance to a profile, if compared: the fraction of activations that would have to move to other experts to
    /// match it, 0 (equal) to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distance: Option<f64>,
}

impl Loads {
    pub(super) fn new(model: &ModelInfo, provenance: &Provenance, counts: Vec<Vec<u64>>) -> Self {
        let layer = |(counts, layer_id): (Vec<u64>, &u16)| {
            let LayerSummary { layer_id, activations, busiest: (busiest, _), max_over_mean, entropy } =
                LayerSummary::of(*layer_id, &counts);
            LayerLoads { layer_id, counts, activations, busiest, max_over_mean, entropy, distance: None }
        };
        let layers = counts.into_iter().zip(&model.layer_ids).map(layer).collect();
        Self { format: "semmoe.loads", model: model.clone(), provenance: provenance.clone(), layers }
    }

    /// Sets `distance` for every layer: the total variation distance between the experts' shares in these loads and in
    /// the profile.
    pub(super) fn compare(&mut self, profile: &Profile) -> Result<(), FormatError> {
        self.model.check_compatible(profile.model())?;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let theirs = profile.expert_loads(LayerIdx::new(index as u16));
            let total: u64 = theirs.iter().sum();
            layer.distance = (total > 0 && layer.activations > 0).then(|| {
                let share = |count: u64, total: u64| count as f64 / total as f64;
                let apart = layer
                    .counts
                    .iter()
                    .zip(&theirs)
                    .map(|(ours, theirs)| (share(*ours, layer.activations) - share(*theirs, total)).abs());
                apart.sum::<f64>() / 2.0
            });
        }
        Ok(())
    }

    /// Writes the loads as JSON.
    pub(super) fn write(&self, path: &Path) -> Result<(), ProfilerError> {
        let failed = |error: serde_json::Error| ProfilerError::io(path, "write")(error.into());
        let text = serde_json::to_string_pretty(self).map_err(failed)?;
        Ok(semmoe_tables::write_atomically(path, |out| out.write_all(text.as_bytes()))?)
    }
}
