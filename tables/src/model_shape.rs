//! Reads the model's shape from a checkpoint's `config.json`, for engines that do not report it.

use crate::{CheckpointConfig, ConfigError, ModelInfo};

/// Keys for N in the various model families.
const EXPERTS: [&str; 4] = ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"];
/// Keys for k in the various model families.
const TOP_K: [&str; 4] = ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"];

impl CheckpointConfig {
    /// Returns the model's shape. The name is left empty, because engines report it.
    ///
    /// # Errors
    /// Names the file and the missing or invalid field.
    pub fn model_info(&self) -> Result<ModelInfo, ConfigError> {
        shape(self)
    }
}

fn shape(config: &CheckpointConfig) -> Result<ModelInfo, ConfigError> {
    let one_of = |names: [&'static str; 4]| {
        let found = names.into_iter().find(|name| config.get(name).is_some());
        found.ok_or_else(|| config.bad(names[0], "missing", format!("a number there or in {}", names[1..].join(", "))))
    };
    let (experts, most) = (one_of(EXPERTS)?, u64::from(u16::MAX));
    let layers = config.bounded("num_hidden_layers", most)?;
    Ok(ModelInfo {
        model: String::new(),
        tokenizer_sha256: None,
        num_experts: config.bounded(experts, most)?,
        top_k: config.bounded(one_of(TOP_K)?, most)?,
        vocab_size: config.bounded("vocab_size", u32::MAX.into())?,
        num_hidden_layers: layers,
        layer_ids: config.moe_layers(layers)?,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use serde_json::{Value, json};

    fn parsed(config: &Value) -> CheckpointConfig {
        CheckpointConfig::parse(Path::new("config.json"), config.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn families_say_it_in_their_own_words() {
        let base =
            |experts: &str| json!({ experts: 8, "num_experts_per_tok": 2, "vocab_size": 100, "num_hidden_layers": 6 });
        let with = |mut config: Value, keys: Value| {
            config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            shape(&parsed(&config)).map(|model| model.layer_ids)
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
        assert_eq!(shape(&parsed(&json!({ "text_config": base("num_experts") }))).unwrap().layer_ids, all);
        for keys in [
            json!({ "vocab_size": "many" }),
            json!({ "num_hidden_layers": 70_000 }),
            json!({ "num_experts_per_tok": -1 }),
            json!({ "first_k_dense_replace": 1.5 }),
        ] {
            let name = keys.as_object().unwrap().keys().next().unwrap().clone();
            assert!(with(base("num_experts"), keys).unwrap_err().to_string().contains(&name));
        }
        let error = shape(&parsed(&json!({ "num_hidden_layers": 6 }))).unwrap_err().to_string();
        assert!(error.contains("n_routed_experts"), "{error}");
    }
}
