//! Parameter counts of published checkpoints, and what a wrong configuration is told.

use super::*;
use crate::fixtures::{self, GPT_OSS_120B, OLMOE, QWEN3_235B};

#[test]
fn parameters_are_those_of_the_published_checkpoints() {
    let expected = [
        (fixtures::qwen3_235b(), 235_093_634_560),
        (fixtures::deepseek_v3(), 671_026_419_200),
        (fixtures::shape(OLMOE), 6_919_161_856),
        (fixtures::shape(GPT_OSS_120B), 116_829_156_672),
    ];
    for (shape, parameters) in expected {
        assert_eq!(shape.parameters(), parameters, "{}", shape.architecture);
    }
}

/// The table of the model used in the numbers: expert parameters, bytes, cache.
#[test]
fn the_reference_model_has_the_golden_numbers() {
    let shape = fixtures::qwen3_235b();
    assert_eq!(shape.routed_parameters(), 227_096_395_776);
    assert!((shape.parameters() as f64 / 1e9 - 235.09).abs() < 0.005);
    assert!((shape.routed_parameters() as f64 / shape.parameters() as f64 - 0.966).abs() < 0.0005);
    assert!((shape.routed_parameters() as f64 * 2.0 / 8.0 / 1e9 - 56.774).abs() < 0.0005);
    assert_eq!(shape.experts as f64 * shape.expert_bytes() / 8.0, 603_979_776.0);
    assert_eq!(shape.kv_bytes_per_token(1), 192_512.0);
    assert_eq!(shape.kv_bytes_per_token(8), 48_128.0, "4 heads on 8 ranks are replicated");
    assert_eq!((shape.kv_moved_to_tp(8), shape.kv_moved_to_ep(8)), (336_896.0, 144_384.0));
}

#[test]
fn caches_of_latents_and_windows() {
    let deepseek = fixtures::deepseek_v3();
    assert_eq!(deepseek.kv_bytes_per_token(1), 61.0 * 576.0 * 2.0);
    assert_eq!(deepseek.kv_bytes_per_token(8), deepseek.kv_bytes_per_token(1), "a latent is replicated");
    assert_eq!(deepseek.precision.experts, Dtype::Fp8);
    let oss = fixtures::shape(GPT_OSS_120B);
    assert_eq!(oss.window, Some(Window { layers: 18, tokens: 128 }));
    assert_eq!(oss.seen_tokens(1128.0), 628.0);
    assert_eq!(oss.precision.experts, Dtype::Mxfp4);
}

#[test]
fn a_wrong_configuration_is_named_by_its_key() {
    let cases = [
        ("\"num_experts\": 128", "\"num_experts\": 0", "`num_experts` is 0"),
        ("\"num_experts\": 128", "\"num_experts\": 4", "`num_experts_per_tok` is 8"),
        ("\"num_key_value_heads\": 4", "\"num_key_value_heads\": 5", "`num_key_value_heads` is 5"),
        ("\"hidden_size\": 4096,", "", "`hidden_size` is missing"),
        ("\"hidden_size\": 4096", "\"hidden_size\": 1e99", "`hidden_size` is 1e+99"),
        ("Qwen3MoeForCausalLM", "LlamaForCausalLM", "`architectures` is [\"LlamaForCausalLM\"]"),
        ("\"vocab_size\"", "vocab_size", "not valid JSON"),
        ("\"torch_dtype\": \"bfloat16\"", "\"torch_dtype\": \"int3\"", "`torch_dtype` is \"int3\""),
    ];
    for (from, to, message) in cases {
        let text = QWEN3_235B.replace(from, to);
        assert_ne!(text, QWEN3_235B, "{from}");
        let error = ModelShape::from_config("config.json", &text).unwrap_err().to_string();
        assert!(error.contains(message) && error.starts_with("config.json"), "{error}\nlacks: {message}");
    }
}
