//! The `semmoe` command: reads arguments and environment, calls the crates, prints, and chooses the exit code.

mod args;
mod commands;
mod error;
mod progress;
mod signals;
mod stamp;
mod up;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::filter::LevelFilter;

use args::{Cli, Command, LogLevel};
use error::CliError;

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_logging(cli.log, cli.log_json);
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::say(&format!("semmoe: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: Command) -> Result<(), CliError> {
    match command {
        Command::Up(args) => up::run(&args),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Keys(command) => commands::keys::run(&command),
        Command::Worker(args) => commands::worker::run(args),
        Command::Profile(command) => commands::profile::run(command),
        Command::Solve(args) => commands::solve::run(&args),
        Command::Evaluate(args) => commands::evaluate::run(&args),
        Command::Tables(command) => commands::tables::run(&command),
        Command::Load(args) => commands::load::run(args),
    }
}

fn start_logging(level: LogLevel, json: bool) {
    let filter = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let logger = tracing_subscriber::fmt().with_max_level(filter).with_writer(std::io::stderr);
    if json {
        logger.json().init();
    } else {
        logger.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init();
    }
}
