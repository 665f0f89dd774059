//! The `semmoe` command: reads arguments and environment, calls the crates, prints, and chooses the exit code.

#[cfg(all(feature = "jemalloc", target_os = "linux"))]
mod allocator;
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
    match run(cli.command, LogChoice { level: cli.log, json: cli.log_json }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::say(&format!("semmoe: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: Command, log: LogChoice) -> Result<(), CliError> {
    // That one's configuration has a say.
    if !matches!(command, Command::Serve(_)) {
        log.start(LevelFilter::WARN, false);
    }
    match command {
        Command::Up(args) => up::run(&args),
        Command::Serve(args) => commands::serve::run(&args, log),
        Command::Keys(command) => commands::keys::run(&command),
        Command::Worker(args) => commands::worker::run(args),
        Command::Profile(command) => commands::profile::run(command),
        Command::Solve(args) => commands::solve::run(&args),
        Command::Evaluate(args) => commands::evaluate::run(&args),
        Command::Tables(command) => commands::tables::run(&command),
        Command::Load(args) => commands::load::run(args),
    }
}

/// What the command line says of logging.
#[derive(Clone, Copy, Debug)]
struct LogChoice {
    level: Option<LogLevel>,
    json: bool,
}

impl LogChoice {
    /// Begins to log on standard error; the command line is stronger than what is given here.
    fn start(self, level: LevelFilter, json: bool) {
        let logger = tracing_subscriber::fmt()
            .with_max_level(self.level.map_or(level, LogLevel::filter))
            .with_writer(std::io::stderr);
        if json || self.json {
            logger.json().init();
        } else {
            logger.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init();
        }
    }
}

impl LogLevel {
    fn filter(self) -> LevelFilter {
        match self {
            Self::Off => LevelFilter::OFF,
            Self::Error => LevelFilter::ERROR,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
            Self::Debug => LevelFilter::DEBUG,
            Self::Trace => LevelFilter::TRACE,
        }
    }
}
