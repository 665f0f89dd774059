//! Exports placements from tables as text and arrays, in the formats that engines read.
//!
//! | form | reader |
//! |---|---|
//! | [`sglang`] | `--init-expert-location` of unmodified SGLang |
//! | [`Eplb`] | the three arrays of DeepSeek's EPLB |
//! | [`tensorrt_llm`] | `moe_config.load_balancer` of TensorRT-LLM |
//! | [`ascend`] | `eplb_config.expert_map_path` of vLLM-Ascend |
//! | [`vllm`] | `eplb_config.initial_expert_map_path` of vLLM, which no release has yet (pull request 49572) |
//!
//! [`read_sglang`] reads the first of these formats.
//!
//! There are P physical slots per layer; slot p is on rank p / (P / G) in all formats, which is the slot order of
//! tables. No reader supports empty slots, so padding is an error. Equal tables give equal text.

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

/// The only key of SGLang's JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpertLocation {
    physical_to_logical_map: Vec<Vec<i32>>,
}

/// Exports `{"physical_to_logical_map": [[...]]}`: one row of P columns for each of the model's layers, including dense
/// ones. A dense layer gets SGLang's default row: slot p holds expert p modulo N.
///
/// # Errors
/// If the tables do not specify the model's number of layers, or a slot is padding.
pub fn sglang(tables: &Tables) -> Result<String, FormatError> {
    let model = tables.model();
    if model.num_hidden_layers == 0 {
        let expected = "the model's number of layers: SGLang requires a row for each, including dense ones";
        return Err(FormatError::field("num_hidden_layers", "unknown", expected));
    }
    let experts = usize::from(model.num_experts);
    // Cannot wrap, because the value is below N, which is below 65535.
    let trivial: Vec<i32> = (0..tables.slots_per_layer()).map(|slot| (slot % experts) as i32).collect();
    let mut rows = vec![trivial; usize::from(model.num_hidden_layers)];
    for (layer, row) in model.layer_ids.iter().zip(filled_rows(tables, "SGLang")?) {
        // In range: layer ids are below the number of layers.
        rows[usize::from(*layer)] = row;
    }
    Ok(line(&ExpertLocation { physical_to_logical_map: rows }))
}

/// Exports a JSON list of P experts for each MoE layer.
///
/// # Errors
/// If a slot is padding.
pub fn vllm(tables: &Tables) -> Result<String, FormatError> {
    Ok(line(&filled_rows(tables, "vLLM")?))
}

/// Exports YAML with `num_slots` P, `initial_global_assignments` (a list of P experts for each MoE layer, keyed by its
/// number among all layers of the model), and `layer_updates_per_iter: 0`, so that TensorRT-LLM does not move experts.
///
/// # Errors
/// If a slot is padding.
pub fn tensorrt_llm(tables: &Tables) -> Result<String, FormatError> {
    let mut text = format!("num_slots: {}\ninitial_global_assignments:\n", tables.slots_per_layer());
    for (layer, row) in tables.model().layer_ids.iter().zip(filled_rows(tables, "TensorRT-LLM")?) {
        let experts: Vec<String> = row.iter().map(i32::to_string).collect();
        text += &format!("  {layer}: [{}]\n", experts.join(", "));
    }
    Ok(text + "layer_updates_per_iter: 0\n")
}

/// Exports `{"moe_layer_count", "layer_list": [{"layer_id", "device_count", "device_list": [{"device_id",
/// "device_expert"}]}]}`, with MoE layers numbered from 0 and groups as devices.
///
/// # Errors
/// If a slot is padding.
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

/// Writes exported text to a file atomically.
///
/// # Errors
/// [`FormatError::Io`] names the path.
pub fn write(text: &str, path: &Path) -> Result<(), FormatError> {
    write_atomically(path, |out| out.write_all(text.as_bytes()))
}

/// Returns the slots of every MoE layer; padding is an error.
fn filled_rows(tables: &Tables, reader: &str) -> Result<Vec<Vec<i32>>, FormatError> {
    let rows: Vec<Vec<i32>> = LayerIdx::all(tables.model().layers()).map(|layer| tables.slots(layer)).collect();
    for (layer, row) in rows.iter().enumerate() {
        if let Some(slot) = row.iter().position(|&expert| expert == PADDING) {
            let expected = format!("an expert: {reader} does not support empty slots");
            let at = format!("layer {layer}, slot {slot}");
            return Err(FormatError::value("physical_to_logical", at, PADDING, expected));
        }
    }
    Ok(rows)
}

/// Serializes to one line. Cannot fail for structs and lists of integers.
fn line(value: &impl Serialize) -> String {
    let mut text = serde_json::to_string(value).expect("lists of integers are JSON");
    text.push('\n');
    text
}
