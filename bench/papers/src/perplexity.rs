//! The quality cost of experts compressed as sparse residuals (HybridEP's SR codec): perplexity of the bundled model on
//! held-out text at each ratio, with the mean of a layer's experts as the shared expert and without one. A ratio fails
//! if perplexity with the shared expert rises beyond the limit.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use semmoe_bench_papers::sr;
use semmoe_tables::{Placement, RankId};
use semmoe_text::Tokenizer;
use semmoe_worker::ep::{ExpertParallel, LocalTransport, StepPhase};
use semmoe_worker::model::{KvCache, Model, ModelConfig, StepItem, Wants};

use crate::Outcome;
use crate::texts::{HELD_OUT, prompts};

pub(crate) const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/tiny-qwen3moe-15m");
/// Number of texts, and tokens in each.
const TEXTS: usize = 96;
const TOKENS: usize = 96;
const MATRICES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// A checkpoint whose experts can be replaced.
struct Checkpoint<'a> {
    config: ModelConfig,
    tensors: SafeTensors<'a>,
}

/// The experts of a layer, each with its matrices concatenated.
pub(crate) type LayerExperts = Vec<Vec<f16>>;

impl Checkpoint<'_> {
    fn name(layer: usize, expert: usize, matrix: &str) -> String {
        format!("model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight")
    }

    fn experts(&self, layer: usize) -> Outcome<LayerExperts> {
        let expert = |expert: usize| -> Outcome<Vec<f16>> {
            let mut weights = Vec::new();
            for matrix in MATRICES {
                let view = self.tensors.tensor(&Self::name(layer, expert, matrix))?;
                let values = view.data().chunks_exact(2).map(|bytes| bf16::from_le_bytes([bytes[0], bytes[1]]));
                weights.extend(values.map(|value| f16::from_f32(value.to_f32())));
            }
            Ok(weights)
        };
        (0..self.config.num_experts).map(expert).collect()
    }

    fn layers(&self) -> Outcome<Vec<LayerExperts>> {
        (0..self.config.num_moe_layers()).map(|layer| self.experts(layer)).collect()
    }

    /// Writes a model directory whose layers have these experts.
    fn write(&self, dir: &Path, layers: &[LayerExperts]) -> Outcome<()> {
        let mut bytes: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
        for (name, view) in self.tensors.tensors() {
            bytes.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
        }
        for (layer, experts) in layers.iter().enumerate() {
            for (expert, weights) in experts.iter().enumerate() {
                let parts = weights.chunks_exact(weights.len() / MATRICES.len());
                for (matrix, part) in MATRICES.into_iter().zip(parts) {
                    let name = Self::name(layer, expert, matrix);
                    let (dtype, _, data) = bytes.get_mut(&name).ok_or("a matrix of an expert is missing")?;
                    (*dtype, *data) = (Dtype::F16, part.iter().flat_map(|value| value.to_le_bytes()).collect());
                }
            }
        }
        let views: Vec<(&String, TensorView<'_>)> = bytes
            .iter()
            .map(|(name, (dtype, shape, data))| Ok((name, TensorView::new(*dtype, shape.clone(), data)?)))
            .collect::<Outcome<_>>()?;
        safetensors::serialize_to_file(views, None, &dir.join("model.safetensors"))?;
        std::fs::copy(Path::new(MODEL).join("config.json"), dir.join("config.json"))?;
        Ok(())
    }
}

/// The compression of transferred experts.
#[derive(Clone, Copy)]
struct Compression {
    ratio: u16,
    /// Whether residuals are relative to the mean of the layer's experts; otherwise to zero.
    shared: bool,
}

/// Experts after compression and decompression.
fn compressed(experts: &LayerExperts, by: Compression) -> LayerExperts {
    let slices: Vec<&[f16]> = experts.iter().map(Vec::as_slice).collect();
    let weights = slices[0].len();
    let shared = if by.shared { sr::mean(&slices) } else { vec![f16::ZERO; weights] };
    let kept = sr::kept(weights, by.ratio.into(), sr::INDEX_BYTES[0]);
    slices.into_iter().map(|expert| sr::decode(&sr::encode(expert, &shared, kept), &shared)).collect()
}

/// The first tokens of held-out conversations.
fn texts(most: usize) -> Outcome<Vec<Vec<u32>>> {
    let tokenizer = Tokenizer::from_file(&Path::new(MODEL).join("tokenizer.json"))?;
    let mut texts = Vec::new();
    for prompt in prompts(HELD_OUT)? {
        let mut ids = tokenizer.encode(&prompt.text())?;
        ids.truncate(TOKENS);
        if ids.len() == TOKENS && texts.len() < most {
            texts.push(ids);
        }
    }
    Ok(texts)
}

/// exp of the mean negative log-likelihood of each next token.
fn perplexity(dir: &Path, texts: &[Vec<u32>]) -> Outcome<f64> {
    let config = ModelConfig::load(dir)?;
    let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, 1)?;
    let mut model = Model::load(dir, RankId::new(0), &placement)?;
    let mut ep = ExpertParallel::new(Box::new(LocalTransport::mesh(1).remove(0)), &placement)?;
    let mut kvs: Vec<KvCache> = texts.iter().map(|_| model.new_sequence()).collect();
    let (mut sum, mut count) = (0.0, 0.0);
    for at in 0..TOKENS - 1 {
        let mut items: Vec<StepItem<'_>> = Vec::new();
        for (kv, text) in kvs.iter_mut().zip(texts) {
            items.push(StepItem { kv, tokens: &text[at..=at], wants: Wants::Logits, phase: StepPhase::Decode });
        }
        let out = model.step(&mut items, &mut ep)?;
        for (index, text) in texts.iter().enumerate() {
            let logits = out.logits(index).ok_or("a step without logits")?;
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
            sum += total.ln() - f64::from(logits[text[at + 1] as usize] - largest);
            count += 1.0;
        }
    }
    Ok(f64::exp(sum / count))
}

/// Checks whether a ratio is acceptable.
fn gate(ratio: u16, rise: f64, limit: f64) -> Result<(), String> {
    // Written so that NaN fails.
    if rise <= limit {
        return Ok(());
    }
    Err(format!("ratio {ratio} is refused: perplexity rises by {:.1}%, the limit is {:.1}%", rise * 1e2, limit * 1e2))
}

/// The bundled model's experts by layer, and the held-out texts.
struct Setup<'a> {
    checkpoint: Checkpoint<'a>,
    layers: Vec<LayerExperts>,
    texts: Vec<Vec<u32>>,
    /// Perplexity without compression.
    plain: f64,
}

impl Setup<'_> {
    fn of(bytes: &[u8], texts_at_most: usize) -> Outcome<Setup<'_>> {
        let checkpoint = checkpoint(bytes)?;
        let layers = checkpoint.layers()?;
        let texts = texts(texts_at_most)?;
        let plain = perplexity(Path::new(MODEL), &texts)?;
        Ok(Setup { checkpoint, layers, texts, plain })
    }

    /// Perplexity with compressed experts.
    fn compressed(&self, by: Compression) -> Outcome<f64> {
        let layers: Vec<LayerExperts> = self.layers.iter().map(|experts| compressed(experts, by)).collect();
        let dir = tempfile::tempdir()?;
        self.checkpoint.write(dir.path(), &layers)?;
        perplexity(dir.path(), &self.texts)
    }
}

fn checkpoint(bytes: &[u8]) -> Outcome<Checkpoint<'_>> {
    Ok(Checkpoint { config: ModelConfig::load(Path::new(MODEL))?, tensors: SafeTensors::deserialize(bytes)? })
}

fn weights() -> Outcome<Vec<u8>> {
    Ok(std::fs::read(Path::new(MODEL).join("model.safetensors"))?)
}

/// The experts of every layer of the bundled model.
pub(crate) fn bundled_experts() -> Outcome<Vec<LayerExperts>> {
    checkpoint(&weights()?)?.layers()
}

/// The relative rise of perplexity at a ratio, on `texts` texts: with the shared expert and without one.
pub(crate) fn rises(ratio: u16, texts: usize) -> Outcome<[f64; 2]> {
    let bytes = weights()?;
    let setup = Setup::of(&bytes, texts)?;
    let rise = |shared| {
        Ok::<_, Box<dyn std::error::Error>>(setup.compressed(Compression { ratio, shared })? / setup.plain - 1.0)
    };
    Ok([rise(true)?, rise(false)?])
}

/// Prints the perplexity at each ratio.
pub(crate) fn judge(limit: f64, ratios: &[u16]) -> Outcome<ExitCode> {
    let bytes = weights()?;
    let setup = Setup::of(&bytes, TEXTS)?;
    println!("{} texts of {TOKENS} tokens; uncompressed: perplexity {:.2}\n", setup.texts.len(), setup.plain);
    println!("| ratio | with the shared expert | rise | without | rise |\n|---|---|---|---|---|");
    let mut refused = Vec::new();
    for &ratio in ratios {
        let with = setup.compressed(Compression { ratio, shared: true })?;
        let without = setup.compressed(Compression { ratio, shared: false })?;
        let rise = |found: f64| found / setup.plain - 1.0;
        println!("| {ratio} | {with:.2} | {:.1}% | {without:.2} | {:.1}% |", rise(with) * 1e2, rise(without) * 1e2);
        refused.extend(gate(ratio, rise(with), limit).err());
    }
    println!();
    refused.iter().for_each(|refusal| println!("{refusal}"));
    Ok(if refused.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}
