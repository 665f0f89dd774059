//! Figures of papers: every row by itself or all of them, and the programs behind some. See README.md.
#![allow(clippy::print_stdout, reason = "a program that prints tables")]

mod outcome;
mod papers;
mod perplexity;
mod published;
mod rows;
mod texts;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use outcome::Outcome;
use papers::Paper;
use semmoe_bench_papers::centres::{Centre, simulate};
use semmoe_planner::step::Constants;

/// Reproduces figures of papers.
#[derive(Debug, Parser)]
#[command(name = "semmoe-bench-papers")]
enum Command {
    /// Runs one row of a paper and compares its verdict; without a row lists all of the paper's.
    One {
        paper: Paper,
        /// For example `figure-4`.
        row: Option<String>,
    },
    /// Runs all rows of all papers, compares the verdicts and writes docs/papers.md.
    All {
        /// Use less data where a row takes minutes; the page keeps the figures of the last full run.
        #[arg(long)]
        small: bool,
    },
    /// Predictions for measured rows, for python/fit.py.
    Rows {
        /// One row a line.
        #[arg(value_name = "ROWS.jsonl")]
        file: PathBuf,
    },
    /// Compares published throughputs of several layouts with the planner: shares of correctly ranked pairs.
    Published {
        /// Print only pairs that are ranked the wrong way round, and the shares.
        #[arg(long)]
        wrong: bool,
    },
    /// The perplexity cost of compressed experts, and the ratios that it rules out (exit code 2).
    SrPerplexity {
        /// Largest acceptable rise of perplexity, as a fraction.
        #[arg(long, value_name = "SHARE", default_value_t = 0.01)]
        limit: f64,
        /// Compression ratios.
        #[arg(default_values_t = [2, 5, 10, 50], value_parser = clap::value_parser!(u16).range(1..))]
        ratios: Vec<u16>,
    },
    /// One layer over data centres, by expert domain size.
    Centres {
        /// Number of centres; domain sizes must divide it.
        #[arg(long, default_value_t = 1000)]
        count: usize,
        /// Domain sizes.
        #[arg(long, value_delimiter = ',', default_value = "10,50,100,250,500,1000")]
        domains: Vec<u64>,
    },
}

fn main() -> Outcome<ExitCode> {
    match Command::parse() {
        Command::One { paper, row } => return papers::one(paper, row.as_deref()),
        Command::All { small } => return papers::all(small),
        Command::Rows { file } => rows::answer(&file)?,
        Command::Published { wrong } => published::print(wrong, &Constants::uncalibrated())?,
        Command::SrPerplexity { limit, ratios } => return perplexity::judge(limit, &ratios),
        Command::Centres { count, domains } => centres(count, &domains)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// 10 Gbit/s between centres; per layer 64 MB of hidden states, 0.1 MB of (compressed) experts, and 10 ms before the
/// experts.
fn centres(count: usize, domains: &[u64]) -> Outcome<()> {
    let centres = vec![Centre { bytes_per_second: 1.25e9, before_experts: 0.01, data_bytes: 64e6 }; count];
    let began = Instant::now();
    let ep = simulate(&centres, 1e5, 1)?;
    for &domain in domains {
        let found = simulate(&centres, 1e5, domain)?;
        let gain = ep.seconds / found.seconds;
        println!("{count} centres, domains of {domain}: {:.4} s a layer, {gain:.2} times EP's speed", found.seconds);
    }
    println!("{} simulations: {:?}", domains.len() + 1, began.elapsed());
    Ok(())
}
