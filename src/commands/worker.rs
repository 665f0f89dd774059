//! `semmoe worker`.

use semmoe_worker::{WorkerConfig, WorkerError, WorkerEvent};

use super::print;
use crate::args::WorkerArgs;
use crate::error::CliError;
use crate::progress::say;

pub(crate) fn run(args: WorkerArgs) -> Result<(), CliError> {
    if args.rank >= args.world {
        return Err(CliError::input(format!("--rank {} is not below --world {}", args.rank, args.world)));
    }
    let mut config = WorkerConfig::new(args.model, args.rank, args.world, args.rendezvous);
    config.listen = (args.rank == 0).then_some(args.listen);
    config.tables = args.tables;
    config.exit_on_stdin_eof = args.exit_on_stdin_eof;
    config.announce = Box::new(announce);
    semmoe_worker::run(config).map_err(failure)
}

/// One JSON line an event, for whoever started this rank.
fn announce(event: &WorkerEvent) {
    let printed = serde_json::to_string(event).map_err(CliError::failed).and_then(|line| print(&line));
    if let Err(error) = printed {
        // Nobody listens any more; whether that is a reason to leave is said by --exit-on-stdin-eof.
        say(&format!("semmoe: {error}"));
    }
}

fn failure(error: WorkerError) -> CliError {
    CliError::WithCode(error.exit_code(), error.to_string())
}
