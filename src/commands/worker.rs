//! `semmoe worker`.

use semmoe_worker::{WorkerConfig, WorkerError, WorkerEvent};

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

/// One JSON line an event, for whoever started this rank. Whether a closed pipe is a reason to leave is said by
/// --exit-on-stdin-eof alone.
fn announce(event: &WorkerEvent) {
    match serde_json::to_string(event) {
        Ok(line) => super::announce(&line),
        Err(error) => say(&format!("semmoe: {error}")),
    }
}

fn failure(error: WorkerError) -> CliError {
    CliError::WithCode(error.exit_code(), error.to_string())
}
