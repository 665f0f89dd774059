//! Timings of single parts of semmoe. README.md says where the figures are.
#![allow(clippy::print_stdout, reason = "a program that prints figures")]

mod collectives;
mod decide;
mod differential;
mod measure;
mod pipeline;
mod traces;
mod wire;
mod worker;

use std::path::{Path, PathBuf};

use clap::Parser;
use semmoe_engines::routed::{self, Place};
use semmoe_planner::cluster::Cluster;
use semmoe_planner::search::{Question, search};
use semmoe_planner::shape::ModelShape;
use semmoe_planner::step::Constants;
use semmoe_planner::workload::Workload;

use measure::{Outcome, median, timed};

/// Times single parts of semmoe.
#[derive(Debug, Parser)]
#[command(name = "semmoe-bench-parts")]
enum Command {
    /// Compare the fast encoder with the oracle: prompts, every code point, random texts.
    Differential {
        /// `tokenizer.json`.
        tokenizer: PathBuf,
        /// Number of random texts.
        count: u64,
        /// JSONL files with "prompt" or "messages".
        prompts: Vec<PathBuf>,
    },
    /// Time the scoring of a prompt; on one thread with FASTOKENS_BPE_THREADS=1.
    Wire {
        /// `tokenizer.json`.
        tokenizer: PathBuf,
        /// Ranks in the table.
        ranks: u16,
        /// JSONL files with "prompt".
        prompts: Vec<PathBuf>,
    },
    /// Time one decision over 4 to 64 ranks, by policy.
    Decide {
        /// Decisions per measurement.
        #[arg(default_value_t = 200_000)]
        decisions: u64,
    },
    /// Time the removal of routed experts from an answer.
    Cut,
    /// Time the CPU's collectives against a copy, and the argsort.
    Collectives {
        /// Rounds over all candidates.
        #[arg(default_value_t = 40)]
        rounds: usize,
    },
    /// Time a decode step by layout and batch.
    Curves,
    /// Time layout switches against a copy of as many bytes.
    Switch,
    /// Time a switch between two hosts, as one of its two ranks: bench/switch/pipeline starts both.
    Pipeline(pipeline::Settings),
    /// Measure how much of the time spent reading experts overlaps with computation.
    Stream,
    /// Time the search of all strategies for 64 GPUs.
    Search {
        /// A model's `config.json`.
        config: PathBuf,
    },
    /// Write traces in the shape of DeepSeek-V2-Lite, in four shards.
    Traces {
        /// Output folder.
        folder: PathBuf,
        /// Total number of tokens.
        #[arg(default_value_t = 10_000_000)]
        tokens: usize,
    },
}

fn main() -> Outcome<()> {
    match Command::parse() {
        Command::Differential { tokenizer, count, prompts } => differential::run(&tokenizer, count, &prompts),
        Command::Wire { tokenizer, ranks, prompts } => wire::run(&tokenizer, ranks, &prompts),
        Command::Decide { decisions } => decide::run(decisions),
        Command::Cut => cut(),
        Command::Collectives { rounds } => collectives::run(rounds),
        Command::Curves => worker::curves::run(),
        Command::Switch => worker::switch::run(),
        Command::Pipeline(settings) => pipeline::run(&settings),
        Command::Stream => worker::stream::run(),
        Command::Search { config } => plan(&config),
        Command::Traces { folder, tokens } => traces::write(&folder, tokens),
    }
}

fn cut() -> Outcome<()> {
    for mib in [1usize, 2, 8] {
        let (text, experts) = ("x".repeat(2000), "A".repeat(mib << 20));
        let answer = format!(r#"{{"text":"{text}","meta_info":{{"id":1,"routed_experts":"{experts}"}}}}"#);
        let seconds = timed(20, || match routed::cut(Place::MetaInfo, answer.as_bytes())? {
            Some(cut) if cut.found && cut.rest.len() < 3000 => Ok(cut),
            _ => Err("the experts were not cut out".into()),
        })?;
        println!("{mib} MiB: {:.2} ms", seconds.into_iter().fold(f64::INFINITY, f64::min) * 1e3);
    }
    Ok(())
}

const CLUSTER: &str = "gpu = \"H200\"\n[[levels]]\nname = \"nvlink\"\ncount = 8\nbandwidth_gb_per_second = 450\nlatency_us = 3\n\
    [[levels]]\nname = \"network\"\ncount = 8\nbandwidth_gb_per_second = 50\nlatency_us = 12\n";
const WORKLOAD: &str =
    "requests_per_second = 20\ninput_tokens = 2048\noutput_tokens = 512\nttft_ms = 2000\nitl_ms = 50\n";

fn plan(config: &Path) -> Outcome<()> {
    let shape = ModelShape::from_config(&config.display().to_string(), &std::fs::read_to_string(config)?)?;
    let cluster = Cluster::from_toml("the cluster", CLUSTER)?;
    let workload = Workload::from_toml("the workload", WORKLOAD)?;
    let constants = Constants::uncalibrated();
    let question = Question { shape: &shape, cluster: &cluster, workload: &workload, constants: &constants };
    let strategies = search(&question)?.strategies;
    let seconds = median(timed(9, || Ok(search(&question)?))?);
    println!("{strategies} strategies on units of 1 to 64 GPUs: {:.1} ms (median of 9)", 1e3 * seconds);
    Ok(())
}
