//! Calls through the C interface run the CUDA sources, on the CPU: equal to the reference bit for bit, and what is bad
//! stops with a status and a sentence.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

mod exchange;
mod hostile;
mod rank;
mod shuffles;
