//! Records traces from engines, builds and merges profiles.
//!
//! | module | what |
//! |---|---|
//! | `record` | prompts in, trace out: drives an engine and keeps what its answers prove |
//! | `prompts` | the prompts file: JSON Lines, checked whole before the first request |
//! | `answer` | one answer of an engine, checked against what was asked |
//! | `drive` | bounded concurrency, retries, order |
//! | `profiles` | builds profiles from traces, merges profiles |
//! | `shape` | the model's shape from `config.json` |
//! | `split` | a trace in two parts by request content |
//! | `summary` | what is in a trace or a profile, in a few lines |
//!
//! The library never prints: long work reports to a [`Progress`] of the caller.

mod answer;
mod drive;
mod error;
mod profiles;
mod progress;
mod prompts;
mod record;
mod shape;
mod split;
mod summary;

pub use error::ProfilerError;
pub use profiles::{BuildReport, build, merge};
pub use progress::{NoProgress, Progress};
pub use record::{BadRecord, RecordOptions, RecordReport, record};
pub use shape::model_config;
pub use split::split;
pub use summary::{LayerSummary, Summary, show};
