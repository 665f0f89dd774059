//! MixServe's formulas, with corrections, and its grammar of strategies.
//!
//! | module | contents |
//! |---|---|
//! | `grammar` | enumeration of all strategies (section III-B1) |
//! | `queue` | waiting times (equation 7) |
//!
//! `README.md` lists the errors in the published formulas.

mod grammar;
mod queue;

pub use grammar::strategies;
pub use queue::{class_waits, waiting};
