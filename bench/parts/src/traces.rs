//! Traces of the shape of DeepSeek-V2-Lite: 26 layers, top-6 of 64, vocabulary 102,400. 10 million tokens are 1.6 GB.

use std::path::Path;

use semmoe_tables::{ModelInfo, Provenance, TraceWriter};

use crate::measure::Outcome;

const LAYERS: u16 = 26;
const TOP_K: u16 = 6;
const EXPERTS: u16 = 64;
const VOCABULARY: u32 = 102_400;
const REQUEST_TOKENS: usize = 1000;
const SHARDS: usize = 4;

/// Writes `shard0.trace.safetensors` to `shard3.trace.safetensors`.
pub(crate) fn write(folder: &Path, tokens: usize) -> Outcome<()> {
    std::fs::create_dir_all(folder)?;
    for shard in 0..SHARDS {
        let path = folder.join(format!("shard{shard}.trace.safetensors"));
        generate(&path, tokens / SHARDS, shard as u64)?;
        println!("{}", path.display());
    }
    Ok(())
}

/// Tokens follow Zipf's law. Each prefers certain experts in each layer, and sometimes takes others.
fn generate(path: &Path, tokens: usize, seed: u64) -> Outcome<()> {
    let model = ModelInfo {
        model: "made-up".into(),
        tokenizer_sha256: None,
        num_experts: EXPERTS,
        top_k: TOP_K,
        vocab_size: VOCABULARY,
        num_hidden_layers: LAYERS + 1,
        layer_ids: (1..=LAYERS).collect(),
    };
    let provenance = Provenance { source: "generated".into(), created: "2026-01-01T00:00:00Z".into() };
    let mut writer = TraceWriter::create(path, model, provenance, false)?;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut left = tokens;
    while left > 0 {
        let length = left.min(REQUEST_TOKENS);
        let ids: Vec<u32> = (0..length).map(|_| zipf(&mut random)).collect();
        let mut experts = Vec::with_capacity(length * usize::from(LAYERS * TOP_K));
        for &id in &ids {
            for layer in 0..LAYERS {
                push_route(&mut experts, id, layer, &mut random);
            }
        }
        writer.push(&ids, length as u32 * 3 / 4, &experts, None)?;
        left -= length;
    }
    writer.finish()?;
    Ok(())
}

/// Six distinct experts: an odd stride modulo a power of two visits each once.
fn push_route(experts: &mut Vec<u16>, id: u32, layer: u16, random: &mut fastrand::Rng) {
    let own = u64::from(id).wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(u64::from(layer) * 0x9e37_79b9);
    let mixed = (own ^ (own >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 20;
    let chance = random.u64(..);
    let start = if chance % 10 < 7 { mixed } else { chance >> 8 } + (chance >> 40) % 3;
    let step = (mixed >> 8) * 2 + 1;
    experts.extend((0..u64::from(TOP_K)).map(|i| ((start + i * step) % u64::from(EXPERTS)) as u16));
}

/// Ranks with probability proportional to about one over the rank.
fn zipf(random: &mut fastrand::Rng) -> u32 {
    let rank = (f64::from(VOCABULARY).ln() * random.f64()).exp();
    (rank as u32).min(VOCABULARY - 1)
}
