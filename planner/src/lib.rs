//! Cost models, strategy search, the switch policy as a pure state machine, and their simulator.
//!
//! The physical model is one function, `step::predict`: TTFT and TPOT of a shape on a cluster in a layout, from the constants
//! in `step::Constants`.

pub mod advice;
pub mod affinity;
pub mod calibration;
pub mod cluster;
mod error;
mod fields;
#[cfg(test)]
mod fixtures;
pub mod flags;
pub mod hybridep;
pub mod layout;
pub mod memory;
pub mod mixserve;
pub mod report;
pub mod search;
pub mod shape;
pub mod step;
pub mod switching;
pub mod workload;

pub use error::PlanError;
