//! Ctrl-C and SIGTERM, and the Tokio runtime of a command.

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

/// Receives every SIGINT and SIGTERM from now on. `None`: without handlers the default action ends the process, as
/// requested.
pub(crate) struct Stops(Option<(Signal, Signal)>);

impl Stops {
    /// Must be called in a runtime.
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

    /// Runs `work` until it ends or the user asks to stop; then `work` is dropped, which cancels it. A command with
    /// several parts runs all of them with the same `Stops`: a signal between two parts would be lost to a new one, as
    /// the first handler replaces the default action permanently.
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

/// Receives SIGHUP, the request to reload the configuration.
pub(crate) struct Hangups(Option<Signal>);

impl Hangups {
    /// Keeps the signal from ending the process from now on. Must be called in a runtime.
    pub(crate) fn listen() -> Self {
        Self(signal(SignalKind::hangup()).ok())
    }

    /// Resolves at the next signal; several since the last call count as one.
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

/// Becomes true at the first SIGINT or SIGTERM, for work that can end early with a result; a second one ends the
/// process.
pub(crate) fn stop_flag() -> Result<Arc<AtomicBool>, CliError> {
    let flag = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&flag);
    let cannot = |error: std::io::Error| CliError::failed(format!("cannot watch for Ctrl-C: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot)?;
    // Registered before this returns, so that no signal is missed.
    let mut stops = {
        let _entered = runtime.enter();
        Stops(Some(both().map_err(cannot)?))
    };
    // Ends with the process.
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
