//! The arrays of DeepSeek's EPLB: physical-to-logical map, logical-to-physical map, and replicas per expert.

use std::path::Path;

use serde_json::json;

use super::{filled_rows, line};
use crate::container::{Layout, LayoutTensor};
use crate::replicas::PADDING;
use crate::{FormatError, Tables};

const FORMAT: &str = "semmoe.eplb";

/// `phy2log` [L, P], `log2phy` [L, N, M] and `logcnt` [L, N], where L counts MoE layers and M is the maximum number of
/// replicas of an expert.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Eplb {
    layers: usize,
    slots: usize,
    experts: usize,
    /// M: maximum number of slots of an expert.
    pub most_replicas: usize,
    placement_digest: String,
    /// The expert in each slot: [L, P].
    pub phy2log: Vec<i32>,
    /// The slots of each expert, ascending, padded with -1: [L, N, M].
    pub log2phy: Vec<i32>,
    /// The number of slots of each expert: [L, N].
    pub logcnt: Vec<i32>,
}

impl Eplb {
    /// Converts tables, with or without replicas.
    ///
    /// # Errors
    /// If a slot is padding.
    pub fn new(tables: &Tables) -> Result<Self, FormatError> {
        let rows = filled_rows(tables, "EPLB")?;
        let (layers, experts) = (rows.len(), usize::from(tables.model().num_experts));
        let mut slots_of = vec![Vec::new(); layers * experts];
        for (layer, row) in rows.iter().enumerate() {
            for (slot, &expert) in row.iter().enumerate() {
                // Padding has been rejected. The slot index fits, since files store slots as an i32 tensor.
                slots_of[layer * experts + expert as usize].push(slot as i32);
            }
        }
        let most_replicas = slots_of.iter().map(Vec::len).max().unwrap_or(0);
        let logcnt = slots_of.iter().map(|slots| slots.len() as i32).collect();
        let padded = |mut slots: Vec<i32>| {
            slots.resize(most_replicas, PADDING);
            slots
        };
        Ok(Self {
            layers,
            slots: tables.slots_per_layer(),
            experts,
            most_replicas,
            placement_digest: tables.placement_digest().to_owned(),
            phy2log: rows.concat(),
            log2phy: slots_of.into_iter().flat_map(padded).collect(),
            logcnt,
        })
    }

    /// Returns one JSON object of nested lists: `phy2log`, `log2phy`, `logcnt`.
    pub fn to_json(&self) -> String {
        let rows = |flat: &[i32], width| flat.chunks_exact(width).map(<[_]>::to_vec).collect::<Vec<_>>();
        let per_expert = rows(&self.log2phy, self.most_replicas);
        line(&json!({
            "phy2log": rows(&self.phy2log, self.slots),
            "log2phy": per_expert.chunks_exact(self.experts).collect::<Vec<_>>(),
            "logcnt": rows(&self.logcnt, self.experts),
        }))
    }

    /// Writes a safetensors file with three i32 tensors, atomically.
    ///
    /// # Errors
    /// [`FormatError::Io`] names the path.
    pub fn write_safetensors(&self, path: &Path) -> Result<(), FormatError> {
        let (layers, experts) = (self.layers, self.experts);
        let mut metadata = Layout::format(FORMAT);
        metadata.insert("placement_digest".to_owned(), self.placement_digest.clone());
        let tensors = vec![
            LayoutTensor::new("phy2log", &[layers, self.slots], &self.phy2log),
            LayoutTensor::new("log2phy", &[layers, experts, self.most_replicas], &self.log2phy),
            LayoutTensor::new("logcnt", &[layers, experts], &self.logcnt),
        ];
        Layout { metadata, tensors }.write(path).map(drop)
    }
}
