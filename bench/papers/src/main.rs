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
    /// A row of a paper: runs it and compares its verdict. Without a row all of the paper are listed.
    One {
        paper: Paper,
        /// As `figure-4`.
        row: Option<String>,
    },
    /// All rows of all papers: compares the verdicts and writes docs/papers.md.
    All {
        /// Less data where a row takes minutes; its figures on the page stay those of the last full run.
        #[arg(long)]
        small: bool,
    },
    /// Predictions for measured rows, for python/fit.py.
    Rows {
        /// One row a line.
        #[arg(value_name = "ROWS.jsonl")]
        file: PathBuf,
    },
    /// Published throughputs of several layouts against the planner: shares of pairs whose ranks are right.
    Published {
        /// Only pairs that are ranked the other way round, and the shares.
        #[arg(long)]
        wrong: bool,
    },
    /// The cost of compressed experts in perplexity, and which ratios are therefore refused (exit code 2).
    SrPerplexity {
        /// Largest rise of perplexity, as a share.
        #[arg(long, value_name = "SHARE", default_value_t = 0.01)]
        limit: f64,
        /// Ratios of compression.
        #[arg(default_values_t = [2, 5, 10, 50], value_parser = clap::value_parser!(u16).range(1..))]
        ratios: Vec<u16>,
    },
    /// One layer over data centres, by size of the expert domains.
    Centres {
        /// How many; domain sizes must divide it.
        #[arg(long, default_value_t = 1000)]
        count: usize,
        /// Sizes of domains.
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

/// 10 Gbit/s between centres, 64 MB of hidden states and 0.1 MB of experts (compressed) a layer, 10 ms before the
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
