//! Tiny checkpoints of every family, written and read by the safetensors crate.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

pub mod folder;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

pub const EXPERTS: u16 = 12;
pub const HIDDEN_LAYERS: u16 = 3;
/// Hidden size, also inside an expert.
const WIDTH: usize = 32;
const INNER: usize = 64;

/// Element type, shape, bytes.
pub type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// A checkpoint in memory.
#[derive(Clone)]
pub struct Checkpoint {
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
    /// A tensor's shard is its index modulo this; 1 = a single file without an index.
    pub shards: usize,
}

impl Checkpoint {
    fn new(architecture: &str, experts_key: &str) -> Self {
        let config = json!({"architectures": [architecture], experts_key: EXPERTS, "num_experts_per_tok": 2,
            "num_hidden_layers": HIDDEN_LAYERS, "vocab_size": 5});
        let mut new = Self { config, tensors: BTreeMap::new(), shards: 1 };
        for name in ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"] {
            new.add(name, Dtype::BF16, &[5, WIDTH]);
        }
        for layer in 0..HIDDEN_LAYERS {
            new.add(&format!("model.layers.{layer}.self_attn.q_proj.weight"), Dtype::BF16, &[4, WIDTH]);
        }
        new
    }

    /// Layer 0 dense, shared experts, FP8 with block scales, and an extra layer for speculative decoding.
    pub fn deepseek_v3() -> Self {
        let mut new = Self::new("DeepseekV3ForCausalLM", "n_routed_experts");
        new.set("n_group", json!(1)).set("topk_group", json!(1));
        new.add("model.layers.0.mlp.gate_proj.weight", Dtype::BF16, &[7, WIDTH]);
        for layer in 1..=HIDDEN_LAYERS {
            let mlp = format!("model.layers.{layer}.mlp");
            new.add(&format!("{mlp}.gate.weight"), Dtype::BF16, &[EXPERTS.into(), WIDTH]);
            new.add(&format!("{mlp}.gate.e_score_correction_bias"), Dtype::F32, &[EXPERTS.into()]);
            new.add(&format!("{mlp}.shared_experts.up_proj.weight"), Dtype::F8_E4M3, &[INNER, WIDTH]);
            for expert in 0..EXPERTS {
                for projection in ["gate_proj", "up_proj", "down_proj"] {
                    let name = format!("{mlp}.experts.{expert}.{projection}");
                    new.add(&format!("{name}.weight"), Dtype::F8_E4M3, &shape_of(projection));
                    new.add(&format!("{name}.weight_scale_inv"), Dtype::F32, &[1, 1]);
                }
            }
        }
        new
    }

    pub fn deepseek_v2() -> Self {
        let mut new = Self::deepseek_v3();
        new.config["architectures"] = json!(["DeepseekV2ForCausalLM"]);
        new.tensors.retain(|name, _| !name.ends_with("bias") && !name.starts_with("model.layers.3."));
        new
    }

    /// MoE in layers 1 and 2.
    fn each(architecture: &str, experts_key: &str, block: &str, projections: [&str; 3]) -> Self {
        let mut new = Self::new(architecture, experts_key);
        for layer in 1..HIDDEN_LAYERS {
            let block = format!("model.layers.{layer}.{block}");
            new.add(&format!("{block}.gate.weight"), Dtype::F16, &[EXPERTS.into(), WIDTH]);
            for expert in 0..EXPERTS {
                for projection in projections {
                    let name = format!("{block}.experts.{expert}.{projection}.weight");
                    new.add(&name, Dtype::BF16, &shape_of(projection));
                }
            }
        }
        new
    }

    pub fn qwen3() -> Self {
        Self::each("Qwen3MoeForCausalLM", "num_experts", "mlp", ["gate_proj", "up_proj", "down_proj"])
    }

    pub fn olmoe() -> Self {
        Self::each("OlmoeForCausalLM", "num_experts", "mlp", ["gate_proj", "up_proj", "down_proj"])
    }

    pub fn mixtral() -> Self {
        Self::each("MixtralForCausalLM", "num_local_experts", "block_sparse_moe", ["w1", "w2", "w3"])
    }

    /// MXFP4 blocks and scales, or plain numbers.
    pub fn gpt_oss(quantised: bool) -> Self {
        let mut new = Self::new("GptOssForCausalLM", "num_local_experts");
        let n = usize::from(EXPERTS);
        for layer in 1..HIDDEN_LAYERS {
            let mlp = format!("model.layers.{layer}.mlp");
            new.add(&format!("{mlp}.router.weight"), Dtype::BF16, &[n, WIDTH]);
            new.add(&format!("{mlp}.router.bias"), Dtype::BF16, &[n]);
            for (projection, rows, cols) in [("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)] {
                let name = format!("{mlp}.experts.{projection}");
                new.add(&format!("{name}_bias"), Dtype::BF16, &[n, rows]);
                if quantised {
                    new.add(&format!("{name}_blocks"), Dtype::U8, &[n, rows, cols / 32, 16]);
                    new.add(&format!("{name}_scales"), Dtype::U8, &[n, rows, cols / 32]);
                } else {
                    new.add(&name, Dtype::BF16, &[n, cols, rows]);
                }
            }
        }
        new
    }

    /// Adds a tensor of numbers below 2 that no other tensor has.
    pub fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize]) {
        let mut state =
            name.bytes().fold(1469598103934665603u64, |h, b| (h ^ u64::from(b)).wrapping_mul(1099511628211));
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as u32
        };
        let mut bytes = Vec::new();
        for _ in 0..shape.iter().product::<usize>() {
            let number = next();
            let uniform = number as f32 / (1 << 23) as f32 - 1.0;
            match dtype {
                Dtype::F32 => bytes.extend(uniform.to_le_bytes()),
                Dtype::F16 => bytes.extend(half::f16::from_f32(uniform).to_le_bytes()),
                Dtype::BF16 => bytes.extend(half::bf16::from_f32(uniform).to_le_bytes()),
                // Clear the highest bit of the exponent.
                Dtype::F8_E4M3 => bytes.push(number as u8 & 0b1011_1111),
                Dtype::U8 if name.ends_with("scales") => bytes.push(120 + number as u8 % 8),
                _ => bytes.push(number as u8),
            }
        }
        self.tensors.insert(name.to_owned(), (dtype, shape.to_vec(), bytes));
    }

    pub fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.config[key] = value;
        self
    }

    pub fn sharded(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }

    pub fn file_of(&self, shard: usize) -> String {
        match self.shards {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", shard + 1),
        }
    }

    /// Writes the checkpoint, and other files beside the weights.
    pub fn write(&self, dir: &Path) {
        std::fs::create_dir_all(dir.join("original")).unwrap();
        std::fs::write(dir.join("config.json"), serde_json::to_string_pretty(&self.config).unwrap()).unwrap();
        std::fs::write(dir.join("tokenizer.json"), "{}").unwrap();
        std::fs::write(dir.join("empty.txt"), "").unwrap();
        std::fs::write(dir.join("consolidated.00.pth"), "old order").unwrap();
        let mut weight_map = serde_json::Map::new();
        for shard in 0..self.shards {
            let mine: Vec<_> = self.tensors.iter().skip(shard).step_by(self.shards).collect();
            let views = mine
                .iter()
                .map(|(name, (dtype, shape, data))| (*name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
            let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
            let file = self.file_of(shard);
            std::fs::write(dir.join(&file), safetensors::serialize(views, Some(metadata)).unwrap()).unwrap();
            mine.iter().for_each(|(name, _)| drop(weight_map.insert((*name).clone(), json!(file))));
        }
        if self.shards > 1 {
            let index = json!({"metadata": {"total_size": 123}, "weight_map": weight_map});
            std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        }
    }
}

fn shape_of(projection: &str) -> [usize; 2] {
    if matches!(projection, "down_proj" | "w2") { [WIDTH, INNER] } else { [INNER, WIDTH] }
}

/// Reads all tensors of a directory, through the index if there is one.
pub fn read(dir: &Path) -> BTreeMap<String, Tensor> {
    let index = dir.join("model.safetensors.index.json");
    let mut files: Vec<PathBuf> = vec![dir.join("model.safetensors")];
    let mut weight_map: BTreeMap<String, String> = BTreeMap::new();
    if index.exists() {
        let value: Value = serde_json::from_slice(&std::fs::read(index).unwrap()).unwrap();
        assert_eq!(value["metadata"]["total_size"], 123, "the rest of the index stays");
        weight_map = serde_json::from_value(value["weight_map"].clone()).unwrap();
        files = weight_map.values().map(|file| dir.join(file)).collect();
        files.sort();
        files.dedup();
    }
    let mut all = BTreeMap::new();
    for path in files {
        let bytes = std::fs::read(&path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            if let Some(file) = weight_map.get(name) {
                assert_eq!(*file, path.file_name().unwrap().to_str().unwrap(), "the index is right about {name}");
            }
            all.insert(name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
        }
    }
    assert!(weight_map.keys().all(|name| all.contains_key(name)));
    all
}
