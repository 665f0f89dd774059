//! Profiles of the size of real models, to time the solver.
//!
//! Tokens follow Zipf's law. Each has a topic per layer, perturbs the topic's order of experts, and draws its experts
//! from the front of that order: about 20 different ones per token and layer. Recorded profiles of OLMoE have 15, so
//! the times are conservative.

use std::io::Write;
use std::path::Path;

use semmoe_tables::{LayerIdx, ModelInfo, Phase, ProfileRow, ProfileWriter, TokenId};

use crate::error::BenchError;
use crate::methods::provenance;

/// The model whose size a profile has.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Size {
    V2Lite,
    #[value(name = "qwen3-30b")]
    Qwen30,
    #[value(name = "qwen3-235b")]
    Qwen235,
    DeepseekV3,
}

impl Size {
    fn model(self) -> ModelInfo {
        let (vocab_size, layers, num_experts, top_k) = match self {
            Size::V2Lite => (102_400, 26, 64, 6),
            Size::Qwen30 => (151_936, 48, 128, 8),
            Size::Qwen235 => (151_936, 94, 128, 8),
            Size::DeepseekV3 => (129_280, 58, 256, 8),
        };
        ModelInfo {
            model: "synthetic".into(),
            tokenizer_sha256: None,
            num_experts,
            top_k,
            vocab_size,
            num_hidden_layers: layers,
            layer_ids: (0..layers).collect(),
        }
    }
}

/// Occurrences drawn individually; further ones repeat them.
const MAX_DRAWN: u64 = 48;
const TOPICS: usize = 24;

/// Writes the profile.
pub(crate) fn make(size: Size, file: &Path, tokens: u64) -> Result<(), BenchError> {
    let model = size.model();
    let (layers, vocabulary, experts) = (model.layers(), model.vocab_size as usize, usize::from(model.num_experts));
    let top_k = usize::from(model.top_k);
    let counts = zipf(vocabulary, tokens);
    let cube: Vec<usize> = (0..4096).map(|u| ((f64::from(u) / 4096.0).powi(6) * experts as f64) as usize).collect();
    let mut writer = ProfileWriter::create(file, model, provenance(), Phase::All, counts.clone())?;
    let mut on_expert = vec![0u32; experts];
    let mut entries = 0;
    for layer in 0..layers {
        let mut orders: Vec<Vec<usize>> = vec![(0..experts).collect(); TOPICS];
        let mut random = fastrand::Rng::with_seed(layer as u64);
        orders.iter_mut().for_each(|order| random.shuffle(order));
        for (token, &count) in counts.iter().enumerate() {
            let mut random = fastrand::Rng::with_seed((layer * vocabulary + token) as u64);
            // Topics of neighbouring layers mostly agree, so labels shared by the layers are useful.
            let topic = if random.u8(..) < 128 { token % TOPICS } else { random.usize(..TOPICS) };
            let turn = random.usize(..8);
            let drawn = count.min(MAX_DRAWN);
            for _ in 0..drawn {
                let mut open = top_k;
                let mut taken = 0u64;
                while open > 0 {
                    let place = cube[random.usize(..4096)] ^ turn;
                    let bit = 1u64 << (place % 64);
                    if place < 64 && taken & bit == 0 {
                        taken |= bit;
                        on_expert[orders[topic][place]] += (count / drawn) as u32;
                        open -= 1;
                    }
                }
            }
            let seen = (0u16..).zip(&mut on_expert).filter(|(_, count)| **count > 0);
            let (experts, counts): (Vec<u16>, Vec<u32>) =
                seen.map(|(expert, count)| (expert, std::mem::take(count))).unzip();
            entries += experts.len();
            let row = ProfileRow { experts: &experts, counts: &counts };
            writer.push(LayerIdx::new(layer as u16), TokenId::new(token as u32), row)?;
        }
    }
    writer.finish()?;
    writeln!(std::io::stdout(), "{} tokens, {entries} counts", counts.iter().sum::<u64>())?;
    Ok(())
}

/// Occurrences of each token by Zipf's law, in a shuffled vocabulary, rounded to multiples of the draws.
fn zipf(vocabulary: usize, tokens: u64) -> Vec<u64> {
    let harmonic: f64 = (1..=vocabulary).map(|rank| 1.0 / rank as f64).sum();
    let mut counts: Vec<u64> = (1..=vocabulary)
        .map(|rank| {
            let count = (tokens as f64 / harmonic / rank as f64).round() as u64;
            if count > MAX_DRAWN { count / MAX_DRAWN * MAX_DRAWN } else { count }
        })
        .collect();
    fastrand::Rng::with_seed(1).shuffle(&mut counts);
    counts
}
