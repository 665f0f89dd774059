//! One rank's engine: takes sequences, runs them in steps with the other ranks, reports what became of them.
//!
//! | module | what |
//! |---|---|
//! | `limits` | what an engine holds and does at most |
//! | `request` | what a sequence asks for and what it gives |
//! | `inbox` | orders for the engine from other threads |
//! | `run` | the step loop, and what all loops do |
//! | `together`, `told` | the loop with attention tp, and what its ranks send each other |
//! | `switch` | a rank's part in a switch of the unit's layout |
//! | `relayout` | what it runs goes on when attention changes between dp and tp |
//! | `batch` | what goes into one step (pure) |
//! | `sequence` | one sequence from prompt to end |
//! | `sampler`, `logprobs` | logits to a token, and how likely it was (pure) |
//! | `stop`, `text` | decoding and stop texts, also for the streams of rank 0 (pure) |

mod batch;
mod inbox;
mod limits;
mod logprobs;
mod relayout;
mod request;
mod run;
mod sampler;
mod sequence;
mod stop;
mod switch;
mod text;
mod together;
mod told;

pub(crate) use inbox::{EngineHandle, Inbox};
pub use limits::{EngineLimits, KvBudget};
pub(crate) use limits::{KvPages, UnitLimits};
pub(crate) use request::{Finish, RankStats, Sampling, SequenceEvent, SequenceRequest, StopRules, TokenLogprobs};
pub(crate) use run::{Emit, Engine, EngineEnd};
pub(crate) use switch::{SwitchOrder, SwitchReport, SwitchTo};
pub(crate) use text::SequenceText;
