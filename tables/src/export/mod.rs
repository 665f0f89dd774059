//! Placements in the forms that engines read. Pure: tables in, text and arrays out.
//!
//! | form | reader |
//! |---|---|
//! | [`sglang`] | `--init-expert-location` of unmodified SGLang |
//! | [`Eplb`] | the three arrays of DeepSeek's EPLB |
//! | [`tensorrt_llm`] | `moe_config.load_balancer` of TensorRT-LLM |
//! | [`ascend`] | `eplb_config.expert_map_path` of vLLM-Ascend |
//! | [`vllm`] | `eplb_config.initial_expert_map_path` of vLLM, which no release has yet (pull request 49572) |
//!
//! [`read_sglang`] is the way back.
//!
//! P physical slots per layer; slot p is on rank p / (P / G) in all of them, which is the order of the slots in tables.
//! No reader knows slots without an expert, so padding is an error here. Equal tables give equal text.

mod eplb;
mod flags;
mod read;

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use eplb::Eplb;
pub use flags::{SglangSpelling, ascend_flags, sglang_flags, tensorrt_llm_options, vllm_flags};
pub use read::read_sglang;

use crate::container::write_atomically;
use crate::replicas::PADDING;
use crate::{FormatError, LayerIdx, Tables};

/// SGLang's JSON has this key and no other.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpertLocation {
    physical_to_logical_map: Vec<Vec<i32>>,
}

/// `{"physical_to_logical_map": [[...]]}`: a row for each of the model's layers, dense ones included, P columns. A
/// dense layer's row is SGLang's own trivial one: slot p holds expert p modulo N.
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
    let trivial: Vec<i32> = (0..tables.slots_per_layer()).map(|slot| (slot % experts) as i32).collect();
    let mut rows = vec![trivial; usize::from(model.num_hidden_layers)];
    for (layer, row) in model.layer_ids.iter().zip(filled_rows(tables, "SGLang")?) {
        // Layer ids are below the number of layers.
        rows[usize::from(*layer)] = row;
    }
    Ok(line(&ExpertLocation { physical_to_logical_map: rows }))
}

/// A JSON list of P experts for each MoE layer.
///
/// # Errors
/// When a slot is padding.
pub fn vllm(tables: &Tables) -> Result<String, FormatError> {
    Ok(line(&filled_rows(tables, "vLLM")?))
}

/// YAML with `num_slots` P, `initial_global_assignments`, a list of P experts under the number of each layer with
/// experts (counted among all of the model's layers), and `layer_updates_per_iter: 0`, so that TensorRT-LLM moves
/// nothing.
///
/// # Errors
/// When a slot is padding.
pub fn tensorrt_llm(tables: &Tables) -> Result<String, FormatError> {
    let mut text = format!("num_slots: {}\ninitial_global_assignments:\n", tables.slots_per_layer());
    for (layer, row) in tables.model().layer_ids.iter().zip(filled_rows(tables, "TensorRT-LLM")?) {
        let experts: Vec<String> = row.iter().map(i32::to_string).collect();
        text += &format!("  {layer}: [{}]\n", experts.join(", "));
    }
    Ok(text + "layer_updates_per_iter: 0\n")
}

/// `{"moe_layer_count", "layer_list": [{"layer_id", "device_count", "device_list": [{"device_id",
/// "device_expert"}]}]}`: layers are those with experts, numbered from 0, devices are groups.
///
/// # Errors
/// When a slot is padding.
pub fn ascend(tables: &Tables) -> Result<String, FormatError> {
    let (groups, rows) = (tables.groups(), filled_rows(tables, "vLLM-Ascend")?);
    let each = tables.slots_per_layer() / usize::from(groups);
    let device = |(rank, experts): (usize, &[i32])| json!({ "device_id": rank, "device_expert": experts });
    let layer = |(at, row): (usize, &Vec<i32>)| {
        let devices: Vec<Value> = row.chunks_exact(each).enumerate().map(device).collect();
        json!({ "layer_id": at, "device_count": groups, "device_list": devices })
    };
    let layers: Vec<Value> = rows.iter().enumerate().map(layer).collect();
    Ok(line(&json!({ "moe_layer_count": layers.len(), "layer_list": layers })))
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
    let rows: Vec<Vec<i32>> = LayerIdx::all(tables.model().layers()).map(|layer| tables.slots(layer)).collect();
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
fn line(value: &impl Serialize) -> String {
    let mut text = serde_json::to_string(value).expect("lists of integers are JSON");
    text.push('\n');
    text
}
