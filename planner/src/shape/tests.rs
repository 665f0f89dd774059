//! Parameter counts of published checkpoints, and the errors for wrong configurations.

use proptest::prelude::*;

use super::*;
use crate::tests::fixtures::{self, GPT_OSS_120B, OLMOE, QWEN3_235B};

#[test]
fn parameters_are_those_of_the_published_checkpoints() {
    let expected = [
        (fixtures::qwen3_235b(), 235_093_634_560),
        (fixtures::deepseek_v3(), 671_026_419_200),
        (fixtures::shape(OLMOE), 6_919_161_856),
        (fixtures::shape(GPT_OSS_120B), 116_829_156_672),
        (fixtures::shape(LLAMA_8B), 8_030_261_248),
    ];
    for (shape, parameters) in expected {
        assert_eq!(shape.parameters(), parameters, "{}", shape.architecture);
    }
}

const LLAMA_8B: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}"#;

/// A model nested in another one's configuration, quantised as Kimi K2.5 is.
#[test]
fn a_nested_language_model_is_read() {
    let quantized = r#""quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}"#;
    let inner = fixtures::DEEPSEEK_V3.split_once("\"quantization_config\"").unwrap().0;
    let shape = fixtures::shape(&format!(r#"{{"architectures": ["Kimi"], "text_config": {inner}{quantized}}}}}"#));
    assert_eq!((shape.parameters(), shape.precision.experts), (fixtures::deepseek_v3().parameters(), Dtype::Int4));
    assert_eq!(shape.precision.dense, Dtype::Bf16);
}

/// A model nested in another one's configuration; settings of the whole checkpoint may be outside, inside or both.
#[test]
fn what_is_about_the_checkpoint_counts_wherever_it_is() {
    let (fp8, ties) = (r#""quantization_config": {"quant_method": "fp8"}"#, r#""tie_word_embeddings": true"#);
    let all = format!(r#"{fp8}, {ties}, "dtype": "float32""#);
    let inner = QWEN3_235B.trim_end_matches('}').replace(r#""tie_word_embeddings": false,"#, "");
    let inner = inner.replace(r#", "torch_dtype": "bfloat16""#, "");
    let flat = fixtures::shape(&format!("{inner}, {all}}}"));
    assert_eq!((flat.precision.experts, flat.precision.other, flat.tied_embeddings), (Dtype::Fp8, Dtype::F32, true));
    for section in ["text_config", "language_config", "llm_config"] {
        for (outside, inside) in
            [(all.clone(), String::new()), (String::new(), all.clone()), (all.clone(), all.clone())]
        {
            let comma = |keys: &str| if keys.is_empty() { String::new() } else { format!(", {keys}") };
            let (outside, inside) = (comma(&outside), comma(&inside));
            let nested = format!(r#""{section}": {inner}{inside}}}"#);
            let deeper = format!(r#"{{"thinker_config": {{"model_type": "thinker"{outside}, {nested}}}}}"#);
            for text in [format!(r#"{{"architectures": ["Seeing"], {nested}{outside}}}"#), deeper] {
                assert_eq!(fixtures::shape(&text), flat, "{text}");
            }
        }
    }
    // Null is ignored, and a section without a language model does not count.
    let text =
        format!(r#"{{"text_config": {inner}, "quantization_config": null, "tie_word_embeddings": null}}, {all}}}"#);
    assert_eq!(fixtures::shape(&text), flat);
    let text = format!(r#"{inner}, {all}, "text_config": {{"hidden_size": 1}}}}"#);
    assert_eq!(fixtures::shape(&text), flat);
    for (outside, inside, key) in [
        (ties, r#""tie_word_embeddings": false"#, "tie_word_embeddings"),
        (fp8, r#""quantization_config": {"quant_method": "mxfp4"}"#, "quantization_config"),
    ] {
        let text = format!(r#"{{"text_config": {inner}, {inside}}}, {outside}}}"#);
        let error = ModelShape::from_config("config.json", &text).unwrap_err().to_string();
        assert!(error.contains(&format!("`{key}` is ")) && error.contains("the value outside"), "{error}");
    }
}

/// The model's table of reference numbers: expert parameters, bytes, cache.
#[test]
fn the_reference_model_has_the_golden_numbers() {
    let shape = fixtures::qwen3_235b();
    assert_eq!(shape.routed_parameters(), 227_096_395_776);
    assert!((shape.parameters() as f64 / 1e9 - 235.09).abs() < 0.005);
    assert!((shape.routed_parameters() as f64 / shape.parameters() as f64 - 0.966).abs() < 0.0005);
    assert!((shape.routed_parameters() as f64 * 2.0 / 8.0 / 1e9 - 56.774).abs() < 0.0005);
    let expert_bytes = shape.expert_parameters() as f64 * shape.precision.experts.bytes();
    assert_eq!(shape.experts as f64 * expert_bytes / 8.0, 603_979_776.0);
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

proptest! {
    /// Any content is either read or refused.
    #[test]
    fn damaged_files_are_refused_or_read(at in 0usize..4000, with in "[0-9a-z\"\\[\\]{}:,.-]{0,6}", cut in 0usize..8, big: u64) {
        let read = |text: &str, read: &dyn Fn(&str)| {
            let at = at % text.len();
            let end = (at + cut).min(text.len());
            if text.is_char_boundary(at) && text.is_char_boundary(end) {
                read(&format!("{}{with}{}", &text[..at], &text[end..]));
            }
        };
        for config in [QWEN3_235B, fixtures::DEEPSEEK_V3, GPT_OSS_120B] {
            let use_shape = |text: &str| {
                if let Ok(shape) = ModelShape::from_config("f", text) {
                    assert!(shape.parameters() > 0 && shape.kv_bytes_per_token(8) > 0.0);
                }
            };
            read(config, &use_shape);
            use_shape(&config.replace("128", &big.to_string()));
        }
    }

    /// Dimensions of any size are counted without overflow, or refused.
    #[test]
    fn large_dimensions_are_refused_or_counted(sizes in prop::collection::vec(0u32..21, 6)) {
        let size = |at: usize| 1u64 << sizes[at];
        let text = format!(
            r#"{{"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": {}, "num_hidden_layers": {}, "n_routed_experts": {},
            "num_experts_per_tok": 1, "n_shared_experts": {}, "moe_intermediate_size": {}, "num_attention_heads": {}, "kv_lora_rank": 512,
            "q_lora_rank": 1048576, "qk_nope_head_dim": 1048576, "qk_rope_head_dim": 1048576, "v_head_dim": 1048576, "vocab_size": 1048576}}"#,
            size(0), size(1), size(2), size(3), size(4), size(5)
        );
        if let Ok(shape) = ModelShape::from_config("f", &text) {
            prop_assert!(shape.parameters() < 4_000_000_000_000_000);
        }
    }
}

#[test]
fn a_wrong_configuration_is_named_by_its_key() {
    let cases = [
        ("\"num_experts\": 128", "\"num_experts\": 0", "`num_experts` is 0"),
        ("\"num_experts\": 128", "\"num_experts\": 4", "`num_experts_per_tok` is 8"),
        ("\"num_key_value_heads\": 4", "\"num_key_value_heads\": 5", "`num_key_value_heads` is 5"),
        ("\"hidden_size\": 4096,", "", "`hidden_size` is missing"),
        ("\"hidden_size\": 4096", "\"hidden_size\": 1e99", "`hidden_size` is 1e+99"),
        ("Qwen3MoeForCausalLM", "FalconForCausalLM", "`architectures` is [\"FalconForCausalLM\"]"),
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
