//! One rank's engine: takes sequences, runs them in steps with the other ranks, and reports their events.
//!
//! | module | what |
//! |---|---|
//! | `limits` | the limits of an engine |
//! | `request` | the request and the events of a sequence |
//! | `inbox` | orders to the engine from other threads |
//! | `run` | the step loop, and the parts that all loops share |
//! | `together`, `step_sync` | the loop with attention tp, and the messages between its ranks |
//! | `switch` | a rank's part in a switch of the unit's layout, and running sequences when attention switches |
//! | `queue` | the order of waiting sequences (pure) |
//! | `batch` | the batch of one step (pure) |
//! | `sequence` | one sequence from prompt to end |
//! | `sampler`, `logprobs` | logits to a token, and its probability (pure) |
//! | `stop`, `text` | decoding and stop texts, also for the streams of rank 0 (pure) |

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
