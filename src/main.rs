//! The `semmoe` command: reads arguments and environment, calls the library crates, prints results, and sets the exit
//! code.

#[cfg(all(feature = "jemalloc", target_os = "linux"))]
mod allocator;
mod args;
mod commands;
mod environment;
mod error;
mod hints;
mod logging;
mod notify;
mod progress;
mod signals;
mod stamp;
mod up;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::filter::LevelFilter;

use args::{Cli, Command};
use error::CliError;
use logging::LogChoice;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli.command, LogChoice { level: cli.log, json: cli.log_json }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let failure = error.to_string();
            let hint = hints::hint(&failure).map_or_else(String::new, |hint| format!(" ({hint})"));
            progress::say(&format!("semmoe: {failure}{hint}"));
            ExitCode::from(error.code)
        }
    }
}

fn run(command: Command, log: LogChoice) -> Result<(), CliError> {
    // `serve` starts logging after reading its configuration.
    if !matches!(command, Command::Serve(_)) {
        log.start(LevelFilter::WARN, false);
    }
    match command {
        Command::Up(args) => up::run(&args),
        Command::Serve(args) => commands::serve::run(&args, log),
        Command::Keys(command) => commands::keys::run(&command),
        Command::Template(command) => commands::template::run(&command),
        Command::Worker(args) => commands::worker::run(args),
        Command::Profile(command) => commands::profile::run(command),
        Command::Solve(args) => commands::solve::run(&args),
        Command::Evaluate(args) => commands::evaluate::run(&args),
        Command::Tables(command) => commands::tables::run(&command),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Load(args) => commands::load::run(args),
        Command::Completions { shell } => commands::shell::completions(shell),
        Command::Man { folder } => commands::shell::man(&folder),
    }
}
