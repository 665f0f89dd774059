//! Records traces from engines, builds and merges profiles.
//!
//! | module | what |
//! |---|---|
//! | `record` | prompts in, trace out: drives an engine and keeps what its answers prove |
//! | `prompts` | the prompts file: JSON Lines, ShareGPT, plain text |
//! | `answer` | one answer of an engine, checked against what was asked |
//! | `drive` | bounded concurrency and rate, retries |
//! | `journal` | the partial recording, from which one that ended early goes on |
//! | `dense` | dense layers that a configuration does not report |
//! | [`show`](mod@show), [`html`] | what a trace or profile says of a model's routing, as figures and as a page with pictures |
//! | [`import`](mod@import) | routing that others recorded, to a trace or to expert loads |
//! | `build`, `merge` | profiles from traces, and added up: any size, in parallel, the same bytes in any order |
//! | `origin` | where counts come from |
//! | `bad` | records that were left out |
//! | `self_check` | one prompt alone and among others: routes that depend on the batch |
//! | `split` | a trace in two parts by request content |
//! | `verdict` | one sentence on figures, and what to type next |
//! | `summary` | what is in a trace or a profile, in a few lines |
//!
//! The library never prints: long work reports to a [`Progress`] of the caller.

mod answer;
mod bad;
mod build;
mod dense;
mod drive;
mod error;
pub mod html;
pub mod import;
mod journal;
mod merge;
mod origin;
mod progress;
mod prompts;
mod record;
mod self_check;
pub mod show;
mod split;
mod summary;
mod verdict;

pub use bad::BadRecord;
pub use build::{BuildOptions, BuildReport, DomainInput, DomainReport, HoldOut, build};
pub use error::ProfilerError;
pub use merge::{MergeOptions, merge};
pub use progress::{NoProgress, Progress};
pub use prompts::PromptFormat;
pub use record::{RecordOptions, RecordReport, model_config, record};
pub use self_check::SelfCheck;
pub use show::show;
pub use split::split;
pub use summary::{LayerSummary, Summary};
pub use verdict::{Grade, Verdict};
