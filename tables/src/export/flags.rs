//! Launch options that make an engine run the exported placement.

use crate::{Attention, Tables};

/// More steps than any run takes, so that vLLM's balancer never moves experts.
const VLLM_NEVER_STEPS: u32 = 1_000_000_000;

/// How SGLang spells attention data parallelism.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SglangSpelling {
    /// `--attn-dp-size N`, since 0.5.22.
    #[default]
    AttnDpSize,
    /// `--dp-size N --enable-dp-attention`: before 0.5.22, and deprecated since.
    EnableDpAttention,
}

/// Returns the arguments of `sglang.launch_server` for the file written by [`super::sglang`]: one rank per group, with
/// the attention that the tables were solved for. `--enable-eplb` must stay off, or SGLang moves experts away from this
/// placement.
///
/// `--ep-dispatch-algorithm` is omitted: with a placement, SGLang selects `static` by default if an all-to-all backend
/// is used (preferring a replica on the token's own rank), and since 0.5.17 rejects the option otherwise.
pub fn sglang_flags(tables: &Tables, file: &str, spelling: SglangSpelling) -> String {
    let (ranks, redundant, file) = (tables.groups(), redundant(tables), quoted(file));
    let dp = tables.dp_ranks();
    let attention = match (tables.attention(), spelling) {
        (Attention::Dp, SglangSpelling::AttnDpSize) => format!(" --attn-dp-size {dp}"),
        (Attention::Dp, SglangSpelling::EnableDpAttention) => format!(" --dp-size {dp} --enable-dp-attention"),
        (Attention::Tp, _) => String::new(),
    };
    format!(
        "--tp-size {ranks}{attention} --ep-size {ranks} --ep-num-redundant-experts {redundant} \
         --init-expert-location {file}"
    )
}

/// Returns the arguments of `vllm serve` for the file written by [`super::vllm`], as defined in vLLM's pull request
/// 49572.
pub fn vllm_flags(tables: &Tables, file: &str) -> String {
    let config = serde_json::json!({
        "initial_expert_map_path": file,
        "num_redundant_experts": redundant(tables),
        "step_interval": VLLM_NEVER_STEPS,
    });
    format!("--enable-expert-parallel --enable-eplb --eplb-config {}", quoted(&config.to_string()))
}

/// Returns the arguments of `vllm serve` with vLLM-Ascend for the file written by [`super::ascend`].
pub fn ascend_flags(file: &str) -> String {
    let config = serde_json::json!({ "eplb_config": { "expert_map_path": file } });
    format!("--enable-expert-parallel --additional-config {}", quoted(&config.to_string()))
}

/// Returns TensorRT-LLM's `--extra_llm_api_options`, as one line of YAML, for the file written by
/// [`super::tensorrt_llm`].
pub fn tensorrt_llm_options(tables: &Tables, file: &str) -> String {
    let dp = tables.attention() == Attention::Dp;
    // JSON is also valid YAML.
    serde_json::json!({
        "enable_attention_dp": dp,
        "moe_config": { "backend": "WIDEEP", "load_balancer": file },
    })
    .to_string()
}

/// Returns the number of slots in addition to one per expert.
fn redundant(tables: &Tables) -> usize {
    // Every expert has at least one slot.
    tables.slots_per_layer() - usize::from(tables.model().num_experts)
}

/// Quotes text for a shell.
fn quoted(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"/._-+=:,@%".contains(&b);
    if !text.is_empty() && text.bytes().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}
