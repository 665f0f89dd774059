//! One rank's engine: accepts sequences, runs them in steps with the other ranks, and reports their events.
//!
//! | module | what |
//! |---|---|
//! | `limits` | engine limits |
//! | `request` | a sequence's request and events |
//! | `inbox` | commands to the engine from other threads |
//! | `run` | the step loop, and the parts shared by all loops |
//! | `together`, `step_sync` | the loop under attention tp, and the messages between its ranks |
//! | `switch` | a rank's part in a layout switch, and how sequences continue when attention switches |
//! | `queue` | the order of waiting sequences (pure) |
//! | `batch` | the batch of one step (pure) |
//! | `sequence` | one sequence from prompt to finish |
//! | `sampler`, `logprobs` | sampling a token from logits, and its log-probability (pure) |
//! | `stop`, `text` | decoding and stop texts, also for rank 0's streams (pure) |

mod batch;
mod inbox;
mod limits;
mod logprobs;
mod queue;
mod request;
mod run;
mod sampler;
mod sequence;
mod step_sync;
mod stop;
mod switch;
mod text;
mod together;

pub(crate) use inbox::Inbox;
pub use limits::{EngineLimits, KvBudget};
pub(crate) use limits::{KvMemory, KvPages, UnitLimits};
pub(crate) use queue::due_us;
pub(crate) use request::{Finish, RankStats, Sampling, SequenceEvent, SequenceRequest, StopRules, TokenLogprobs};
pub(crate) use run::{Emit, Engine, EngineEnd};
pub(crate) use switch::{SwitchOrder, SwitchReport, SwitchTo};
pub(crate) use text::SequenceText;
