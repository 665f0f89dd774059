//! Records traces from engines, builds and merges profiles.
//!
//! | module | what |
//! |---|---|
//! | `options` | what to record, and how |
//! | `record` | prompts in, trace out: drives an engine and keeps answers that pass the checks |
//! | `prompts` | the prompts file: JSON Lines, ShareGPT, plain text |
//! | `answer` | one answer of an engine, checked against the request |
//! | `drive` | bounded concurrency and rate, retries |
//! | `journal` | the partial recording, from which an interrupted one is resumed |
//! | `dense` | detects dense layers that the configuration does not mention |
//! | [`show`](mod@show), [`html`] | the routing of a model in a trace or profile, as figures and as a page with images |
//! | [`import`](mod@import) | converts routing recorded by others to a trace or to expert loads |
//! | `build`, `merge` | builds profiles from traces and adds them up: any size, in parallel, identical bytes in any order |
//! | `origin` | the sources of counts |
//! | `bad` | records that were left out |
//! | `self_check` | sends one prompt alone and among others, to detect routes that depend on the batch |
//! | `split` | splits a trace in two by request content |
//! | `verdict` | a one-sentence interpretation of figures, and the next command |
//! | `summary` | a short summary of a trace or profile |
//!
//! The library never prints: long operations report to the caller's [`Progress`].

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
mod options;
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
pub use options::{PromptFormat, RecordOptions};
pub use progress::{NoProgress, Progress};
pub use record::{RecordReport, model_config, record};
pub use self_check::SelfCheck;
pub use show::show;
pub use split::split;
pub use summary::{LayerSummary, Summary};
pub use verdict::{Grade, Verdict};
