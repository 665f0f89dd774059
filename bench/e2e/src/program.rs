//! A benchmark's process: runs until it is done or interrupted, and reports on standard error.

use std::io::Write as _;
use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};

use crate::error::BenchError;

/// Runs `work` to completion, or drops it, with everything it started or created, on SIGINT, SIGTERM or SIGHUP. Prints
/// an error after `name` and turns it into the exit code.
pub fn main(name: &str, work: impl Future<Output = Result<(), BenchError>>) -> ExitCode {
    let done = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| BenchError::failed(format!("cannot start the runtime: {error}")))
        .and_then(|runtime| runtime.block_on(until_stopped(work)));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{name}: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

async fn until_stopped(work: impl Future<Output = Result<(), BenchError>>) -> Result<(), BenchError> {
    let listen = |kind| signal(kind).map_err(|error| BenchError::failed(format!("cannot listen for signals: {error}")));
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let mut hangup = listen(SignalKind::hangup())?;
    tokio::select! {
        done = work => done,
        _ = interrupt.recv() => Err(BenchError::Interrupted),
        _ = terminate.recv() => Err(BenchError::Interrupted),
        _ = hangup.recv() => Err(BenchError::Interrupted),
    }
}

/// Prints a line on standard error; ignores a closed pipe.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
