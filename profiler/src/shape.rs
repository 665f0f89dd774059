//! The model's shape from a checkpoint's `config.json`, for engines that do not report it.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use semmoe_tables::ModelInfo;
use serde_json::Value;

use crate::ProfilerError;

/// The largest published configurations have a few hundred kB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// N, as families name it.
const EXPERTS: [&str; 4] = ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"];
/// k, as families name it.
const TOP_K: [&str; 4] = ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"];

/// Reads `config.json`, or the one in a folder. The model's name is left empty: the engine reports it.
///
/// # Errors
/// Names the file and the field that is missing or of no use.
pub fn model_config(path: &Path) -> Result<ModelInfo, ProfilerError> {
    let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let failed = ProfilerError::io(&path, "read");
    let file = File::open(&path).map_err(&failed)?;
    let length = file.metadata().map_err(&failed)?.len();
    if length > MAX_CONFIG_BYTES {
        return Err(wrong(&path, format!("{length} bytes, expected at most {MAX_CONFIG_BYTES}")));
    }
    // A device has no length, and a file may grow.
    let text = std::io::read_to_string(file.take(MAX_CONFIG_BYTES)).map_err(&failed)?;
    let value: Value = serde_json::from_str(&text).map_err(|error| wrong(&path, error.to_string()))?;
    shape(&value).map_err(|cause| wrong(&path, cause))
}

fn wrong(path: &Path, found: String) -> ProfilerError {
    let found = format!("{}: {found}", path.display());
    ProfilerError::Option { option: "model-config", found, expected: "a checkpoint's config.json" }
}

fn shape(config: &Value) -> Result<ModelInfo, String> {
    // Models that see have the part that speaks inside.
    let config = if config["text_config"].is_object() { &config["text_config"] } else { config };
    let one_of = |names: [&'static str; 4]| {
        let found = names.into_iter().find(|name| !config[*name].is_null());
        found.ok_or_else(|| format!("none of {} is there", names.join(", ")))
    };
    let experts = one_of(EXPERTS)?;
    let layers = number(config, "num_hidden_layers")?;
    Ok(ModelInfo {
        model: String::new(),
        tokenizer_sha256: None,
        num_experts: number(config, experts)?,
        top_k: number(config, one_of(TOP_K)?)?,
        vocab_size: number(config, "vocab_size")?,
        num_hidden_layers: layers,
        layer_ids: moe_layers(config, layers)?,
    })
}

/// Layers with experts: all but those that a family's own keys say are dense.
fn moe_layers(config: &Value, layers: u16) -> Result<Vec<u16>, String> {
    let or = |name: &str, default: u16| if config[name].is_null() { Ok(default) } else { number(config, name) };
    // Some say it layer by layer: 1 has experts.
    if let Some(list) = config["moe_layer_freq"].as_array() {
        let sparse = list.iter().map(Value::as_u64).enumerate().filter(|(_, sparse)| *sparse == Some(1));
        return Ok(sparse.filter_map(|(layer, _)| u16::try_from(layer).ok()).filter(|layer| *layer < layers).collect());
    }
    // DeepSeek: the first k are dense, and then every f-th is not. Qwen: every s-th is not, counted from 1, but for
    // some.
    let (first, frequency) = (or("first_k_dense_replace", 0)?, or("moe_layer_freq", 1)?.max(1));
    let step = or("decoder_sparse_step", 1)?.max(1);
    let dense: Vec<u64> =
        config["mlp_only_layers"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    let sparse = |layer: &u16| {
        *layer >= first
            && layer.is_multiple_of(frequency)
            && (u32::from(*layer) + 1).is_multiple_of(step.into())
            && !dense.contains(&u64::from(*layer))
    };
    Ok((0..layers).filter(sparse).collect())
}

fn number<T: TryFrom<u64>>(config: &Value, name: &str) -> Result<T, String> {
    let found = config[name].as_u64().and_then(|number| T::try_from(number).ok());
    found.ok_or_else(|| {
        let found: String = config[name].to_string().chars().take(100).collect();
        format!("{name} is {found}, expected a number in range")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn families_say_it_in_their_own_words() {
        let base =
            |experts: &str| json!({ experts: 8, "num_experts_per_tok": 2, "vocab_size": 100, "num_hidden_layers": 6 });
        let with = |mut config: Value, keys: Value| {
            config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            shape(&config).map(|model| model.layer_ids)
        };
        let all = vec![0, 1, 2, 3, 4, 5];
        assert_eq!(with(base("num_local_experts"), json!({})).unwrap(), all);
        let qwen = json!({ "decoder_sparse_step": 1, "mlp_only_layers": [] });
        assert_eq!(with(base("num_experts"), qwen).unwrap(), all);
        let qwen = json!({ "decoder_sparse_step": 2, "mlp_only_layers": [3] });
        assert_eq!(with(base("num_experts"), qwen).unwrap(), [1, 5]);
        let deepseek = json!({ "first_k_dense_replace": 3, "moe_layer_freq": 1 });
        assert_eq!(with(base("n_routed_experts"), deepseek).unwrap(), [3, 4, 5]);
        let list = json!({ "moe_layer_freq": [0, 1, 1, 0, 1, 1, 1] });
        assert_eq!(with(base("n_routed_experts"), list).unwrap(), [1, 2, 4, 5]);
        assert_eq!(shape(&json!({ "text_config": base("num_experts") })).unwrap().layer_ids, all);
        for keys in [
            json!({ "vocab_size": "many" }),
            json!({ "num_hidden_layers": 70_000 }),
            json!({ "num_experts_per_tok": -1 }),
            json!({ "first_k_dense_replace": 1.5 }),
        ] {
            let name = keys.as_object().unwrap().keys().next().unwrap().clone();
            assert!(with(base("num_experts"), keys).unwrap_err().contains(&name));
        }
        assert!(shape(&json!({ "num_hidden_layers": 6 })).unwrap_err().contains("n_routed_experts"));
    }
}
