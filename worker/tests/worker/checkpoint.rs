//! Checkpoints on disk: sharded or not, bf16 or f32, tied or not, with dense layers in between; and every invalid form,
//! refused in one sentence before anything is served.

use crate::common;
use std::collections::BTreeMap;
use std::path::Path;

use half::f16;
use safetensors::tensor::{Dtype, TensorView};
use semmoe_tables::{Placement, RankId};
use semmoe_worker::ep::{ExpertParallel, LocalTransport, StepPhase};
use semmoe_worker::model::{Model, ModelConfig, ModelError, StepItem, Wants};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A checkpoint in memory: its configuration and tensors, whose values are exact in bf16, f16 and f32.
#[derive(Clone)]
struct Tiny {
    config: Value,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Tiny {
    /// Three layers, the second dense; no width a multiple of another's vector.
    fn new() -> Self {
        let config = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 3,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": false, "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 12, "intermediate_size": 40, "norm_topk_prob": false,
            "mlp_only_layers": [1], "hidden_act": "silu", "eos_token_id": [7, 8],
        });
        let mut tiny = Self { config, tensors: BTreeMap::new() };
        tiny.add("model.embed_tokens", &[50, 24]);
        tiny.add("lm_head", &[50, 24]);
        tiny.add("model.norm", &[24]);
        for layer in 0..3 {
            for (part, shape) in [
                ("input_layernorm", &[24][..]),
                ("post_attention_layernorm", &[24]),
                ("self_attn.q_proj", &[60, 24]),
                ("self_attn.k_proj", &[20, 24]),
                ("self_attn.v_proj", &[20, 24]),
                ("self_attn.o_proj", &[24, 60]),
                ("self_attn.q_norm", &[10]),
                ("self_attn.k_norm", &[10]),
            ] {
                tiny.add(&format!("model.layers.{layer}.{part}"), shape);
            }
            let mlp = format!("model.layers.{layer}.mlp");
            if layer == 1 {
                tiny.add_mlp(&mlp, 40);
                continue;
            }
            tiny.add(&format!("{mlp}.gate"), &[6, 24]);
            (0..6).for_each(|expert| tiny.add_mlp(&format!("{mlp}.experts.{expert}"), 12));
        }
        tiny
    }

    fn add_mlp(&mut self, prefix: &str, width: usize) {
        self.add(&format!("{prefix}.gate_proj"), &[width, 24]);
        self.add(&format!("{prefix}.up_proj"), &[width, 24]);
        self.add(&format!("{prefix}.down_proj"), &[24, width]);
    }

    fn add(&mut self, name: &str, shape: &[usize]) {
        let mut random = fastrand::Rng::with_seed(self.tensors.len() as u64);
        // Multiples of 1/256 from -1/2 to 1/2 are exact in every type.
        let values = (0..shape.iter().product()).map(|_| random.i32(-128..=128) as f32 / 256.0).collect();
        self.tensors.insert(format!("{name}.weight"), (shape.to_vec(), values));
    }

    fn set(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    /// Some of the tensors as a safetensors file.
    fn file<'a>(&self, names: impl Iterator<Item = &'a String>, dtype: Dtype) -> Vec<u8> {
        let bytes = |values: &[f32]| -> Vec<u8> {
            match dtype {
                Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect(),
            }
        };
        let data: Vec<(&String, &Vec<usize>, Vec<u8>)> =
            names.map(|name| (name, &self.tensors[name].0, bytes(&self.tensors[name].1))).collect();
        let view = |shape: &Vec<usize>, bytes| TensorView::new(dtype, shape.clone(), bytes).unwrap();
        let views = data.iter().map(|(name, shape, bytes)| (*name, view(shape, bytes)));
        safetensors::serialize(views, None).unwrap()
    }

    fn write(&self, dtype: Dtype) -> TempDir {
        let dir = self.write_config();
        std::fs::write(dir.path().join("model.safetensors"), self.file(self.tensors.keys(), dtype)).unwrap();
        dir
    }

    fn write_config(&self) -> TempDir {
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("config.json"), self.config.to_string()).unwrap();
        dir
    }

    /// Two shards and their index, with tensors alternating.
    fn write_sharded(&self) -> TempDir {
        let dir = self.write_config();
        let names: Vec<&String> = self.tensors.keys().collect();
        let mut weight_map = serde_json::Map::new();
        for shard in 0..2 {
            let file = format!("model-{}-of-2.safetensors", shard + 1);
            let mine = || names.iter().copied().skip(shard).step_by(2);
            mine().for_each(|name| drop(weight_map.insert(name.clone(), json!(file))));
            std::fs::write(dir.path().join(&file), self.file(mine(), Dtype::BF16)).unwrap();
        }
        write_index(dir.path(), &json!({"metadata": {"total_size": 1}, "weight_map": weight_map}));
        dir
    }
}

fn write_index(dir: &Path, index: &Value) {
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

fn placement() -> Placement {
    Placement::contiguous(2, 6, 1).unwrap()
}

fn load(dir: &TempDir) -> Result<Model, ModelError> {
    Model::load(dir.path(), RankId::new(0), &placement())
}

/// Logits after a few tokens, and the routes.
fn run(dir: &TempDir) -> (Vec<f32>, Vec<u16>) {
    let mut model = load(dir).unwrap();
    let transport = Box::new(LocalTransport::mesh(1).remove(0));
    let mut ep = ExpertParallel::new(transport, &placement()).unwrap();
    let mut kv = model.new_sequence();
    let mut items =
        [StepItem { kv: &mut kv, tokens: &[1, 49, 0, 33, 2], wants: Wants::Logits, phase: StepPhase::Prefill }];
    let out = model.step(&mut items, &mut ep).unwrap();
    (out.logits(0).unwrap().to_vec(), out.routes(0).to_vec())
}

#[test]
fn shards_and_number_types_make_no_difference() {
    let tiny = Tiny::new();
    let expected = run(&tiny.write(Dtype::BF16));
    assert_eq!(expected.0.len(), 50);
    assert!(expected.0.iter().all(|logit| logit.is_finite()));
    assert_eq!(expected.1.len(), 5 * 2 * 2, "tokens x MoE layers x k");
    assert!(run(&tiny.write(Dtype::F32)) == expected);
    assert!(run(&tiny.write(Dtype::F16)) == expected);
    assert!(run(&tiny.write_sharded()) == expected);
}

#[test]
fn tied_embeddings_are_the_output_matrix() {
    let mut tiny = Tiny::new();
    let embedding = tiny.tensors["model.embed_tokens.weight"].clone();
    tiny.tensors.insert("lm_head.weight".to_owned(), embedding);
    let untied = run(&tiny.write(Dtype::BF16));
    tiny.tensors.remove("lm_head.weight");
    assert!(run(&tiny.set("tie_word_embeddings", json!(true)).write(Dtype::BF16)) == untied);
}

#[test]
fn the_configuration_is_read_as_it_stands() {
    let config = ModelConfig::load(Tiny::new().write_config().path()).unwrap();
    assert_eq!((config.moe_layers.as_slice(), config.eos_token_ids.as_slice()), (&[0, 2][..], &[7, 8][..]));
    let info = config.model_info("tiny", None);
    info.validate().unwrap();
    assert_eq!((info.layers(), info.num_experts, info.top_k, info.num_hidden_layers), (2, 6, 2, 3));

    let bundled = common::config();
    assert_eq!(bundled.eos_token_ids, [10_239]);
    assert_eq!(bundled.num_moe_layers(), 7);
    let newer = Tiny::new().set("rope_theta", Value::Null);
    let newer = newer.set("rope_parameters", json!({"rope_theta": 123.0, "rope_type": "default"}));
    assert_eq!(ModelConfig::load(newer.write_config().path()).unwrap().rope.theta, 123.0);
}

fn refusal(dir: &TempDir) -> String {
    let message = load(dir).err().expect("this must be refused").to_string();
    assert!(!message.contains('\n') && message.len() < 600, "not one sentence: {message}");
    message
}

#[test]
fn configurations_that_cannot_be_served_are_refused_by_key() {
    for (key, value, expected) in [
        (
            "architectures",
            json!(["LlamaForCausalLM"]),
            "specifies the architecture LlamaForCausalLM; this worker supports Qwen3Moe",
        ),
        ("architectures", Value::Null, "specifies the architecture (none)"),
        ("hidden_size", json!(0), "hidden_size is 0, expected 1 to"),
        ("hidden_size", json!(-5), "hidden_size is -5, expected 1 to"),
        ("hidden_size", Value::Null, "hidden_size is null, expected 1 to"),
        ("hidden_size", json!("24"), "hidden_size is \"24\", expected 1 to"),
        ("vocab_size", json!(1u64 << 60), "vocab_size is"),
        ("num_key_value_heads", json!(4), "num_key_value_heads is 4, expected a divisor of num_attention_heads (6)"),
        ("head_dim", json!(9), "head_dim is 9, expected an even number"),
        ("num_experts_per_tok", json!(7), "num_experts_per_tok is 7, expected 1 to 6"),
        ("num_experts", json!(65_535), "num_experts is 65535"),
        ("mlp_only_layers", json!([0, 1, 2]), "at least one MoE layer"),
        ("mlp_only_layers", json!("all"), "mlp_only_layers is \"all\", expected a list of whole numbers"),
        ("decoder_sparse_step", json!(9), "at least one MoE layer"),
        ("hidden_act", json!("gelu"), "hidden_act is \"gelu\", expected \"silu\""),
        ("attention_bias", json!(true), "attention_bias is true, expected false"),
        ("use_sliding_window", json!(true), "use_sliding_window is true"),
        (
            "quantization_config",
            json!({"quant_method": "fp8"}),
            "quantization_config is {\"quant_method\":\"fp8\"}, expected null",
        ),
        ("tie_word_embeddings", json!(3), "tie_word_embeddings is 3, expected true or false"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor is 0.5, expected 1.0"),
        ("rope_scaling", json!({"type": "linear", "factor": 2}), "rope_scaling is of type \"linear\", expected null"),
        ("rope_scaling", json!({"rope_type": "dynamic"}), "rope_scaling is of type \"dynamic\""),
        ("rope_scaling", json!({"type": "yarn"}), "factor is missing, expected a number of at least 1"),
        ("rope_scaling", json!({"type": "yarn", "factor": 0.5}), "factor is 0.5"),
        ("rope_scaling", json!({"type": "yarn", "factor": 4, "mscale": 1}), "expected both mscale and mscale_all_dim"),
        ("rope_scaling", json!({"type": "yarn", "factor": 4, "beta_fast": 0.5}), "beta_fast is 0.5, expected at least"),
        ("rope_scaling", json!("yarn"), "rope_scaling is \"yarn\", expected an object or null"),
        ("rope_parameters", json!({"rope_type": "llama3"}), "rope_parameters is of type \"llama3\""),
        ("rope_theta", json!(0.5), "rope_theta is 0.5"),
        ("rms_norm_eps", json!(-1.0), "rms_norm_eps is -1"),
        ("eos_token_id", json!("x"), "eos_token_id is"),
    ] {
        let message = refusal(&Tiny::new().set(key, value).write(Dtype::BF16));
        assert!(message.contains(expected), "{key}: {message}");
        assert!(message.contains("config.json"), "{message}");
    }
}

#[test]
fn incomplete_and_mismatched_checkpoints_are_refused() {
    let tiny = Tiny::new();
    let empty = TempDir::new().unwrap();
    assert!(refusal(&empty).contains("config.json is missing: expected a model configuration"));
    let message = refusal(&tiny.write_config());
    assert!(message.contains("model.safetensors is missing: expected the weights"), "{message}");

    let whole = tiny.file(tiny.tensors.keys(), Dtype::BF16);
    for bytes in [&[][..], &whole[..5], &whole[..100], &whole[..whole.len() - 1], &[b'x'; 64]] {
        let dir = tiny.write_config();
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        let message = refusal(&dir);
        assert!(message.contains("is not a complete safetensors file"), "{message}");
    }

    let message = refusal(&tiny.clone().set("hidden_size", json!(25)).write(Dtype::BF16));
    assert!(
        message.contains("model.embed_tokens.weight has shape [50, 24], but config.json requires [50, 25]"),
        "{message}"
    );
    let message = refusal(&tiny.write(Dtype::I16));
    assert!(message.contains("has type I16, expected BF16, F16 or F32"), "{message}");
}

#[test]
fn a_tensor_that_only_another_rank_keeps_is_missed_too() {
    for name in ["model.layers.2.mlp.experts.5.down_proj.weight", "model.norm.weight", "lm_head.weight"] {
        let mut tiny = Tiny::new();
        tiny.tensors.remove(name);
        let dir = tiny.write(Dtype::BF16);
        let two = Placement::contiguous(2, 6, 2).unwrap();
        let error = Model::load(dir.path(), RankId::new(0), &two).err().unwrap().to_string();
        assert!(error.contains(&format!("has no tensor {name}, which config.json requires")), "{error}");
    }
}

#[test]
fn bad_indexes_are_refused() {
    let tiny = Tiny::new();
    let dir = tiny.write_sharded();
    std::fs::remove_file(dir.path().join("model-2-of-2.safetensors")).unwrap();
    assert!(refusal(&dir).contains("model-2-of-2.safetensors is missing"));
    let first = std::fs::read(dir.path().join("model-1-of-2.safetensors")).unwrap();
    std::fs::write(dir.path().join("model-2-of-2.safetensors"), &first[..first.len() / 2]).unwrap();
    let message = refusal(&dir);
    assert!(message.contains("model-2-of-2.safetensors is not a complete safetensors file"), "{message}");
    std::fs::write(dir.path().join("model-2-of-2.safetensors"), &first).unwrap();
    let message = refusal(&dir);
    assert!(message.contains("model-2-of-2.safetensors has no tensor"), "a shard twice: {message}");
    for (index, expected) in [
        (json!({"weight_map": {"a": "../model-1-of-2.safetensors"}}), "expected a file in the same directory"),
        (json!({"weight_map": {"a": "/etc/passwd"}}), "expected a file in the same directory"),
        (json!({"weight_map": {"a": ""}}), "expected a file in the same directory"),
        (json!({"weight_map": {}}), "has no tensor model.embed_tokens.weight"),
        (json!({"weight_map": {"model.embed_tokens.weight": "model-1-of-2.safetensors"}}), "has no tensor"),
        (json!([]), "index.json is not valid"),
    ] {
        write_index(dir.path(), &index);
        let message = refusal(&dir);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn placements_for_another_model_or_unit_are_refused() {
    let dir = Tiny::new().write(Dtype::BF16);
    for (placement, rank, expected) in [
        (Placement::contiguous(3, 6, 1), 0, "the placement has 3 MoE layers, but the model has 2"),
        (Placement::contiguous(2, 12, 1), 0, "the placement has 12 experts per layer, but the model has 6"),
        (Placement::contiguous(2, 6, 2), 2, "the placement has 2 groups, but the unit has 3"),
    ] {
        let error = Model::load(dir.path(), RankId::new(rank), &placement.unwrap()).err().unwrap();
        assert_eq!(error.to_string(), expected);
    }
    let transport = Box::new(LocalTransport::mesh(3).remove(0));
    let two = Placement::contiguous(2, 6, 2).unwrap();
    let error = ExpertParallel::new(transport, &two).err().unwrap();
    assert_eq!(error.to_string(), "the placement has 2 groups, but the unit has 3 ranks and expert layout ep");
}
