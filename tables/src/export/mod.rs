//! Placements in the forms that engines read. Pure: tables in, text and arrays out.
//!
//! | form | reader |
//! |---|---|
//! | [`sglang`] | `--init-expert-location` of unmodified SGLang |
//! | [`Eplb`] | the three arrays of DeepSeek's EPLB |
//! | [`vllm`] | `eplb_config.initial_expert_map_path` of vLLM, which no release has yet (pull request 49572) |
//!
//! [`read_sglang`] is the way back.
//!
//! P physical slots per layer; slot p is on rank p / (P / G) in all of them, which is the order of the slots in tables. No
//! reader knows slots without an expert, so padding is an error here. Equal tables give equal text.

mod eplb;
mod flags;
mod read;

use std::path::Path;

use serde::Serialize;

pub use eplb::Eplb;
pub use flags::{SglangSpelling, sglang_flags, vllm_flags};
pub use read::read_sglang;

use crate::container::write_atomically;
use crate::slots::{PADDING, layers, slots, slots_per_layer};
use crate::{FormatError, Tables};

/// SGLang's JSON has this key and no other.
#[derive(Serialize)]
struct ExpertLocation {
    physical_to_logical_map: Vec<Vec<i32>>,
}

/// `{"physical_to_logical_map": [[...]]}`: a row for each of the model's layers, dense ones included, P columns. A dense layer's
/// row is SGLang's own trivial one: slot p holds expert p modulo N.
///
/// # Errors
/// When the tables do not say how many layers the model has, or a slot is padding.
pub fn sglang(tables: &Tables) -> Result<String, FormatError> {
    let model = tables.model();
    if model.num_hidden_layers == 0 {
        let expected = "the model's number of layers: SGLang wants a row for each, dense ones included";
        return Err(FormatError::field("num_hidden_layers", "unknown", expected));
    }
    let experts = usize::from(model.num_experts);
    // Below N, which is below 65535.
    let trivial: Vec<i32> = (0..slots_per_layer(tables)).map(|slot| (slot % experts) as i32).collect();
    let mut rows = vec![trivial; usize::from(model.num_hidden_layers)];
    for (layer, row) in model.layer_ids.iter().zip(filled_rows(tables, "SGLang")?) {
        // Layer ids are below the number of layers.
        rows[usize::from(*layer)] = row;
    }
    Ok(json(&ExpertLocation { physical_to_logical_map: rows }))
}

/// A JSON list of P experts for each MoE layer.
///
/// # Errors
/// When a slot is padding.
pub fn vllm(tables: &Tables) -> Result<String, FormatError> {
    Ok(json(&filled_rows(tables, "vLLM")?))
}

/// Writes an exported text to a file (temporary, flushed, renamed).
///
/// # Errors
/// [`FormatError::Io`] names the path.
pub fn write(text: &str, path: &Path) -> Result<(), FormatError> {
    write_atomically(path, |out| out.write_all(text.as_bytes()))
}

/// The slots of every MoE layer, none of them padding.
fn filled_rows(tables: &Tables, reader: &str) -> Result<Vec<Vec<i32>>, FormatError> {
    let rows: Vec<Vec<i32>> = layers(tables).map(|layer| slots(tables, layer)).collect();
    for (layer, row) in rows.iter().enumerate() {
        if let Some(slot) = row.iter().position(|&expert| expert == PADDING) {
            let expected = format!("an expert: {reader} has no slots without one");
            let at = format!("layer {layer}, slot {slot}");
            return Err(FormatError::value("physical_to_logical", at, PADDING, expected));
        }
    }
    Ok(rows)
}

/// One line. Structs and lists of integers always can be written.
fn json(value: &impl Serialize) -> String {
    let mut text = serde_json::to_string(value).expect("lists of integers are JSON");
    text.push('\n');
    text
}
