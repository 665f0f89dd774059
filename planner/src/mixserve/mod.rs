//! MixServe's own formulas, as corrected, and its grammar of strategies.
//!
//! | module | what |
//! |---|---|
//! | `grammar` | all strategies, counted and listed (section III-B1) |
//! | `exchange` | token copies of the three cases of DP and EP (equation 5); RS-A2A-AG against A2A (equations 12, 13) |
//! | `levels` | a layer's exchange on two levels of links, for ranks whose tokens are their own |
//! | `queue` | waiting, latency, throughput (equations 7, 9 to 11) |
//!
//! `docs/planner.md` lists what is wrong in the printed ones.

mod exchange;
mod grammar;
mod levels;
mod queue;

pub use exchange::{HybridTimes, HybridUnit, copies_leaving, hybrid_times};
pub use grammar::{Strategies, derivations, flat, placements};
pub use levels::TwoLevels;
pub use queue::{class_waits, request_rate, waiting};
