//! One rank's engine: takes sequences, runs them in steps with the other ranks, tells what became of them.
//!
//! | module | what |
//! |---|---|
//! | `request` | what a sequence asks for and what it gives |
//! | `inbox` | orders for the engine from other threads |
//! | `run` | the step loop |
//! | `batch` | what goes into one step (pure) |
//! | `sequence` | one sequence from prompt to end |
//! | `sampler` | logits to a token (pure) |
//! | `stop`, `text` | decoding and stop texts, also for the streams of rank 0 (pure) |

mod batch;
mod inbox;
mod request;
mod run;
mod sampler;
mod sequence;
mod stop;
mod text;

pub(crate) use inbox::{EngineHandle, Inbox};
pub(crate) use request::{Finish, RankStats, Sampling, SequenceEvent, SequenceRequest, StopRules};
pub(crate) use run::{Emit, Engine, EngineEnd};
pub(crate) use text::SequenceText;

use crate::model::ModelConfig;

/// What an engine holds and does at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Sequences in the running batch of one rank.
    pub running: usize,
    /// Sequences that may wait behind them on one rank; more are refused.
    pub waiting: usize,
    /// Tokens of one step on one rank, prompt chunks and decoded tokens together.
    pub step_tokens: usize,
    /// Tokens of key-value cache on one rank: running sequences reserve what they may need. At least the context length.
    pub kv_tokens: usize,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self { running: 32, waiting: 256, step_tokens: 512, kv_tokens: 32_768 }
    }
}

impl EngineLimits {
    /// Makes the limits hold together for a model: progress is always possible.
    pub(crate) fn fitted(self, model: &ModelConfig) -> Self {
        let running = self.running.max(1);
        Self {
            running,
            waiting: self.waiting,
            // Every running sequence decodes in every step and something is left for prompts.
            step_tokens: self.step_tokens.max(2 * running),
            kv_tokens: self.kv_tokens.max(model.max_positions),
        }
    }
}
