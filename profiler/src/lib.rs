//! Records traces from engines, and builds and merges profiles.
//!
//! | module | contents |
//! |---|---|
//! | `options` | options of a recording |
//! | `record` | sends prompts to an engine and records the responses that pass the checks as a trace |
//! | `prompts` | the prompts file: JSON Lines, ShareGPT, plain text |
//! | `answer` | validates an engine's response against the request |
//! | `drive` | bounded concurrency and rate, retries |
//! | `journal` | the partial recording, which lets an interrupted recording resume |
//! | `dense` | detects dense layers that the configuration does not mention |
//! | [`show`](mod@show), [`html`] | a model's routing in a trace or profile, as figures and as a page with images |
//! | [`import`](mod@import) | converts routing recorded by other tools to a trace or to expert loads |
//! | `build`, `merge` | builds and merges profiles of any size, in parallel, with identical bytes in any order |
//! | `origin` | the sources of a profile's counts |
//! | `bad` | skipped records |
//! | `self_check` | sends one prompt alone and with others, to detect routes that depend on the batch |
//! | `split` | splits a trace in two by prompt content |
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
