//! Cost models, strategy search, and switch policies as pure state machines.
//!
//! ```
//! use semmoe_planner::cluster::Cluster;
//! use semmoe_planner::search::{Question, search};
//! use semmoe_planner::shape::ModelShape;
//! use semmoe_planner::step::Constants;
//! use semmoe_planner::workload::Workload;
//!
//! let config = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m/config.json"));
//! let links = "[[levels]]\nname = \"nvlink\"\ncount = 4\nbandwidth_gb_per_second = 450\nlatency_us = 3";
//! let cluster = Cluster::from_toml("cluster.toml", &format!("gpu = \"H200\"\n{links}"))?;
//! let requests = "requests_per_second = 4\ninput_tokens = 1024\noutput_tokens = 512";
//! let plan = search(&Question {
//!     shape: &ModelShape::from_config("config.json", config)?,
//!     cluster: &cluster,
//!     workload: &Workload::from_toml("workload.toml", requests)?,
//!     constants: &Constants::uncalibrated(),
//! })?;
//! let best = &plan.ranked[0];
//! assert_eq!(best.layout.gpus() * best.units, 4);
//! # Ok::<(), semmoe_planner::PlanError>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`shape`], [`cluster`], [`workload`] | inputs: a model's `config.json`, GPUs and links, requests |
//! | [`layout`], [`memory`] | degrees of parallelism, each rank's part of the model, whether it fits |
//! | [`step`] | the physical model: [`step::predict`] computes TTFT and TPOT from [`step::Constants`] |
//! | [`calibration`] | fitted constants and the errors that accompany every answer |
//! | [`fitted`] | constants fitted to published measurements |
//! | [`mixserve`] | MixServe's grammar of strategies and queueing formulas |
//! | [`hybridep`] | moving experts to tokens: stream model, expert domains |
//! | [`switching`] | how long a layout switch takes, and when it pays off |
//! | [`policy`] | when a unit should switch: pure state machines, learned step times |
//! | [`units`] | how many units should run in which layout for a trace, and which groups they should switch to |
//! | [`affinity`], [`deployment`] | a deployment's regime, modelled or measured, and the gain from affinity |
//! | [`search`], [`advice`], [`flags`], [`report`] | ranked plans, further options, launch arguments, text |
//!
//! The crate never reads files or clocks. `README.md` explains the model and lists published numbers that do not follow
//! from their formulas.

pub mod advice;
pub mod affinity;
pub mod calibration;
pub mod cluster;
pub mod deployment;
mod error;
mod fields;
pub mod fitted;
pub mod flags;
pub mod hybridep;
pub mod layout;
pub mod memory;
pub mod mixserve;
pub mod policy;
pub mod report;
pub mod search;
pub mod shape;
pub mod step;
pub mod switching;
#[cfg(test)]
mod tests {
    pub(crate) mod fixtures;
}
pub mod units;
pub mod workload;

pub use error::{PlanError, SyntaxError};
