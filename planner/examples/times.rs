//! How long planning takes: all strategies for 64 GPUs, and one layer over 1,000 data centres.
//!
//! `cargo run --release -p semmoe-planner --example times -- config.json`

#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::time::Instant;

use semmoe_planner::cluster::Cluster;
use semmoe_planner::hybridep::{Centre, simulate};
use semmoe_planner::search::{Question, search};
use semmoe_planner::shape::ModelShape;
use semmoe_planner::step::Constants;
use semmoe_planner::workload::Workload;

const CLUSTER: &str = "gpu = \"H200\"\n[[levels]]\nname = \"nvlink\"\ncount = 8\nbandwidth_gb_per_second = 450\nlatency_us = 3\n\
    [[levels]]\nname = \"network\"\ncount = 8\nbandwidth_gb_per_second = 50\nlatency_us = 12\n";
const WORKLOAD: &str =
    "requests_per_second = 20\ninput_tokens = 2048\noutput_tokens = 512\nttft_ms = 2000\nitl_ms = 50\n";
const ROUNDS: usize = 9;
const CENTRES: usize = 1000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).ok_or("the path of a config.json is needed")?;
    let shape = ModelShape::from_config(&file, &std::fs::read_to_string(&file)?)?;
    let cluster = Cluster::from_toml("the cluster", CLUSTER)?;
    let workload = Workload::from_toml("the workload", WORKLOAD)?;
    let constants = Constants::uncalibrated();
    let question = Question { shape: &shape, cluster: &cluster, workload: &workload, constants: &constants };
    let mut times = Vec::new();
    let mut strategies = 0;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        strategies = search(&question)?.strategies;
        times.push(begun.elapsed());
    }
    times.sort();
    println!("{strategies} strategies on units of 1 to 64 GPUs: {:?} (median of {ROUNDS})", times[ROUNDS / 2]);

    // 10 Gbit/s between centres, 64 MB of hidden states and 0.1 MB of experts (compressed) a layer, 10 ms before the
    // experts.
    let centres = vec![Centre { bytes_per_second: 1.25e9, before_experts: 0.01, data_bytes: 64e6 }; CENTRES];
    let begun = Instant::now();
    let ep = simulate(&centres, 1e5, 1)?;
    for domain in [10, 50, 100, 250, 500, 1000] {
        let found = simulate(&centres, 1e5, domain)?;
        println!(
            "{CENTRES} centres, domains of {domain}: {:.4} s a layer, {:.2} times EP's speed",
            found.seconds,
            ep.seconds / found.seconds
        );
    }
    println!("seven simulations of {CENTRES} centres: {:?}", begun.elapsed());
    Ok(())
}
