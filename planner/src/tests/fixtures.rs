//! Shapes and clusters that several tests use.

use crate::cluster::Cluster;
use crate::layout::Layout;
use crate::shape::ModelShape;

pub(crate) const QWEN3_235B: &str = r#"{"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096,
    "num_hidden_layers": 94, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
    "intermediate_size": 12288, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": false,
    "use_sliding_window": false, "sliding_window": null, "torch_dtype": "bfloat16"}"#;
pub(crate) const DEEPSEEK_V3: &str = r#"{"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
    "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "moe_intermediate_size": 2048, "intermediate_size": 18432, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#;
pub(crate) const OLMOE: &str = r#"{"architectures": ["OlmoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 50304, "torch_dtype": "bfloat16"}"#;
pub(crate) const GPT_OSS_120B: &str = r#"{"architectures": ["GptOssForCausalLM"], "hidden_size": 2880,
    "num_hidden_layers": 36, "num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    "full_attention"], "quantization_config": {"quant_method": "mxfp4"}}"#;

pub(crate) fn shape(config: &str) -> ModelShape {
    ModelShape::from_config("config.json", config).unwrap()
}

pub(crate) fn qwen3_235b() -> ModelShape {
    shape(QWEN3_235B)
}

pub(crate) fn deepseek_v3() -> ModelShape {
    shape(DEEPSEEK_V3)
}

/// Stages; TP and DP of attention; TP and EP of experts.
pub(crate) fn layout(pipeline: u64, attention: [u64; 2], experts: [u64; 2]) -> Layout {
    let ([attention_tp, attention_dp], [expert_tp, expert_ep]) = (attention, experts);
    Layout { pipeline, attention_tp, attention_dp, expert_tp, expert_ep }
}

/// `nodes` of 8 H200: 450 GB/s inside, 50 GB/s between.
pub(crate) fn h200(nodes: u64) -> Cluster {
    let levels = match nodes {
        1 => String::new(),
        _ => {
            format!("[[levels]]\nname = \"network\"\ncount = {nodes}\nbandwidth_gb_per_second = 50\nlatency_us = 12\n")
        }
    };
    let text = format!(
        "gpu = \"H200\"\n[[levels]]\nname = \"nvlink\"\ncount = 8\nbandwidth_gb_per_second = 450\nlatency_us = 3\n{levels}"
    );
    Cluster::from_toml("cluster.toml", &text).unwrap()
}
