//! The worker's layouts on a synthetic checkpoint with 402 MB of experts.

pub(crate) mod curves;
pub(crate) mod stream;
pub(crate) mod switch;

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use semmoe_worker::ep::LocalTransport;
use serde_json::json;

use crate::measure::Outcome;

const LAYERS: usize = 4;
const EXPERTS: usize = 32;
const HIDDEN: usize = 1024;
const WIDTH: usize = 512;
const VOCAB: usize = 256;
/// One expert in bf16.
const EXPERT_BYTES: usize = 3 * HIDDEN * WIDTH * 2;

/// Writes `config.json` and `model.safetensors` with deterministic weights.
fn write_checkpoint(dir: &Path) -> Outcome<()> {
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": EXPERTS,
        "num_experts_per_tok": 4, "moe_intermediate_size": WIDTH, "intermediate_size": WIDTH, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": true, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false, "torch_dtype": "bfloat16",
    });
    std::fs::write(dir.join("config.json"), config.to_string())?;
    let mut shapes: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    shapes.insert("model.embed_tokens.weight".into(), vec![VOCAB, HIDDEN]);
    shapes.insert("model.norm.weight".into(), vec![HIDDEN]);
    for layer in 0..LAYERS {
        let mut add =
            |name: &str, shape: &[usize]| shapes.insert(format!("model.layers.{layer}.{name}.weight"), shape.to_vec());
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(norm, &[HIDDEN]);
        }
        for norm in ["self_attn.q_norm", "self_attn.k_norm"] {
            add(norm, &[64]);
        }
        for (name, rows) in [("q_proj", 256), ("k_proj", 128), ("v_proj", 128)] {
            add(&format!("self_attn.{name}"), &[rows, HIDDEN]);
        }
        add("self_attn.o_proj", &[HIDDEN, 256]);
        add("mlp.gate", &[EXPERTS, HIDDEN]);
        for expert in 0..EXPERTS {
            for (name, shape) in
                [("gate_proj", [WIDTH, HIDDEN]), ("up_proj", [WIDTH, HIDDEN]), ("down_proj", [HIDDEN, WIDTH])]
            {
                add(&format!("mlp.experts.{expert}.{name}"), &shape);
            }
        }
    }
    // Small values of both signs: bf16 with exponents below 1.
    let mut random = fastrand::Rng::with_seed(1);
    let most = shapes.values().map(|shape| shape.iter().product::<usize>()).max().unwrap_or(0);
    let bytes: Vec<u8> = (0..most).flat_map(|_| (0x3c00 | random.u16(..) & 0x80ff).to_le_bytes()).collect();
    let views = shapes.into_iter().map(|(name, shape)| {
        let len = 2 * shape.iter().product::<usize>();
        Ok((name, TensorView::new(Dtype::BF16, shape, &bytes[..len])?))
    });
    serialize_to_file(views.collect::<Outcome<Vec<_>>>()?, None, &dir.join("model.safetensors"))?;
    Ok(())
}

/// Ranks of a unit.
const RANKS: usize = 2;

/// Runs both ranks on threads; returns the first one's result.
fn on_ranks<T: Send>(work: impl Fn(LocalTransport) -> Outcome<T> + Sync) -> Outcome<T> {
    std::thread::scope(|scope| {
        let start = |link| scope.spawn(|| work(link));
        let threads: Vec<_> = LocalTransport::mesh(RANKS).into_iter().map(start).collect();
        let join =
            |thread: std::thread::ScopedJoinHandle<'_, Outcome<T>>| thread.join().map_err(|_| "a rank panicked")?;
        let mut all = threads.into_iter().map(join).collect::<Outcome<Vec<T>>>()?;
        Ok(all.swap_remove(0))
    })
}
