//! Time and memory at the size of real models, on synthetic profiles.
//!
//! * `scale make NAME FILE [TOKENS]` writes a profile as large as NAME's would be (`v2-lite`, `qwen3-30b`,
//!   `qwen3-235b`, `deepseek-v3`) after TOKENS tokens (two million).
//! * `scale solve FILE GROUPS dp|tp [STARTS] [--tokenizer FILE] [--embeddings FILE]` solves it on two threads and
//!   prints seconds and peak memory.
//!
//! Tokens follow Zipf's law. Each has a topic per layer, whose order of experts it perturbs, and draws its experts from
//! the front of that order: about 20 different ones per token and layer, more than the 15 of recorded profiles of
//! OLMoE, so that the figures are on the safe side.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use semmoe_solver::{SolveOptions, TokenStrings, solve};
use semmoe_tables::{Attention, Embeddings, Profile, Provenance};
use semmoe_text::Tokenizer;

struct Shape {
    vocabulary: usize,
    layers: usize,
    experts: usize,
    top_k: usize,
}

/// Occurrences that are drawn one by one; what is above repeats them.
const MAX_DRAWN: u64 = 48;
const TOPICS: usize = 24;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let priors =
        Priors { tokenizer: flag(&mut arguments, "--tokenizer"), embeddings: flag(&mut arguments, "--embeddings") };
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["make", name, file] => make(&shape(name)?, Path::new(file), 2_000_000),
        ["make", name, file, tokens] => make(&shape(name)?, Path::new(file), tokens.parse()?),
        ["solve", file, groups, attention] => {
            measure(Path::new(file), groups.parse()?, attention.parse()?, None, &priors)
        }
        ["solve", file, groups, attention, starts] => {
            measure(Path::new(file), groups.parse()?, attention.parse()?, Some(starts.parse()?), &priors)
        }
        _ => Err("usage: scale make NAME FILE [TOKENS] | scale solve FILE GROUPS dp|tp [STARTS] [--tokenizer FILE] [--embeddings FILE]".into()),
    }
}

/// T's sources of knowledge besides counts.
struct Priors {
    tokenizer: Option<String>,
    embeddings: Option<String>,
}

/// Takes `name VALUE` out of the arguments.
fn flag(arguments: &mut Vec<String>, name: &str) -> Option<String> {
    let at = arguments.iter().position(|argument| argument == name).filter(|at| at + 1 < arguments.len())?;
    arguments.drain(at..at + 2).nth(1)
}

fn shape(name: &str) -> Result<Shape, Box<dyn Error>> {
    let (vocabulary, layers, experts, top_k) = match name {
        "v2-lite" => (102_400, 26, 64, 6),
        "qwen3-30b" => (151_936, 48, 128, 8),
        "qwen3-235b" => (151_936, 94, 128, 8),
        "deepseek-v3" => (129_280, 58, 256, 8),
        _ => return Err(format!("{name} is not v2-lite, qwen3-30b, qwen3-235b or deepseek-v3").into()),
    };
    Ok(Shape { vocabulary, layers, experts, top_k })
}

fn measure(
    file: &Path,
    groups: u16,
    attention: Attention,
    starts: Option<u32>,
    priors: &Priors,
) -> Result<(), Box<dyn Error>> {
    let begin = Instant::now();
    let profile = Profile::open(file)?;
    let opened = begin.elapsed().as_secs_f64();
    let provenance = Provenance { source: "scale".into(), created: "2026-01-01T00:00:00Z".into() };
    // The bounds have a budget of their own.
    let mut options = SolveOptions { threads: 2, bounds: None, ..SolveOptions::new(groups, attention, provenance) };
    options.starts = starts.unwrap_or(options.starts);
    if let Some(path) = &priors.tokenizer {
        let tokenizer = Tokenizer::from_file(Path::new(path))?;
        options.token_strings = Some(Arc::new(TokenStrings::new(tokenizer.pieces(), None)));
    }
    if let Some(path) = &priors.embeddings {
        options.embeddings = Some(Arc::new(Embeddings::open(Path::new(path), None)?));
    }
    let mut last = (0, begin.elapsed().as_secs_f64());
    let mut first_result = None;
    let solved = solve(&profile, None, &options, &mut |step| {
        let now = begin.elapsed().as_secs_f64();
        if step.best_lar.is_some() {
            first_result.get_or_insert(now);
        }
        if step.starts_done > last.0 {
            last = (step.starts_done, now);
        }
        ControlFlow::Continue(())
    })?;
    let report = &solved.report;
    writeln!(
        std::io::stdout(),
        "{} G={groups} {attention}: {:.1} s (opened {opened:.1}, first result {:.1}, last of {} starts {:.1}), processor {:.1} s, peak {} MiB, of it not file {} MiB | lar {:.4} gap {:.1e} tokens {:.3} experts {:.3} split {} steps {}",
        file.display(),
        begin.elapsed().as_secs_f64(),
        first_result.unwrap_or(f64::NAN),
        last.0,
        last.1,
        processor_seconds(),
        status("VmHWM:"),
        status("RssAnon:"),
        report.lar,
        report.dual_gap,
        report.token_imbalance,
        report.expert_load_imbalance,
        report.split_units,
        report.iterations,
    )?;
    Ok(())
}

/// A line of this process's status, in MiB; zero where the system has none.
fn status(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// User and system time of this process, at the usual hundred ticks a second.
fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let fields: Vec<f64> = after_name.split_whitespace().skip(11).take(2).filter_map(|f| f.parse().ok()).collect();
    fields.iter().sum::<f64>() / 100.0
}

/// Writes the profile without the builder, whose evidence takes several times the memory of the file.
fn make(shape: &Shape, file: &Path, tokens: u64) -> Result<(), Box<dyn Error>> {
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
    write(shape, file, (&counts, &indptr, &experts, &activations))
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

type Columns<'a> = (&'a [u64], &'a [u64], &'a [u16], &'a [u32]);

fn write(
    shape: &Shape,
    file: &Path,
    (counts, indptr, experts, activations): Columns<'_>,
) -> Result<(), Box<dyn Error>> {
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
        ("layer_ids", serde_json::to_string(&layers)?),
        ("source", "scale".into()),
        ("created", "2026-01-01T00:00:00Z".into()),
        ("phase", "all".into()),
    ]);
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), serde_json::to_value(metadata)?);
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
    let mut header = serde_json::to_vec(&header)?;
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
