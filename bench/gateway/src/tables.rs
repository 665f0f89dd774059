//! A tables file of realistic size with random shares: routing costs depend on its size, not on its values.

use std::path::Path;

use half::f16;
use semmoe_tables::{ModelInfo, Placement, Provenance, TablesBuilder};
use semmoe_text::Tokenizer;

use crate::error::BenchError;

/// Qwen3-30B-A3B.
const LAYERS: u16 = 48;
const EXPERTS: u16 = 128;
const TOP_K: u16 = 8;

/// Writes tables for `vocab` tokens (at least the tokenizer's) on `ranks` ranks.
pub(crate) fn write(tokenizer: &Path, vocab: u32, ranks: u16, seed: u64, out: &Path) -> Result<(), BenchError> {
    let tokenizer = Tokenizer::from_file(tokenizer)?;
    let fail = |cause: String| BenchError::Tables { cause };
    let model = ModelInfo {
        model: "bench".to_owned(),
        tokenizer_sha256: Some(tokenizer.sha256().to_owned()),
        num_experts: EXPERTS,
        top_k: TOP_K,
        vocab_size: vocab.max(tokenizer.vocab_size()),
        num_hidden_layers: LAYERS,
        layer_ids: (0..LAYERS).collect(),
    };
    let mut random = fastrand::Rng::with_seed(seed);
    let mut shares = Vec::with_capacity(model.vocab_size as usize * usize::from(ranks));
    for _ in 0..model.vocab_size {
        let row: Vec<f64> = (0..ranks).map(|_| random.f64() + 0.1).collect();
        let sum: f64 = row.iter().sum();
        shares.extend(row.iter().map(|share| f16::from_f64(share / sum)));
    }
    let placement =
        Placement::contiguous(usize::from(LAYERS), EXPERTS, ranks).map_err(|error| fail(error.to_string()))?;
    let provenance = Provenance { source: "made up".to_owned(), created: "2026-01-01T00:00:00Z".to_owned() };
    let prices = vec![0.0; usize::from(ranks)];
    let builder = TablesBuilder::dp(model, provenance, placement, shares, prices);
    builder.write(out).map_err(|error| fail(error.to_string()))?;
    Ok(())
}
