//! How fast `build` counts a trace of 1.5 GB, and in how much memory.
//!
//! `cargo run --release -p semmoe-profiler --example scale -- [DIR] [TOKENS]` makes a trace of 10 million tokens of the
//! shape of DeepSeek-V2-Lite (26 layers, top-6 of 64, vocabulary 102,400) in DIR (default: a temporary folder, which
//! goes afterwards), builds it on one and on two threads, each in a process of its own, and in shards merged in two
//! orders, and compares the bytes.
#![allow(clippy::print_stdout, reason = "a tool that prints")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use semmoe_profiler::{BuildOptions, MergeOptions, NoProgress, build, merge};
use semmoe_tables::{ModelInfo, Provenance, TraceWriter};

const LAYERS: u16 = 26;
const TOP_K: u16 = 6;
const EXPERTS: u16 = 64;
const VOCABULARY: u32 = 102_400;
const REQUEST_TOKENS: usize = 1000;
const SHARDS: usize = 4;

type Failed = Box<dyn Error>;

fn main() -> Result<(), Failed> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        // In a process of its own, as the peak of memory is a process's.
        Some("build") => child(&arguments[1..]),
        _ => run(&arguments),
    }
}

fn run(arguments: &[String]) -> Result<(), Failed> {
    let temporary = tempfile::tempdir()?;
    let directory = arguments.first().map_or_else(|| temporary.path().to_path_buf(), PathBuf::from);
    let tokens: usize = arguments.get(1).map_or(Ok(10_000_000), |text| text.parse())?;
    let began = Instant::now();
    let shards: Vec<PathBuf> = (0..SHARDS).map(|i| directory.join(format!("shard{i}.trace"))).collect();
    for (seed, path) in shards.iter().enumerate() {
        generate(path, tokens / SHARDS, seed as u64)?;
    }
    let bytes: u64 = shards.iter().map(|path| std::fs::metadata(path).map(|m| m.len())).sum::<Result<_, _>>()?;
    println!("{tokens} tokens, {:.2} GB of traces, made in {:.0} s", bytes as f64 / 1e9, began.elapsed().as_secs_f64());
    let profile = |threads: usize| directory.join(format!("{threads}.profile"));
    for threads in [1, 2] {
        build_in_child(threads, &profile(threads), &shards)?;
    }
    same(&profile(1), &profile(2), "one and two threads")?;
    let parts: Vec<PathBuf> = (0..SHARDS).map(|i| directory.join(format!("part{i}.profile"))).collect();
    for (part, shard) in parts.iter().zip(&shards) {
        build(&BuildOptions::new(vec![shard.clone().into()], part.clone()), &NoProgress)?;
    }
    for (name, reversed) in [("in order", false), ("reversed", true)] {
        let mut inputs: Vec<_> = parts.iter().map(|part| part.clone().into()).collect();
        if reversed {
            inputs.reverse();
        }
        let (out, began) = (directory.join("merged.profile"), Instant::now());
        merge(&MergeOptions::new(inputs, out.clone()))?;
        println!("{SHARDS} shards merged {name} in {:.1} s", began.elapsed().as_secs_f64());
        same(&profile(1), &out, "one build and merged shards")?;
    }
    Ok(())
}

/// Runs `build` in this program again and passes its line on.
fn build_in_child(threads: usize, out: &Path, shards: &[PathBuf]) -> Result<(), Failed> {
    let status =
        Command::new(std::env::current_exe()?).arg("build").arg(threads.to_string()).arg(out).args(shards).status()?;
    if status.success() { Ok(()) } else { Err("the build failed".into()) }
}

fn child(arguments: &[String]) -> Result<(), Failed> {
    let [threads, out, traces @ ..] = arguments else { return Err("build THREADS OUT TRACE...".into()) };
    let traces = traces.iter().map(|path| PathBuf::from(path).into()).collect();
    let options = BuildOptions { threads: threads.parse()?, ..BuildOptions::new(traces, out.into()) };
    let began = Instant::now();
    let report = build(&options, &NoProgress)?;
    let seconds = began.elapsed().as_secs_f64();
    let rate = report.tokens as f64 * f64::from(LAYERS) / seconds / 1e6;
    println!(
        "{threads} threads: {seconds:.1} s, {rate:.1} million token-layers/s, {} passes, peak {} MB, profile {} MB",
        report.passes,
        peak_memory_mb().map_or("?".to_owned(), |mb| mb.to_string()),
        std::fs::metadata(out)?.len() / 1_000_000
    );
    Ok(())
}

fn same(a: &Path, b: &Path, what: &str) -> Result<(), Failed> {
    if std::fs::read(a)? != std::fs::read(b)? {
        return Err(format!("different profiles: {what}").into());
    }
    println!("the same bytes: {what}");
    Ok(())
}

/// Pages of mapped files included. Linux only.
fn peak_memory_mb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? / 1000)
}

/// Tokens by a law of Zipf; each has its own favourites in each layer, and now and then other experts.
fn generate(path: &Path, tokens: usize, seed: u64) -> Result<(), Failed> {
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
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1);
    let mut left = tokens;
    while left > 0 {
        let length = left.min(REQUEST_TOKENS);
        let ids: Vec<u32> = (0..length).map(|_| random.zipf()).collect();
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

/// Six distinct experts: a walk with an odd step through a power of two meets each once.
fn push_route(experts: &mut Vec<u16>, id: u32, layer: u16, random: &mut Random) {
    let own = u64::from(id).wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(u64::from(layer) * 0x9e37_79b9);
    let mixed = (own ^ (own >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 20;
    let chance = random.next();
    let start = if chance % 10 < 7 { mixed } else { chance >> 8 } + (chance >> 40) % 3;
    let step = (mixed >> 8) * 2 + 1;
    experts.extend((0..u64::from(TOP_K)).map(|i| ((start + i * step) % u64::from(EXPERTS)) as u16));
}

/// Xorshift: fast, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Ranks with a probability of about one over the rank.
    fn zipf(&mut self) -> u32 {
        let uniform = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        let rank = (f64::from(VOCABULARY).ln() * uniform).exp();
        (rank as u32).min(VOCABULARY - 1)
    }
}
