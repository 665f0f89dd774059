//! `semmoe worker`.

use semmoe_worker::{WorkerConfig, WorkerError};

use super::print;
use crate::args::WorkerArgs;
use crate::error::CliError;

pub(crate) fn run(args: WorkerArgs) -> Result<(), CliError> {
    if args.rank >= args.world {
        return Err(CliError::input(format!("--rank {} is not below --world {}", args.rank, args.world)));
    }
    let config = WorkerConfig {
        model_dir: args.model,
        rank: args.rank.into(),
        world: args.world,
        rendezvous: args.rendezvous,
        listen: (args.rank == 0).then_some(args.listen),
        tables: args.tables,
        exit_on_stdin_eof: args.exit_on_stdin_eof,
    };
    semmoe_worker::run(config, &|event| print(event)).map_err(failure)
}

fn failure(error: WorkerError) -> CliError {
    CliError::failed(error)
}
