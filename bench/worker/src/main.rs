//! One rank of the worker, on one thread by default, against candle-transformers' `qwen3_moe` on as many as it takes,
//! with the bundled checkpoint and recorded prompts, alternating; and the worker against the machine's limits. Prints
//! the tables of README.md.
//!
//! `cargo run --release --manifest-path bench/worker/Cargo.toml [-- ROUNDS [THREADS]]`

mod candle;
mod machine;
mod ours;
mod parts;
mod work;

use std::path::{Path, PathBuf};
use std::time::Instant;

use semmoe_tables::Trace;
use semmoe_worker::model::with_threads;

use crate::candle::Candle;
use crate::ours::Ours;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const DEFAULT_ROUNDS: usize = 5;
const NEW_TOKENS: usize = 64;

/// The engines' task: sequences of equal length, decoded greedily.
trait Engine {
    /// Starts new sequences and returns the token after each.
    fn prefill(&mut self, prompts: &[Vec<u32>]) -> Outcome<Vec<u32>>;
    /// Appends one token to each sequence and returns the next.
    fn decode(&mut self, tokens: &[u32]) -> Outcome<Vec<u32>>;
}

/// Sequences and tokens of each prompt.
#[derive(Clone, Copy)]
struct Case {
    batch: usize,
    prompt: usize,
}

const CASES: [Case; 6] = [
    Case { batch: 1, prompt: 128 },
    Case { batch: 1, prompt: 512 },
    Case { batch: 1, prompt: 1920 },
    Case { batch: 16, prompt: 128 },
    Case { batch: 16, prompt: 512 },
    Case { batch: 64, prompt: 128 },
];

/// Times of one round in seconds, and the generated tokens.
struct Round {
    prefill: f64,
    decode: f64,
    /// Time of the median step, which excludes steps that the machine interrupted.
    decode_step: f64,
    texts: Vec<Vec<u32>>,
}

fn round(engine: &mut dyn Engine, prompts: &[Vec<u32>]) -> Outcome<Round> {
    let start = Instant::now();
    let mut tokens = engine.prefill(prompts)?;
    let prefill = start.elapsed().as_secs_f64();
    let mut texts: Vec<Vec<u32>> = tokens.iter().map(|token| vec![*token]).collect();
    let mut steps = Vec::with_capacity(NEW_TOKENS);
    for _ in 0..NEW_TOKENS {
        let start = Instant::now();
        tokens = engine.decode(&tokens)?;
        steps.push(start.elapsed().as_secs_f64());
        texts.iter_mut().zip(&tokens).for_each(|(text, token)| text.push(*token));
    }
    Ok(Round { prefill, decode: steps.iter().sum(), decode_step: median(&mut steps), texts })
}

/// Recorded prompts, concatenated and cut.
fn prompts(case: Case) -> Outcome<Vec<Vec<u32>>> {
    let trace = Trace::open(&repository("tests/data/reference.trace.safetensors"))?;
    let tokens: Vec<u32> = trace.iter().flat_map(|request| request.token_ids().to_vec()).collect();
    Ok(tokens.chunks_exact(case.prompt).take(case.batch).map(<[u32]>::to_vec).collect())
}

fn repository(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn spread(values: &mut [f64]) -> String {
    let middle = median(values);
    format!("{middle:.2} ({:.2} to {:.2})", values[0], values[values.len() - 1])
}

/// Results of a case's rounds for both engines, this worker first.
#[derive(Default)]
struct Measured {
    prefill: [Vec<f64>; 2],
    decode: [Vec<f64>; 2],
    /// Bounds of this worker's decode step: see [`work::Bounds`].
    by_copy: Vec<f64>,
    by_read: Vec<f64>,
    apart: Vec<f64>,
    /// Seconds of its median decode step.
    steps: Vec<f64>,
}

impl Measured {
    fn add(&mut self, case: Case, rounds: &[Round; 2], bounds: &work::Bounds) {
        for (engine, round) in rounds.iter().enumerate() {
            self.prefill[engine].push((case.batch * case.prompt) as f64 / round.prefill);
            self.decode[engine].push((case.batch * NEW_TOKENS) as f64 / round.decode);
        }
        let step = rounds[0].decode_step;
        self.steps.push(step);
        self.by_copy.push(bounds.by_copy / step);
        self.by_read.push(bounds.by_read / step);
        self.apart.push(bounds.apart / step);
    }

    fn print(mut self, case: Case) {
        let shares = [&mut self.by_copy, &mut self.by_read, &mut self.apart].map(|shares| spread(shares)).join(" | ");
        let none = "- | - | -".to_owned();
        for (phase, mut rates, shares) in [("prefill", self.prefill, none), ("decode", self.decode, shares)] {
            let mut ratios: Vec<f64> = rates[0].iter().zip(&rates[1]).map(|(ours, other)| ours / other).collect();
            println!(
                "| {phase} | {} x {} | {:.0} | {:.0} | {} | {shares} |",
                case.batch,
                case.prompt,
                median(&mut rates[0]),
                median(&mut rates[1]),
                spread(&mut ratios),
            );
        }
    }
}

fn run_case(case: Case, rounds: usize, ours: &mut Ours, other: &mut Candle) -> Outcome<String> {
    let prompts = prompts(case)?;
    // A warm-up round, which counts the experts that a step reads.
    ours.count_experts(true);
    let (first, second) = (round(ours, &prompts)?, round(other, &prompts)?);
    let step = work::decode_step(ours.config(), case.batch, case.prompt + NEW_TOKENS / 2, ours.experts_per_step());
    ours.count_experts(false);
    let pairs = first.texts.iter().flatten().zip(second.texts.iter().flatten());
    let equal = pairs.clone().filter(|(a, b)| a == b).count() as f64 / pairs.count() as f64;

    let mut measured = Measured::default();
    let mut machines = [Vec::new(), Vec::new(), Vec::new()];
    for at in 0..rounds {
        let machine = machine::measure(step.bytes)?;
        let both = match at % 2 {
            0 => [round(ours, &prompts)?, round(other, &prompts)?],
            _ => {
                let second = round(other, &prompts)?;
                [round(ours, &prompts)?, second]
            }
        };
        measured.add(case, &both, &step.bounds(&machine));
        let rates = [machine.copied_per_second, machine.read_per_second, machine.ops_per_second];
        machines.iter_mut().zip(rates).for_each(|(rates, rate)| rates.push(rate / 1e9));
    }
    let step_ms = median(&mut measured.steps) * 1e3;
    measured.print(case);
    eprintln!("{} x {}: {:.1}% of the greedy tokens are equal", case.batch, case.prompt, equal * 100.0);
    let [copy, read, gemm] = machines.map(|mut rates| median(&mut rates));
    let (bytes, ops) = (step.bytes as f64 / 1e6, step.ops as f64 / 1e6);
    let Case { batch, prompt } = case;
    Ok(format!("| {batch} x {prompt} | {bytes:.1} | {ops:.0} | {copy:.0} | {read:.0} | {gemm:.0} | {step_ms:.3} |"))
}

/// Parts of this worker's decode step, one column per case.
fn print_parts(cases: &[Case], ours: &mut Ours) -> Outcome<()> {
    let mut columns = Vec::new();
    for case in cases {
        let prompts = prompts(*case)?;
        ours.time_parts(true);
        round(ours, &prompts)?;
        columns.extend(ours.time_parts(false));
    }
    let names: Vec<String> = cases.iter().map(|case| format!(" {} x {} |", case.batch, case.prompt)).collect();
    println!("\n| microseconds of a decode step |{}\n| --- |{}", names.concat(), " --- |".repeat(cases.len()));
    for (part, name) in parts::PARTS.iter().enumerate() {
        let of = |parts: &parts::Parts| format!(" {:.0} |", parts.seconds[part] / parts.steps as f64 * 1e6);
        println!("| {name} |{}", columns.iter().map(of).collect::<String>());
    }
    Ok(())
}

fn main() -> Outcome<()> {
    let argument = |at, default| std::env::args().nth(at).map_or(Ok(default), |value| value.parse());
    let (rounds, threads) = (argument(1, DEFAULT_ROUNDS)?, argument(2, 1)?);
    if threads > 1 {
        println!("Large work of both on {threads} threads; the roofline is that of one.\n");
    }
    // The model's errors are not `Send`.
    Ok(with_threads(threads, || compare(rounds).map_err(|error| error.to_string()))??)
}

fn compare(rounds: usize) -> Outcome<()> {
    let model_dir = repository("assets/tiny-qwen3moe-15m");
    let mut ours = Ours::load(&model_dir)?;
    let mut other = Candle::load(&model_dir)?;
    println!("Medians of {rounds} rounds; tokens/s.\n");
    println!(
        "| phase | sequences x prompt | semmoe | candle | ratio | of the roofline | by reads | of the sum |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |"
    );
    let mut works = Vec::new();
    for case in CASES {
        works.push(run_case(case, rounds.max(1), &mut ours, &mut other)?);
    }
    println!(
        "\n| decode step | MB | million operations | copy GB/s | read GB/s | GFLOP/s | ms |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n{}",
        works.join("\n")
    );
    print_parts(&CASES, &mut ours)
}
