//! What an operator gives to an engine so that it runs the exported placement.

use crate::slots::slots_per_layer;
use crate::{Attention, Tables};

/// No run is so long that vLLM's balancer would move experts.
const VLLM_NEVER_STEPS: u32 = 1_000_000_000;

/// Arguments of `sglang.launch_server` for the file that holds [`super::sglang`]'s text: as many ranks as groups, attention as
/// the tables were solved for. `static` dispatch takes the replica on the own rank first. `--enable-eplb` must stay off, or
/// SGLang moves experts away from this placement.
#[must_use]
pub fn sglang_flags(tables: &Tables, file: &str) -> String {
    let (ranks, redundant, file) = (tables.groups(), redundant(tables), quoted(file));
    let attention = match tables.attention() {
        Attention::Dp => format!(" --enable-dp-attention --dp-size {}", tables.dp_ranks()),
        Attention::Tp => String::new(),
    };
    format!(
        "--tp-size {ranks}{attention} --ep-size {ranks} --ep-num-redundant-experts {redundant} \
         --init-expert-location {file} --ep-dispatch-algorithm static"
    )
}

/// Arguments of `vllm serve` for the file that holds [`super::vllm`]'s text, as the pull request has them.
#[must_use]
pub fn vllm_flags(tables: &Tables, file: &str) -> String {
    let config = serde_json::json!({
        "initial_expert_map_path": file,
        "num_redundant_experts": redundant(tables),
        "step_interval": VLLM_NEVER_STEPS,
    });
    format!("--enable-expert-parallel --enable-eplb --eplb-config {}", quoted(&config.to_string()))
}

/// Slots beyond one for each expert.
fn redundant(tables: &Tables) -> usize {
    // Every expert is in a slot.
    slots_per_layer(tables) - usize::from(tables.model().num_experts)
}

/// As a shell reads it back.
fn quoted(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"/._-+=:,@%".contains(&b);
    if !text.is_empty() && text.bytes().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}
