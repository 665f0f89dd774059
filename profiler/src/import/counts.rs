//! Counts of experts without tokens: `stat` dumps, EPLB's arrays.

use std::path::Path;

use semmoe_tables::{ModelInfo, Provenance};
use serde::Deserialize;

use crate::pickle::{Array, Document, NpzFile, Source, TorchFile, Value, read_npy};

use super::error::Wrong;
use super::loads::Loads;
use super::{ImportError, layer_rows};

/// JSON of counts is small: a few numbers for each layer and expert.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// Counts so far.
pub(super) struct Counts<'a> {
    model: &'a ModelInfo,
    /// [L][N].
    sums: Vec<Vec<u64>>,
    files: usize,
}

/// The form that SGLang reads too.
#[derive(Deserialize)]
struct Json {
    logical_count: Vec<Vec<u64>>,
}

impl<'a> Counts<'a> {
    pub(super) fn new(model: &'a ModelInfo) -> Self {
        Self { model, sums: vec![vec![0; usize::from(model.num_experts)]; model.layers()], files: 0 }
    }

    pub(super) fn files(&self) -> usize {
        self.files
    }

    /// Adds a file of counts, whatever its form.
    pub(super) fn add_file(&mut self, path: &Path) -> Result<(), ImportError> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        let added = match extension {
            Some("pt" | "pth") => TorchFile::open(path).map_err(Wrong::Read).and_then(|file| {
                let root = file.document().root();
                let value = file.document().get(root, "logical_count").unwrap_or(root);
                self.add_value(&file, value)
            }),
            Some("npy") => Source::open(path)
                .and_then(|source| read_npy(&source))
                .map_err(Wrong::Read)
                .and_then(|array| self.add(&array)),
            Some("npz") => NpzFile::open(path)
                .and_then(|file| file.array("logical_count"))
                .map_err(Wrong::Read)
                .and_then(|array| self.add(&array.ok_or("there is no array `logical_count`".to_owned())?)),
            Some("json") => self.add_json(path),
            _ => Err(Wrong::Content("the name has another ending, expected .pt, .npy, .npz or .json".into())),
        };
        added.map_err(|error| error.in_file(path))
    }

    /// Adds the counts of a dump.
    pub(super) fn add_tensor(&mut self, path: &Path, file: &TorchFile, value: Value) -> Result<(), ImportError> {
        self.add_value(file, value).map_err(|error| error.in_file(path))
    }

    fn add_value(&mut self, file: &TorchFile, value: Value) -> Result<(), Wrong> {
        let array = file.array(value)?;
        self.add(&array.ok_or_else(|| format!("the counts are {}, expected a tensor", Document::kind(value)))?)
    }

    /// [layers, experts], or [steps, layers, experts].
    fn add(&mut self, array: &Array) -> Result<(), Wrong> {
        let experts = u64::from(self.model.num_experts);
        let (steps, layers) = match *array.shape() {
            [layers, width] if width == experts => (None, layers),
            [steps, layers, width] if width == experts => (Some(steps as usize), layers),
            _ => {
                return Err(format!(
                    "counts of shape {:?}, expected [layers, {experts}] or [steps, layers, {experts}]",
                    array.shape()
                )
                .into());
            }
        };
        let rows = layer_rows(self.model, layers).map_err(|cause| format!("counts of {cause}"))?;
        for step in 0..steps.unwrap_or(1) {
            for (layer, row) in rows.iter().enumerate() {
                for expert in 0..experts as usize {
                    let found =
                        if steps.is_some() { array.int(&[step, *row, expert]) } else { array.int(&[*row, expert]) };
                    let count = found.and_then(|count| u64::try_from(count).ok());
                    let count = count.ok_or_else(|| {
                        format!("a count at step {step}, layer {row}, expert {expert} that is no number from 0 on")
                    })?;
                    self.count(layer, expert, count)?;
                }
            }
        }
        self.files += 1;
        Ok(())
    }

    fn add_json(&mut self, path: &Path) -> Result<(), Wrong> {
        let io = |error: std::io::Error| Wrong::Content(format!("cannot be read: {error}"));
        let length = std::fs::metadata(path).map_err(io)?.len();
        if length > MAX_JSON_BYTES {
            return Err(format!("{length} bytes, expected at most {MAX_JSON_BYTES}").into());
        }
        let text = std::fs::read_to_string(path).map_err(io)?;
        let json: Json = serde_json::from_str(&text)
            .map_err(|error| format!("{error}, expected {{\"logical_count\": [layers][experts]}}"))?;
        let rows =
            layer_rows(self.model, json.logical_count.len() as u64).map_err(|cause| format!("counts of {cause}"))?;
        for (layer, row) in rows.into_iter().enumerate() {
            let counts = &json.logical_count[row];
            if counts.len() != usize::from(self.model.num_experts) {
                return Err(
                    format!("{} counts in layer {row}, expected {}", counts.len(), self.model.num_experts).into()
                );
            }
            counts.iter().enumerate().try_for_each(|(expert, count)| self.count(layer, expert, *count))?;
        }
        self.files += 1;
        Ok(())
    }

    fn count(&mut self, layer: usize, expert: usize, count: u64) -> Result<(), String> {
        let sum = &mut self.sums[layer][expert];
        *sum =
            sum.checked_add(count).ok_or_else(|| format!("the counts of expert {expert} do not fit into 64 bits"))?;
        Ok(())
    }

    pub(super) fn finish(self, provenance: &Provenance) -> Loads {
        Loads::new(self.model, provenance, self.sums)
    }
}
