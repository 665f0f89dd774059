//! Profiles as large as those of real models, to solve.
//!
//! Tokens follow Zipf's law. Each has a topic per layer, whose order of experts it perturbs, and draws its experts from
//! the front of that order: about 20 different ones per token and layer, more than the 15 of recorded profiles of
//! OLMoE, so that the figures are on the safe side.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::error::BenchError;

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

struct Shape {
    vocabulary: usize,
    layers: usize,
    experts: usize,
    top_k: usize,
}

impl Size {
    fn shape(self) -> Shape {
        let (vocabulary, layers, experts, top_k) = match self {
            Size::V2Lite => (102_400, 26, 64, 6),
            Size::Qwen30 => (151_936, 48, 128, 8),
            Size::Qwen235 => (151_936, 94, 128, 8),
            Size::DeepseekV3 => (129_280, 58, 256, 8),
        };
        Shape { vocabulary, layers, experts, top_k }
    }
}

/// Occurrences that are drawn one by one; what is above repeats them.
const MAX_DRAWN: u64 = 48;
const TOPICS: usize = 24;

/// Writes the profile without the builder, whose evidence takes several times the memory of the file.
pub(crate) fn make(size: Size, file: &Path, tokens: u64) -> Result<(), BenchError> {
    let shape = &size.shape();
    let counts = zipf(shape.vocabulary, tokens);
    let cube: Vec<usize> =
        (0..4096).map(|u| ((f64::from(u) / 4096.0).powi(6) * shape.experts as f64) as usize).collect();
    let (mut indptr, mut experts, mut activations) = (Vec::new(), Vec::<u16>::new(), Vec::<u32>::new());
    let mut on_expert = vec![0u32; shape.experts];
    for layer in 0..shape.layers {
        let mut orders: Vec<Vec<usize>> = vec![(0..shape.experts).collect(); TOPICS];
        let mut random = fastrand::Rng::with_seed(layer as u64);
        orders.iter_mut().for_each(|order| random.shuffle(order));
        for (token, &count) in counts.iter().enumerate() {
            indptr.push(experts.len() as u64);
            let mut random = fastrand::Rng::with_seed((layer * shape.vocabulary + token) as u64);
            // Topics of neighbouring layers agree mostly, so that labels shared by the layers are worth something.
            let topic = if random.u8(..) < 128 { token % TOPICS } else { random.usize(..TOPICS) };
            let turn = random.usize(..8);
            let drawn = count.min(MAX_DRAWN);
            for _ in 0..drawn {
                let mut open = shape.top_k;
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
            for (expert, count) in on_expert.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
                experts.push(expert as u16);
                activations.push(std::mem::take(count));
            }
        }
        indptr.push(experts.len() as u64);
    }
    write(shape, file, &Columns { counts, indptr, experts, activations })
        .map_err(|cause| BenchError::File { path: file.display().to_string(), cause })
}

/// Occurrences of each token by Zipf's law, in a shuffled vocabulary; multiples of what is drawn.
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

struct Columns {
    counts: Vec<u64>,
    indptr: Vec<u64>,
    experts: Vec<u16>,
    activations: Vec<u32>,
}

fn write(shape: &Shape, file: &Path, columns: &Columns) -> io::Result<()> {
    let Columns { counts, indptr, experts, activations } = columns;
    let layers: Vec<usize> = (0..shape.layers).collect();
    let metadata = BTreeMap::from([
        ("format", "semmoe.profile".to_owned()),
        ("version", "1".into()),
        ("model", "synthetic".into()),
        ("tokenizer_sha256", String::new()),
        ("num_experts", shape.experts.to_string()),
        ("top_k", shape.top_k.to_string()),
        ("vocab_size", shape.vocabulary.to_string()),
        ("num_hidden_layers", shape.layers.to_string()),
        ("layer_ids", serde_json::json!(layers).to_string()),
        ("source", "scale".into()),
        ("created", "2026-01-01T00:00:00Z".into()),
        ("phase", "all".into()),
    ]);
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), serde_json::json!(metadata));
    let mut offset = 0;
    let shapes = [
        ("token_count", "U64", 8, vec![counts.len()]),
        ("indptr", "U64", 8, vec![shape.layers, shape.vocabulary + 1]),
        ("count", "U32", 4, vec![activations.len()]),
        ("expert", "U16", 2, vec![experts.len()]),
    ];
    for (name, dtype, bytes, shape) in shapes {
        let end = offset + bytes * shape.iter().product::<usize>();
        header.insert(name.into(), serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}));
        offset = end;
    }
    let mut header = serde_json::json!(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut out = BufWriter::new(File::create(file)?);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    counts.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))?;
    indptr.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))?;
    activations.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))?;
    experts.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))?;
    out.flush()?;
    writeln!(std::io::stdout(), "{} tokens, {} counts", counts.iter().sum::<u64>(), experts.len())?;
    Ok(())
}
