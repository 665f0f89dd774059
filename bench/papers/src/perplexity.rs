//! The quality cost of experts compressed as sparse residuals (HybridEP's SR codec): perplexity of the bundled model
//! on held-out text at each ratio, with the mean of a layer's experts as the shared expert and without one, and the
//! gate on it: a ratio is refused if with the shared expert perplexity rises by more than the limit.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use semmoe_bench_papers::sr;
use semmoe_tables::{Placement, RankId};
use semmoe_text::{LineForm, LinePrompt, PromptLines, Tokenizer};
use semmoe_worker::ep::{ExpertParallel, LocalTransport, StepPhase};
use semmoe_worker::model::{KvCache, Model, ModelConfig, StepItem, Wants};
use serde_json::Value;

use crate::Outcome;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/tiny-qwen3moe-15m");
const HELD_OUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/prompts/heldout.jsonl");
/// Texts, and tokens of each: all have so many.
const TEXTS: usize = 96;
const TOKENS: usize = 96;
const MATRICES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// A checkpoint whose experts can be replaced.
struct Checkpoint<'a> {
    config: ModelConfig,
    tensors: SafeTensors<'a>,
}

/// The experts of a layer, each its matrices one after the other.
type LayerExperts = Vec<Vec<f16>>;

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

    /// Writes a model directory with these experts in every layer.
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

/// How experts travel.
#[derive(Clone, Copy)]
struct Compression {
    ratio: u16,
    /// Whether residuals are on the mean of the layer's experts, or are the experts.
    shared: bool,
}

/// Experts as they arrive.
fn compressed(experts: &LayerExperts, by: Compression) -> LayerExperts {
    let slices: Vec<&[f16]> = experts.iter().map(Vec::as_slice).collect();
    let weights = slices[0].len();
    let shared = if by.shared { sr::mean(&slices) } else { vec![f16::ZERO; weights] };
    let kept = sr::kept(weights, by.ratio.into(), sr::INDEX_BYTES[0]);
    slices.into_iter().map(|expert| sr::decode(&sr::encode(expert, &shared, kept), &shared)).collect()
}

/// The first tokens of held-out conversations.
fn texts() -> Outcome<Vec<Vec<u32>>> {
    let tokenizer = Tokenizer::from_file(&Path::new(MODEL).join("tokenizer.json"))?;
    let mut texts = Vec::new();
    for prompt in PromptLines::open(Path::new(HELD_OUT), LineForm::Json)? {
        let text = match prompt? {
            (_, LinePrompt::Messages { messages: Value::Array(messages), .. }) => {
                let contents: Vec<&str> = messages.iter().filter_map(|message| message["content"].as_str()).collect();
                contents.join("\n")
            }
            (_, LinePrompt::Text(prompt)) => prompt,
            _ => return Err("a prompt without a text".into()),
        };
        let mut ids = tokenizer.encode(&text)?;
        ids.truncate(TOKENS);
        if ids.len() == TOKENS && texts.len() < TEXTS {
            texts.push(ids);
        }
    }
    Ok(texts)
}

/// exp of the mean negative logarithm of what the model gave each next token.
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

/// Whether a ratio may be used: one sentence if not.
fn gate(ratio: u16, rise: f64, limit: f64) -> Result<(), String> {
    // Not a number is no rise that is small.
    if rise <= limit {
        return Ok(());
    }
    Err(format!(
        "ratio {ratio} is refused: perplexity rises by {:.1}%, of which {:.1}% are allowed",
        rise * 1e2,
        limit * 1e2
    ))
}

/// Prints the perplexity at each ratio.
pub(crate) fn judge(limit: f64, ratios: &[u16]) -> Outcome<ExitCode> {
    let bytes = std::fs::read(Path::new(MODEL).join("model.safetensors"))?;
    let checkpoint =
        Checkpoint { config: ModelConfig::load(Path::new(MODEL))?, tensors: SafeTensors::deserialize(&bytes)? };
    let layers: Vec<LayerExperts> =
        (0..checkpoint.config.num_moe_layers()).map(|layer| checkpoint.experts(layer)).collect::<Outcome<_>>()?;
    let texts = texts()?;
    let plain = perplexity(Path::new(MODEL), &texts)?;
    println!("{} texts of {TOKENS} tokens; uncompressed: perplexity {plain:.2}\n", texts.len());
    println!("| ratio | with the shared expert | rise | without | rise |\n|---|---|---|---|---|");
    let mut refused = Vec::new();
    for &ratio in ratios {
        let mut found = [0.0; 2];
        for (found, shared) in found.iter_mut().zip([true, false]) {
            let by = Compression { ratio, shared };
            let layers: Vec<LayerExperts> = layers.iter().map(|experts| compressed(experts, by)).collect();
            let dir = tempfile::tempdir()?;
            checkpoint.write(dir.path(), &layers)?;
            *found = perplexity(dir.path(), &texts)?;
        }
        let [with, without] = found;
        let rise = |found: f64| found / plain - 1.0;
        println!("| {ratio} | {with:.2} | {:.1}% | {without:.2} | {:.1}% |", rise(with) * 1e2, rise(without) * 1e2);
        refused.extend(gate(ratio, rise(with), limit).err());
    }
    println!();
    refused.iter().for_each(|refusal| println!("{refusal}"));
    Ok(if refused.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}
