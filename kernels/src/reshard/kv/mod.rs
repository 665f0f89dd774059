//! The moves of keys and values when attention changes between DP and TP: a plan that is pure and equal on all ranks.
//!
//! Under attention DP a rank has all heads of its own sequences. Under TP all ranks of a node act alike: they have the
//! same sequences in the same pages, each rank its own heads. Fewer heads than ranks are replicated, and a latent cache
//! (MLA) has nothing to cut, so every rank has all of it. Nodes are independent: a sequence stays on its node, and
//! ranks here are those of one.
//!
//! | module | what |
//! |---|---|
//! | `pool` | [`KvPool`]: pages, sequences and their order in one pool; [`KvShape`]: the bytes of a page |
//! | `gather` | DP to TP: all pools become one, equal prefixes once |
//! | `scatter` | TP to DP: each sequence to one rank, longest first |
//! | `plan` | [`KvPlan`]: the pools after the switch, the copies, a digest |
//!
//! New pages are apart from old ones, which are kept until the switch is committed. Sequences in mid-prefill move like
//! others, with what they were promised; cancelled ones are left out before. What else belongs to a page, as its
//! routes, follows [`PlannedPool::sources`].

mod gather;
mod plan;
mod pool;
mod scatter;

pub use plan::{KvMove, KvPlan, PageAt, PlannedPool};
pub use pool::{KvError, KvPage, KvPool, KvSequence, KvShape};
pub use scatter::Balance;
