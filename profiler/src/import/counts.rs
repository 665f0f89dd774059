//! Reads expert counts without tokens: `stat` dumps and EPLB's arrays.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use semmoe_tables::{Array, Arrays, ModelInfo};
use serde::Deserialize;

use crate::ProfilerError;

use super::{ContentError, ImportError, integers, layer_rows, open};

/// Size limit of JSON counts, which have only a few numbers per layer and expert.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// Counts so far.
pub(super) struct Counts<'a> {
    model: &'a ModelInfo,
    /// Sums [L][N].
    pub(super) sums: Vec<Vec<u64>>,
    pub(super) files: usize,
}

/// The JSON format, which SGLang reads as well.
#[derive(Deserialize)]
struct Json {
    logical_count: Vec<Vec<u64>>,
}

impl<'a> Counts<'a> {
    pub(super) fn new(model: &'a ModelInfo) -> Self {
        Self { model, sums: vec![vec![0; usize::from(model.num_experts)]; model.layers()], files: 0 }
    }

    /// Adds a file of counts, either JSON or arrays.
    pub(super) fn add_file(&mut self, path: &Path) -> Result<(), ProfilerError> {
        if path.extension().is_some_and(|extension| extension == "json") {
            return Ok(self.add_json(path).map_err(ImportError::content(path))?);
        }
        self.add_arrays(path, &open(path)?)
    }

    /// Adds the array `logical_count`, or the file's only array.
    pub(super) fn add_arrays(&mut self, path: &Path, arrays: &Arrays) -> Result<(), ProfilerError> {
        let counts = match integers(arrays, "logical_count") {
            Ok(None) => integers(arrays, "array"),
            found => found,
        };
        let counts = counts.and_then(|found| found.ok_or(ContentError::Missing("array `logical_count`".into())));
        Ok(counts.and_then(|counts| self.add(&counts)).map_err(ImportError::content(path))?)
    }

    /// Adds an array of shape [layers, experts] or [steps, layers, experts].
    fn add(&mut self, array: &Array<'_>) -> Result<(), ContentError> {
        let experts = u64::from(self.model.num_experts);
        let (steps, layers) = match *array.shape() {
            [layers, width] if width == experts => (None, layers),
            [steps, layers, width] if width == experts => (Some(steps as usize), layers),
            _ => {
                let expected = format!("[layers, {experts}] or [steps, layers, {experts}]");
                return Err(ContentError::unexpected(format!("counts of shape {:?}", array.shape()), expected));
            }
        };
        let rows = layer_rows("counts of", self.model, layers)?;
        for step in 0..steps.unwrap_or(1) {
            for (layer, row) in rows.iter().enumerate() {
                for expert in 0..experts as usize {
                    let found =
                        if steps.is_some() { array.int(&[step, *row, expert]) } else { array.int(&[*row, expert]) };
                    let count = found.and_then(|count| u64::try_from(count).ok());
                    let count = count.ok_or_else(|| {
                        let found = found.map_or("a larger number".to_owned(), |found| found.to_string());
                        let found = format!("{found} at step {step}, layer {row}, expert {expert}");
                        ContentError::unexpected(found, format!("counts from 0 to {}", i64::MAX))
                    })?;
                    self.count(layer, expert, count)?;
                }
            }
        }
        self.files += 1;
        Ok(())
    }

    fn add_json(&mut self, path: &Path) -> Result<(), ContentError> {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        if length > MAX_JSON_BYTES {
            return Err(ContentError::unexpected(format!("{length} bytes"), format!("at most {MAX_JSON_BYTES}")));
        }
        // Reads through `take`, because devices report no length and files may grow.
        let json: Json = serde_json::from_str(&std::io::read_to_string(file.take(MAX_JSON_BYTES))?)?;
        let rows = layer_rows("counts of", self.model, json.logical_count.len() as u64)?;
        for (layer, row) in rows.into_iter().enumerate() {
            let counts = &json.logical_count[row];
            if counts.len() != usize::from(self.model.num_experts) {
                let found = format!("{} counts in layer {row}", counts.len());
                return Err(ContentError::unexpected(found, self.model.num_experts.to_string()));
            }
            counts.iter().enumerate().try_for_each(|(expert, count)| self.count(layer, expert, *count))?;
        }
        self.files += 1;
        Ok(())
    }

    fn count(&mut self, layer: usize, expert: usize, count: u64) -> Result<(), ContentError> {
        let sum = &mut self.sums[layer][expert];
        *sum = sum.checked_add(count).ok_or(ContentError::Overflow { expert })?;
        Ok(())
    }
}
