//! The request and the events of a sequence: plain data, validated by rank 0 before it is sent to a rank.

use serde::{Deserialize, Serialize};

use crate::ep::{Counters, Timings};
use crate::model::{DeviceWork, ExpertFetches, KvUsage};

/// One sequence to run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SequenceRequest {
    /// Unique within the unit.
    pub(crate) id: u64,
    /// The prompt: at least one id, each below the vocabulary size, and room for `max_new_tokens` in the context.
    pub(crate) tokens: Vec<u32>,
    /// At least one.
    pub(crate) max_new_tokens: u32,
    /// No stop of any kind before this many tokens.
    pub(crate) min_new_tokens: u32,
    /// How to choose tokens.
    pub(crate) sampling: Sampling,
    /// When to stop early.
    pub(crate) stop: StopRules,
    /// Reports the experts of all positions, starting at this one.
    pub(crate) routes_from: Option<u32>,
    /// Report the probability of every new token, and of this many alternatives.
    pub(crate) logprobs: Option<u8>,
    /// The rank that it was pinned to, or on before attention became tp: where it goes if attention becomes dp.
    pub(crate) home: Option<u16>,
    /// The client's; 0 without one.
    pub(crate) priority: i16,
    /// Its due time ([`super::due_us`]), set by rank 0.
    pub(crate) due_us: i64,
}

/// How to choose a token among the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sampling {
    /// 0 is greedy.
    pub(crate) temperature: f32,
    /// Above 0, at most 1.
    pub(crate) top_p: f32,
    /// Candidates kept; 0 is all.
    pub(crate) top_k: u32,
    /// Equal seeds give equal tokens.
    pub(crate) seed: u64,
}

/// When to stop before `max_new_tokens`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StopRules {
    /// Tokens that end the sequence, the model's own included unless the request ignores them.
    pub(crate) token_ids: Vec<u32>,
    /// Texts that end the sequence.
    pub(crate) texts: Vec<String>,
    /// Whether special tokens are removed from the text that is searched for stop texts.
    pub(crate) skip_special: bool,
}

/// Why a sequence ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Finish {
    /// A stop token, which is the last one.
    Token(u32),
    /// A stop text.
    Text(String),
    /// Reached `max_new_tokens`.
    Length(u32),
    /// Cancelled.
    Abort,
}

/// An event in the life of a sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum SequenceEvent {
    /// It joined the batch.
    Begun {
        /// Prompt tokens found in the cache.
        cached_tokens: u32,
    },
    /// The next token.
    Token {
        /// The token.
        id: u32,
        /// Present if requested.
        logprobs: Option<TokenLogprobs>,
    },
    /// The end.
    Finished {
        /// Why.
        finish: Finish,
        /// The experts of every position but the last, if requested, in SGLang's encoding.
        routes: Option<String>,
    },
    /// An error that concerns only this sequence.
    Failed {
        /// One sentence.
        message: String,
    },
}

/// Natural log-probabilities of a token and its alternatives.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TokenLogprobs {
    /// The token's own.
    pub(crate) logprob: f32,
    /// The likeliest tokens, in descending order.
    pub(crate) top: Vec<(u32, f32)>,
}

impl SequenceEvent {
    /// Whether this is the sequence's last event.
    pub(crate) fn is_last(&self) -> bool {
        !matches!(self, Self::Begun { .. } | Self::Token { .. })
    }
}

/// Counts and loads of one rank between two steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankStats {
    /// Activations, bytes and tokens since the start.
    pub(crate) counters: Counters,
    /// Times since the start.
    pub(crate) timings: Timings,
    /// Sequences in the running batch.
    pub(crate) running: u64,
    /// Sequences waiting.
    pub(crate) waiting: u64,
    /// Prompt tokens of the waiting ones.
    pub(crate) waiting_tokens: u64,
    /// Pages of the key-value cache.
    pub(crate) kv: KvUsage,
    /// Prompt tokens since the start whose pages were cached.
    pub(crate) cached_tokens: u64,
    /// Statistics of streamed experts.
    pub(crate) fetches: Option<ExpertFetches>,
    /// Statistics of its GPU, if it has one.
    #[serde(default)]
    pub(crate) device: Option<DeviceWork>,
    /// Prompt and generated tokens of all sequences here, running and waiting.
    pub(crate) total_tokens: u64,
}
