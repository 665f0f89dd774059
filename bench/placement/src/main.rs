//! Placements of experts compared on the same data: the solver, the paper's algorithm and every published baseline.
//!
//! README.md has the tables and their commands. The baselines are in this crate to keep them out of the `semmoe`
//! binary.

mod domains;
mod drift;
mod error;
mod even;
mod given;
mod judge;
mod markdown;
mod methods;
mod priors;
mod requests;
mod sizes;
mod synthetic;
mod transfer;
mod tune;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand};

use semmoe_solver::TokenStrings;
use semmoe_text::Tokenizer;

use crate::error::BenchError;
use crate::methods::Setting;
use crate::priors::Few;
use crate::sizes::Size;
use crate::transfer::Described;

/// Compares placements of experts and prints Markdown tables.
#[derive(Debug, Parser)]
#[command(name = "semmoe-bench-placement")]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Common {
    /// Group counts (EP ranks).
    #[arg(long, global = true, value_delimiter = ',', default_value = "4,8")]
    groups: Vec<u16>,
    /// Random seed.
    #[arg(long, global = true, default_value_t = 1)]
    seed: u64,
    /// Starts of the solver.
    #[arg(long, global = true, default_value_t = 32)]
    starts: u32,
    /// Threads of the solver; do not affect the figures.
    #[arg(long, global = true, default_value_t = 2)]
    threads: usize,
    /// Largest activations of a group over the layer's mean, for the solver.
    #[arg(long, global = true, default_value_t = 1.10)]
    expert_load_limit: f64,
    /// eps: a group gets at most (1 + eps) of the mean tokens, in the solver and in T.
    #[arg(long, global = true, default_value_t = 0.02)]
    token_margin: f64,
    /// The model's tokenizer.json: similar token strings stand in for rare and unseen tokens.
    #[arg(long, global = true, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Solve on all profiles but one, judge on that one; tokens are routed layer by layer.
    Domains {
        /// Profiles of one model, one per domain.
        #[arg(required = true, num_args = 2.., value_name = "PROFILE")]
        profiles: Vec<PathBuf>,
        /// Add placements by other programs (python/programs.py writes such a file).
        #[arg(long, value_name = "FILE")]
        placements: Option<PathBuf>,
    },
    /// Synthetic routing calibrated to the paper's Table 1; tokens are routed layer by layer.
    Synthetic {
        /// Number of requests; half of them to solve on.
        #[arg(long, default_value_t = 3600)]
        requests: usize,
    },
    /// Whole requests: solve on one trace, judge on another.
    Requests {
        /// The trace to solve on.
        solve: PathBuf,
        /// The trace to judge on.
        judge: PathBuf,
    },
    /// Solve on the requests of one kind, judge on those of another.
    Transfer {
        /// The trace to solve on.
        solve: PathBuf,
        /// Its requests: JSON Lines with "domain".
        solve_requests: PathBuf,
        /// The trace to judge on.
        judge: PathBuf,
        /// Its requests.
        judge_requests: PathBuf,
    },
    /// Solve on old traffic, then from those tables on new traffic, at several costs of a move.
    Drift {
        /// The profile of the old traffic.
        old: PathBuf,
        /// The profile of the new traffic.
        new: PathBuf,
        /// Solve on both together instead of the new traffic alone.
        #[arg(long)]
        mix: bool,
    },
    /// Rare and unseen tokens: solve on all profiles but one, judge on that one; needs --tokenizer.
    Priors {
        /// Profiles of one model, one per domain.
        #[arg(required = true, num_args = 2.., value_name = "PROFILE")]
        profiles: Vec<PathBuf>,
    },
    /// Rare and unseen tokens: solve on the first requests of one trace, judge on another; needs --tokenizer.
    Few {
        /// The trace to solve on.
        solve: PathBuf,
        /// The trace to judge on.
        judge: PathBuf,
        /// The model's weights, for its input embeddings.
        embeddings: PathBuf,
        /// Numbers of requests to solve on.
        #[arg(long, value_delimiter = ',', default_value = "60,300")]
        requests: Vec<usize>,
    },
    /// Vary the routing policy's settings around their defaults.
    Tune {
        /// The trace, half of it to solve on.
        trace: PathBuf,
    },
    /// Time the even split of a layer's rows on a rank.
    Even {
        /// Tables for attention tp.
        tables: PathBuf,
        /// A trace of the same model.
        trace: PathBuf,
        /// Tokens of a step.
        step_tokens: usize,
    },
    /// Write a synthetic profile of a real model's size, to time `semmoe solve` with.
    Size {
        /// The model.
        model: Size,
        /// The profile to write.
        out: PathBuf,
        /// Tokens counted.
        #[arg(default_value_t = 2_000_000)]
        tokens: u64,
    },
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write;
            // Ignore errors of standard error itself.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<(), BenchError> {
    let common = &cli.common;
    let mut setting = Setting {
        groups: 0,
        seed: common.seed,
        starts: common.starts,
        threads: common.threads,
        expert_load_limit: common.expert_load_limit,
        token_margin: common.token_margin,
        given: Vec::new(),
        strings: common.tokenizer.as_deref().map(strings).transpose()?,
    };
    match &cli.command {
        Command::Domains { profiles, placements } => {
            setting.given = placements.as_deref().map(given::read).transpose()?.unwrap_or_default();
            domains::run(profiles, &common.groups, &setting)
        }
        Command::Synthetic { requests } => synthetic::run(*requests, &common.groups, &setting),
        Command::Requests { solve, judge } => requests::run(solve, judge, &common.groups, &setting),
        Command::Transfer { solve, solve_requests, judge, judge_requests } => {
            let solve = Described { trace: solve.clone(), requests: solve_requests.clone() };
            let judge = Described { trace: judge.clone(), requests: judge_requests.clone() };
            transfer::run(&solve, &judge, &common.groups, &setting)
        }
        Command::Drift { old, new, mix } => drift::run(old, new, *mix, &common.groups, &setting),
        Command::Priors { profiles } => priors::domains(profiles, &common.groups, &setting),
        Command::Few { solve, judge, embeddings, requests } => {
            priors::few(&Few { solve, judge, embeddings, requests }, &common.groups, &setting)
        }
        Command::Tune { trace } => tune::run(trace, &common.groups, &setting),
        Command::Even { tables, trace, step_tokens } => even::run(tables, trace, *step_tokens),
        Command::Size { model, out, tokens } => sizes::make(*model, out, *tokens),
    }
}

fn strings(path: &Path) -> Result<Arc<TokenStrings>, BenchError> {
    let cannot =
        |error: &dyn std::fmt::Display| BenchError::Read { path: path.display().to_string(), cause: error.to_string() };
    let tokenizer = Tokenizer::from_file(path).map_err(|error| cannot(&error))?;
    Ok(Arc::new(TokenStrings::new(tokenizer.pieces(), Some(tokenizer.sha256().to_owned()))))
}
