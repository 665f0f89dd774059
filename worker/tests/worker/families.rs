//! Tiny random models of every family against Transformers' results (`fixtures/make.py`), on one rank.

use std::collections::BTreeMap;

use crate::common::{
    FIXTURES, FixtureGolden, Rank, TOLERANCE, contiguous_of, fixture, fixture_golden, local_mesh, relative_error,
};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use semmoe_tables::{LayerIdx, RankId};
use semmoe_worker::ep::StepPhase;
use semmoe_worker::model::{
    Architecture, AttentionKind, HeadNormKind, Model, ModelConfig, Probe, RopeLayout, StepItem, Wants,
};
use serde_json::{Value, json};

/// Routes of every layer, in layer order.
#[derive(Default)]
struct Recording {
    experts: Vec<u16>,
    weights: Vec<f32>,
}

impl Probe for Recording {
    fn routes(&mut self, _layer: LayerIdx, experts: &[u16], weights: &[f32]) {
        self.experts.extend_from_slice(experts);
        self.weights.extend_from_slice(weights);
    }
}

/// Processes a prompt in the given pieces, and compares the logits after each of them and all routes.
fn check_prompt(name: &str, rank: &mut Rank, golden: &FixtureGolden, piece: usize) {
    let config = rank.model.config().clone();
    let (layers, top_k, vocab) = (config.num_moe_layers(), config.top_k, config.vocab_size);
    let mut kv = rank.model.new_sequence();
    for (first, tokens) in (0..).step_by(piece).zip(golden.ids.chunks(piece)) {
        let mut found = Recording::default();
        let mut items = [StepItem { kv: &mut kv, tokens, wants: Wants::Logits, phase: StepPhase::Prefill }];
        let out = rank.model.step_probed(&mut items, &mut rank.ep, &mut found).unwrap();
        let last = first + tokens.len() - 1;
        let error = relative_error(out.logits(0).unwrap(), &golden.logits[last * vocab..][..vocab]);
        assert!(error < TOLERANCE, "{name}: the logits at {last} are off by {error}, in pieces of {piece}");
        for layer in 0..layers {
            let at = (layer * golden.ids.len() + first) * top_k;
            let (here, count) = (layer * tokens.len() * top_k, tokens.len() * top_k);
            let (experts, weights) = (&found.experts[here..][..count], &found.weights[here..][..count]);
            assert_eq!(experts, &golden.experts[at..][..count], "{name}: experts of layer {layer} from {first}");
            let error = relative_error(weights, &golden.weights[at..][..count]);
            assert!(error < TOLERANCE, "{name}: the weights of layer {layer} from {first} are off by {error}");
        }
        let routes: Vec<u16> = (0..tokens.len())
            .flat_map(|token| (0..layers).map(move |layer| (layer * tokens.len() + token) * top_k))
            .flat_map(|from| found.experts[from..][..top_k].to_vec())
            .collect();
        assert_eq!(out.routes(0), routes, "{name}: the chosen experts are returned");
    }
}

#[test]
fn one_rank_agrees_with_transformers() {
    for name in FIXTURES {
        let dir = fixture(name);
        let placement = contiguous_of(&ModelConfig::load(&dir).unwrap(), 1);
        let mut rank = Rank::of(&dir, local_mesh(1).remove(0), &placement);
        for golden in fixture_golden(&dir) {
            for piece in [golden.ids.len(), 1, 4] {
                check_prompt(name, &mut rank, &golden, piece);
            }
        }
    }
}

#[test]
fn every_family_has_a_fixture_and_is_read_as_what_it_is() {
    let configs: Vec<ModelConfig> = FIXTURES.iter().map(|name| ModelConfig::load(&fixture(name)).unwrap()).collect();
    for architecture in Architecture::ALL {
        assert!(configs.iter().any(|config| config.architecture == architecture), "{}", architecture.name());
    }
    let [qwen3, qwen2, mixtral, olmoe, lite, v2, v3] = &configs[..] else { panic!() };
    // Traces omit layers without experts.
    let moe: Vec<&[u16]> = configs.iter().map(|config| &config.moe_layers[..]).collect();
    assert_eq!(moe, [&[0, 2][..], &[1, 3], &[0, 1], &[0, 1], &[1, 2], &[1, 2], &[1, 2]]);
    assert_eq!(qwen2.model_info("m", None).layer_ids, [1, 3]);
    assert_eq!(qwen2.shared.map(|shared| (shared.width, shared.gated)), Some((28, true)));
    assert_eq!(v2.shared.map(|shared| (shared.width, shared.gated)), Some((24, false)));
    assert!(qwen3.rope.yarn.is_some() && mixtral.router.normalise && mixtral.expert_width == 24);
    let AttentionKind::Grouped(grouped) = &olmoe.attention else { panic!() };
    assert_eq!((grouped.norms, grouped.clip), (HeadNormKind::Whole, Some(0.9)));
    assert!(lite.router.groups.is_none() && v2.router.groups.is_some());
    assert_eq!((v3.rope.layout, v3.router.scale), (RopeLayout::Pairs, 2.5));
    // A latent cache does not grow with the heads.
    let shape = v3.cache_shape();
    assert_eq!((shape.kv_heads, shape.key_width, shape.value_width), (1, 26, 20));
}

/// The refusal of a fixture with a changed configuration, before its weights are read.
fn refusal(name: &str, key: &str, value: Value) -> String {
    let path = fixture(name).join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    match value {
        Value::String(text) if text == "(absent)" => drop(config.as_object_mut().unwrap().shift_remove(key)),
        value => config[key] = value,
    }
    let error = ModelConfig::parse(config.to_string().as_bytes(), &path).unwrap_err().to_string();
    assert!(error.contains("config.json") && !error.contains('\n') && error.len() < 600, "{error}");
    error
}

#[test]
fn what_a_family_has_and_this_worker_does_not_is_refused_by_key() {
    for (name, key, value, expected) in [
        ("qwen2-moe", "shared_expert_intermediate_size", json!("(absent)"), "is missing, expected 1 to"),
        ("qwen2-moe", "use_sliding_window", json!(true), "use_sliding_window is true, expected false"),
        ("qwen2-moe", "hidden_size", json!(34), "hidden_size is 34, expected a multiple of num_attention_heads (4)"),
        ("mixtral", "sliding_window", json!(32), "sliding_window is 32, expected null, or at least 64"),
        ("mixtral", "num_local_experts", json!("(absent)"), "num_local_experts is missing"),
        ("olmoe", "clip_qkv", json!(-1), "clip_qkv is -1, expected a number above 0"),
        ("olmoe", "attention_bias", json!(true), "attention_bias is true"),
        ("deepseek-v2", "topk_method", json!("noaux_tc"), "topk_method is \"noaux_tc\", expected \"greedy\""),
        ("deepseek-v2", "scoring_func", json!("sigmoid"), "scoring_func is \"sigmoid\", expected \"softmax\""),
        ("deepseek-v2", "norm_topk_prob", json!(true), "norm_topk_prob is true, expected false"),
        ("deepseek-v2", "moe_layer_freq", json!(2), "moe_layer_freq is 2, expected 1"),
        ("deepseek-v2", "n_group", json!(3), "n_group is 3, expected a divisor of n_routed_experts (8)"),
        ("deepseek-v2", "n_group", Value::Null, "n_group is null, expected 1 to"),
        ("deepseek-v2", "topk_group", json!(1), "topk_group is 1, expected 2 to 4"),
        ("deepseek-v2", "topk_group", json!(5), "topk_group is 5, expected 2 to 4"),
        ("deepseek-v2", "mlp_bias", json!(true), "mlp_bias is true"),
        ("deepseek-v2", "n_routed_experts", Value::Null, "n_routed_experts is null"),
        ("deepseek-v3", "topk_method", json!("greedy"), "topk_method is \"greedy\", expected \"noaux_tc\""),
        ("deepseek-v3", "n_group", json!(8), "n_group is 8, expected at least two experts per group"),
        ("deepseek-v3", "num_key_value_heads", json!(2), "num_key_value_heads is 2, expected num_attention_heads (4)"),
        ("deepseek-v3", "qk_rope_head_dim", json!(5), "qk_rope_head_dim is 5, expected an even number"),
        (
            "deepseek-v3",
            "first_k_dense_replace",
            json!(3),
            "first_k_dense_replace is 3, expected at least one MoE layer",
        ),
        ("deepseek-v3", "quantization_config", json!({"quant_method": "fp8"}), "quantization_config is"),
        ("deepseek-v3", "rope_scaling", json!({"type": "longrope"}), "rope_scaling is of type \"longrope\""),
    ] {
        let message = refusal(name, key, value);
        assert!(message.contains(expected), "{name}: {message}");
    }
}

#[test]
fn a_window_as_long_as_the_context_is_none() {
    let path = fixture("mixtral").join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["sliding_window"] = json!(64);
    assert_eq!(
        ModelConfig::parse(config.to_string().as_bytes(), &path).unwrap(),
        ModelConfig::load(&fixture("mixtral")).unwrap()
    );
}

/// The refusal of a fixture with one tensor missing or misshapen.
fn broken(name: &str, tensor: &str, shape: Option<&[usize]>) -> String {
    let copy = tempfile::tempdir().unwrap();
    let config = std::fs::read(fixture(name).join("config.json")).unwrap();
    std::fs::write(copy.path().join("config.json"), config).unwrap();
    let bytes = std::fs::read(fixture(name).join("model.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: BTreeMap<String, TensorView<'_>> =
        all.iter().map(|(name, view)| (name.to_owned(), view)).collect();
    let old = tensors.remove(tensor).expect("the fixture has that tensor");
    if let Some(shape) = shape {
        let size = shape.iter().product::<usize>() * old.dtype().bitsize() / 8;
        let new = TensorView::new(old.dtype(), shape.to_vec(), &bytes[bytes.len() - size..]).unwrap();
        tensors.insert(tensor.to_owned(), new);
    }
    std::fs::write(copy.path().join("model.safetensors"), safetensors::serialize(tensors, None).unwrap()).unwrap();
    let placement = contiguous_of(&ModelConfig::load(copy.path()).unwrap(), 1);
    Model::load(copy.path(), RankId::new(0), &placement).err().expect("this must be refused").to_string()
}

#[test]
fn tensors_that_are_not_as_configured_are_refused_by_name() {
    for (name, tensor, shape, expected) in [
        ("qwen2-moe", "model.layers.0.self_attn.k_proj.bias", None, "has no tensor"),
        (
            "qwen2-moe",
            "model.layers.1.mlp.shared_expert_gate.weight",
            Some(&[2, 32][..]),
            "[2, 32], but config.json requires [1, 32]",
        ),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.7.w2.weight",
            Some(&[24, 32]),
            "[24, 32], but config.json requires [32, 24]",
        ),
        ("olmoe", "model.layers.0.self_attn.k_norm.weight", Some(&[8]), "[8], but config.json requires [16]"),
        (
            "deepseek-v2",
            "model.layers.2.self_attn.kv_b_proj.weight",
            Some(&[88, 19]),
            "[88, 19], but config.json requires [88, 20]",
        ),
        ("deepseek-v2", "model.layers.1.mlp.shared_experts.up_proj.weight", None, "has no tensor"),
        ("deepseek-v2-lite", "model.layers.0.self_attn.q_proj.weight", None, "has no tensor"),
    ] {
        let message = broken(name, tensor, shape);
        assert!(message.contains(tensor) && message.contains(expected), "{name}: {message}");
    }
}
