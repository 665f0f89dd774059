//! Signal handling (Ctrl-C, SIGTERM, SIGHUP), and the Tokio runtime for commands.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::CliError;

/// Runs an asynchronous command on a new runtime.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| CliError::failed(format!("cannot start the runtime: {error}")))?
        .block_on(work)
}

/// The source of a stop request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// A user at a terminal.
    Interrupt,
    /// A supervisor.
    Terminate,
}

/// Receives every SIGINT and SIGTERM from its creation on. `None` if no handlers could be installed: the default action
/// then ends the process.
pub(crate) struct Stops(Option<(Signal, Signal)>);

impl Stops {
    /// Must be called inside a Tokio runtime.
    pub(crate) fn listen() -> Self {
        Self(both().ok())
    }

    /// Resolves at the next signal.
    pub(crate) async fn next(&mut self) -> Stop {
        let Some((interrupt, terminate)) = &mut self.0 else { return std::future::pending().await };
        tokio::select! {
            _ = interrupt.recv() => Stop::Interrupt,
            _ = terminate.recv() => Stop::Terminate,
        }
    }

    /// Runs `work` to completion, or cancels it by dropping it once the user requests a stop. A command with several
    /// parts must share one `Stops`: the first handler replaces the default action permanently, so a new `Stops` would
    /// miss a signal that arrived between two parts.
    pub(crate) async fn until_stopped<T>(
        &mut self,
        work: impl Future<Output = Result<T, CliError>>,
    ) -> Result<T, CliError> {
        tokio::select! {
            result = work => result,
            _ = self.next() => Err(CliError::interrupted()),
        }
    }
}

fn both() -> std::io::Result<(Signal, Signal)> {
    Ok((signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?))
}

/// Resolves at the first SIGINT or SIGTERM after the first poll.
pub(crate) async fn stop_requested() {
    Stops::listen().next().await;
}

/// Receives SIGHUP, which requests a configuration reload.
pub(crate) struct Hangups(Option<Signal>);

impl Hangups {
    /// Installs the handler; SIGHUP no longer ends the process. Must be called inside a Tokio runtime.
    pub(crate) fn listen() -> Self {
        Self(signal(SignalKind::hangup()).ok())
    }

    /// Resolves at the next signal; signals that arrive between two calls are merged.
    pub(crate) async fn next(&mut self) {
        let received = match &mut self.0 {
            Some(signal) => signal.recv().await,
            None => None,
        };
        if received.is_none() {
            std::future::pending().await
        }
    }
}

/// Returns a flag that the first SIGINT or SIGTERM sets, for work that can stop early with a result; a second signal
/// ends the process.
pub(crate) fn stop_flag() -> Result<Arc<AtomicBool>, CliError> {
    let flag = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&flag);
    let cannot = |error: std::io::Error| CliError::failed(format!("cannot watch for Ctrl-C: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot)?;
    // Handlers are registered before this function returns, so no signal is missed.
    let mut stops = {
        let _entered = runtime.enter();
        Stops(Some(both().map_err(cannot)?))
    };
    // This thread runs until the process exits.
    std::thread::spawn(move || {
        runtime.block_on(async move {
            for _ in 0..2 {
                stops.next().await;
                if raised.swap(true, Ordering::Relaxed) {
                    std::process::exit(CliError::interrupted().code.into());
                }
            }
        });
    });
    Ok(flag)
}
