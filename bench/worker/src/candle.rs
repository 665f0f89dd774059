//! candle-transformers' `qwen3_moe` in f32, candle's fastest number type on CPUs.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::qwen3_moe::{Config, ModelForCausalLM};
use serde_json::{Value, json};

use semmoe_worker::model::likeliest;

use crate::{Engine, Outcome};

pub(crate) struct Candle {
    model: ModelForCausalLM,
    /// Tokens of each sequence so far.
    len: usize,
}

impl Candle {
    pub(crate) fn load(model_dir: &Path) -> Outcome<Self> {
        let mut config: Value = serde_json::from_slice(&std::fs::read(model_dir.join("config.json"))?)?;
        // Keys that candle requires and the checkpoint lacks; there is no window.
        config["max_window_layers"] = json!(0);
        let config: Config = serde_json::from_value(config)?;
        let files = [model_dir.join("model.safetensors")];
        // SAFETY: no process changes the file while it is mapped.
        let weights = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &Device::Cpu)? };
        Ok(Self { model: ModelForCausalLM::new(&config, weights)?, len: 0 })
    }

    fn forward(&mut self, tokens: &[u32], sequences: usize) -> Outcome<Vec<u32>> {
        let length = tokens.len() / sequences;
        let input = Tensor::from_slice(tokens, (sequences, length), &Device::Cpu)?;
        let logits = self.model.forward(&input, self.len)?.squeeze(1)?.to_vec2::<f32>()?;
        self.len += length;
        Ok(logits.iter().map(|logits| likeliest(logits).unwrap_or(0)).collect())
    }
}

impl Engine for Candle {
    fn prefill(&mut self, prompts: &[Vec<u32>]) -> Outcome<Vec<u32>> {
        self.model.clear_kv_cache();
        self.len = 0;
        self.forward(&prompts.concat(), prompts.len())
    }

    fn decode(&mut self, tokens: &[u32]) -> Outcome<Vec<u32>> {
        self.forward(tokens, tokens.len())
    }
}
