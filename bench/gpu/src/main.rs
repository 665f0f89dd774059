//! `semmoe-bench-gpu COMMAND [OPTIONS]`: prints JSON, or one sentence on standard error. `bench/gpu/run` drives it.
//!
//! All ranks share one GPU and one launch, with `gridDim.y` = ranks, except in `processes`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

mod attention;
mod checks;
mod exchange;
mod machine;
mod measure;
mod nvls;
mod options;
mod planted;
mod predict;
mod processes;
mod product;
mod reshard;
mod setting;
mod times;
mod unit;
mod world;

use std::process::ExitCode;

use machine::Machine;
use measure::Report;
use options::{Command, Options};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let options = match Options::parse(&arguments) {
        Ok(options) => options,
        Err(sentence) => {
            eprintln!("error: {sentence}\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    match answer(&options) {
        Ok((document, good)) => {
            println!("{document:#}");
            if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(sentence) => {
            eprintln!("error: {sentence}");
            ExitCode::FAILURE
        }
    }
}

fn answer(options: &Options) -> Report {
    match &options.command {
        Command::Check => checks::report(&Machine::of(options)?, options),
        Command::Times => times::report(&Machine::of(options)?, options),
        Command::Planted => planted::report(&Machine::of(options)?),
        Command::Processes => processes::report(options),
        Command::Rank(rank) => processes::rank(options, rank),
        Command::Unit => unit::report(options),
        Command::Predict => Ok((predict::document(), true)),
    }
}
