//! Ranks of `semmoe worker` over limited links: what measurements of whole units share.
//!
//! | module | what |
//! |---|---|
//! | `network` | namespaces and links, removed on every way out |
//! | `unit` | rank processes |
//! | `counters` | what the worker counts |
//! | `error` | what can go wrong |
//! | `program` | the process: signals, exit code |

pub mod counters;
pub mod error;
pub mod network;
pub mod program;
pub mod unit;
