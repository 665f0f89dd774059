//! MixServe's own formulas, as corrected, and its grammar of strategies.
//!
//! | module | what |
//! |---|---|
//! | `grammar` | all strategies, counted and listed (section III-B1) |
//! | `levels` | a layer's exchange on two levels of links, for ranks whose tokens are their own |
//! | `queue` | waiting, latency, throughput (equations 7, 9 to 11) |
//!
//! `README.md` lists what is wrong in the printed ones.

mod grammar;
mod levels;
mod queue;

pub use grammar::strategies;
pub use levels::TwoLevels;
pub use queue::{class_waits, request_rate, waiting};
