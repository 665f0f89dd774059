//! Calls through the C interface run the CUDA sources on the CPU: bit-identical to the reference, and invalid calls
//! return a status and a message.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

mod exchange;
mod hostile;
mod rank;
mod shuffles;
