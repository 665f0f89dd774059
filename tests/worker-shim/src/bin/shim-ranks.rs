//! A process of a unit whose GPUs are the shim: `shim-ranks START`, in JSON; prints events as the worker does.
#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "tests")]

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

use semmoe_kernels_shim::Shim;
use semmoe_worker_shim::ProcessStart;

fn main() -> ExitCode {
    let start = std::env::args().nth(1).expect("the argument says what to run");
    let start: ProcessStart = serde_json::from_str(&start).unwrap();
    // SAFETY: the test that starts this process built the library.
    let shim = Box::leak(Box::new(unsafe { Shim::open(&start.kernels) }.unwrap()));
    let mut config = start.config(shim);
    // Nothing may read the events of later processes.
    config.announce = Arc::new(|event| {
        let _ = writeln!(std::io::stdout(), "{}", serde_json::to_string(event).unwrap());
    });
    match semmoe_worker::run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("shim-ranks: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
