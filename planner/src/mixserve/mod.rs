//! MixServe's formulas with corrections, and its grammar of strategies.
//!
//! | module | what |
//! |---|---|
//! | `grammar` | all strategies, counted and listed (section III-B1) |
//! | `queue` | waiting (equation 7) |
//!
//! `README.md` lists the errors in the formulas as printed.

mod grammar;
mod queue;

pub use grammar::strategies;
pub use queue::{class_waits, waiting};
