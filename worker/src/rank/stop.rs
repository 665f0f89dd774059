//! Reasons for a rank to stop: signals, and the end of standard input.

use std::io::Read as _;

use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use super::config::WorkerConfig;

/// Starts monitoring the configured sources of stop requests.
pub(super) fn watch(config: &WorkerConfig, runtime: &Runtime) {
    if config.handle_signals {
        for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
            let _entered = runtime.enter();
            // Without a handler, the signal's default action ends the process, which is acceptable.
            let Ok(mut signal) = signal(kind) else { continue };
            let shutdown = config.shutdown.clone();
            runtime.spawn(async move {
                signal.recv().await;
                shutdown.request();
            });
        }
    }
    if config.exit_on_stdin_eof {
        let shutdown = config.shutdown.clone();
        // A separate thread is needed, because a read of standard input cannot be cancelled and the runtime must not
        // wait for it.
        std::thread::spawn(move || {
            let mut scratch = [0; 256];
            let mut input = std::io::stdin().lock();
            while matches!(input.read(&mut scratch), Ok(count) if count > 0) {}
            shutdown.request();
        });
    }
}
