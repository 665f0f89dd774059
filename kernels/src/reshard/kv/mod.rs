//! Plans the KV cache moves for a switch of attention between DP and TP: a pure plan, equal on all ranks.
//!
//! Under attention DP, a rank has all heads of its own sequences. Under TP, all ranks of a node work together: they
//! have the same sequences in the same pages, each rank with its own heads. If there are fewer heads than ranks, heads
//! are replicated; a latent cache (MLA) cannot be split, so every rank has all of it. Nodes are independent: a sequence
//! stays on its node, and ranks here are those of one node. Between DP and TP there are groups of adjacent ranks, each
//! group with its own sequences: a plan merges smaller groups into one, or splits one into smaller ones.
//!
//! | module | contents |
//! |---|---|
//! | `pool` | [`KvPool`]: pages, sequences and their order in one pool; [`KvShape`]: page sizes |
//! | `gather` | DP to TP: merges all pools, with equal prefixes stored once |
//! | `scatter` | TP to DP: assigns each sequence to one rank, longest first |
//! | `plan` | [`KvPlan`]: the pools after the switch, the copies, a digest |
//!
//! New pages do not overwrite old ones, which are kept until the switch is committed. Sequences in the middle of
//! prefill move like any other, with their promised pages; cancelled ones are dropped beforehand. Other per-page data,
//! such as routes, is moved according to [`PlannedPool::sources`].

mod gather;
mod plan;
mod pool;
mod scatter;

pub use plan::{KvMove, KvPlan, PageAt, PlannedPool};
pub use pool::{KvError, KvPage, KvPool, KvSequence, KvShape};
pub use scatter::Balance;
