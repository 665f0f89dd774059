//! The minimum work of a decode step: bytes of weights and caches read once, and operations.

use semmoe_worker::model::{AttentionKind, ModelConfig};

use crate::machine::Machine;

/// Bytes and operations of one step.
pub(crate) struct Work {
    pub(crate) bytes: usize,
    pub(crate) ops: usize,
}

/// Lower bounds on the time of a step, in seconds.
pub(crate) struct Bounds {
    /// The maximum of its bytes at the copy rate and its operations.
    pub(crate) by_copy: f64,
    /// The maximum of its operations and its bytes at the faster of the rates of a read and a copy.
    pub(crate) by_read: f64,
    /// The sum of its operations and its bytes at that faster rate: the time of a step that never overlaps the two.
    pub(crate) apart: f64,
}

impl Work {
    pub(crate) fn bounds(&self, machine: &Machine) -> Bounds {
        let bytes = self.bytes as f64;
        let ops = self.ops as f64 / machine.ops_per_second;
        let read = bytes / machine.read_per_second.max(machine.copied_per_second);
        Bounds { by_copy: ops.max(bytes / machine.copied_per_second), by_read: ops.max(read), apart: ops + read }
    }
}

/// One token of each of `batch` sequences after `context` others; `experts` counts the distinct ones of all layers that
/// the tokens chose. Weights are bf16, caches f32.
pub(crate) fn decode_step(config: &ModelConfig, batch: usize, context: usize, experts: f64) -> Work {
    let AttentionKind::Grouped(attention) = &config.attention else { unreachable!("the bundled model is Qwen3-MoE") };
    let (query, kv) = (config.heads * attention.head_dim, attention.kv_heads * attention.head_dim);
    let expert = 3 * config.hidden * config.expert_width;
    let always = config.num_layers * config.hidden * (2 * query + 2 * kv)
        + config.num_moe_layers() * config.hidden * config.num_experts
        + config.vocab_size * config.hidden;
    let weights = 2 * (always + (experts * expert as f64) as usize);
    let caches = batch * context * config.num_layers * 2 * kv * size_of::<f32>();
    let per_token =
        2 * (always + config.num_moe_layers() * config.top_k * expert) + 4 * context * query * config.num_layers;
    Work { bytes: weights + caches, ops: batch * per_token }
}
