//! Placements of experts compared on the same data: the solver, the paper's algorithm and every published baseline.
//!
//! README.md has the tables and their commands. The baselines live here, so that the `semmoe` binary holds none of
//! them.

mod assignment;
mod baselines;
mod counts;
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
    /// Seed of everything drawn.
    #[arg(long, global = true, default_value_t = 1)]
    seed: u64,
    /// Starts of the solver.
    #[arg(long, global = true, default_value_t = 32)]
    starts: u32,
    /// Threads of the solver; the figures do not depend on them.
    #[arg(long, global = true, default_value_t = 2)]
    threads: usize,
    /// Greatest activations of a group over the mean of its layer, for the solver.
    #[arg(long, global = true, default_value_t = 1.10)]
    expert_load_limit: f64,
    /// eps: a group gets at most (1 + eps) of the mean tokens, in the solver and in T.
    #[arg(long, global = true, default_value_t = 0.02)]
    token_margin: f64,
    /// Tokenizer of the model (tokenizer.json): similar token strings stand in for rare and unseen tokens.
    #[arg(long, global = true, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Solve on all profiles but one, judge on that one; tokens, layer by layer.
    Domains {
        /// Profiles of one model, one a domain.
        #[arg(required = true, num_args = 2.., value_name = "PROFILE")]
        profiles: Vec<PathBuf>,
        /// Placements by other programs as further rows (python/programs.py writes such a file).
        #[arg(long, value_name = "FILE")]
        placements: Option<PathBuf>,
    },
    /// Synthetic routing calibrated to the paper's Table 1; tokens, layer by layer.
    Synthetic {
        /// Requests, half of them to solve on.
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
        /// Its requests, one JSON object with "domain" a line.
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
        /// Solve on both together instead of the new one.
        #[arg(long)]
        mix: bool,
    },
    /// Rare and unseen tokens: solve on all profiles but one, judge on that one; needs --tokenizer.
    Priors {
        /// Profiles of one model, one a domain.
        #[arg(required = true, num_args = 2.., value_name = "PROFILE")]
        profiles: Vec<PathBuf>,
    },
    /// Rare and unseen tokens: solve on the first requests of a trace, judge on another; needs --tokenizer.
    Few {
        /// The trace to solve on.
        solve: PathBuf,
        /// The trace to judge on.
        judge: PathBuf,
        /// The model's weights, for its input embeddings.
        embeddings: PathBuf,
        /// Requests to solve on.
        #[arg(long, value_delimiter = ',', default_value = "60,300")]
        requests: Vec<usize>,
    },
    /// Settings of the routing policy around their defaults.
    Tune {
        /// The trace, half of it to solve on.
        trace: PathBuf,
    },
    /// How long a rank takes to split the rows of a layer in even parts.
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
            // Nothing can be reported if standard error is gone.
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
