//! The CUDA kernels run on the CPU against the reference: bit for bit, over ranks, shapes, delays and poisoned memory.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

mod collectives;
mod compute;
mod exchange;
mod hostile;
mod moved;
mod mutants;
mod points;
mod reshard;
mod sanitized;
mod sort;
mod support;
mod unit;
