//! Ranks of `semmoe worker` over limited links, shared by the benchmarks of whole units.
//!
//! | module | what |
//! |---|---|
//! | `network` | namespaces and links, removed on every exit path |
//! | `unit` | rank processes |
//! | `counters` | the worker's counters |
//! | `error` | errors |
//! | `program` | the process: signals, exit code |

pub mod counters;
pub mod error;
pub mod network;
pub mod program;
pub mod unit;
