//! Ctrl-C and SIGTERM, and the one Tokio runtime of a command.

use std::future::Future;

use tokio::signal::unix::{SignalKind, signal};

use crate::error::CliError;

/// Runs an asynchronous command on a fresh runtime.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| CliError::failed(format!("cannot start the runtime: {error}")))?
        .block_on(work)
}

/// Resolves at the first SIGINT or SIGTERM.
pub(crate) async fn stop_requested() {
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        // Without handlers the default action ends the process, which is what the user asked for.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}

/// Runs `work` until it ends or the user asks to stop; then `work` is dropped, which cancels it.
pub(crate) async fn until_stopped<T>(work: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    tokio::select! {
        result = work => result,
        () = stop_requested() => Err(CliError::Interrupted),
    }
}
