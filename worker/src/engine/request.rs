//! A sequence's request and events: plain data, validated by rank 0 before it is sent to a rank.

use serde::{Deserialize, Serialize};

use crate::ep::{Counters, Timings};
use crate::model::{DeviceWork, ExpertFetches, KvUsage};

/// One sequence to run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SequenceRequest {
    /// Unique within the unit.
    pub(crate) id: u64,
    /// The prompt: at least one token id, each below the vocabulary size, with room left for `max_new_tokens` in the
    /// context.
    pub(crate) tokens: Vec<u32>,
    /// At least one.
    pub(crate) max_new_tokens: u32,
    /// No stop rule applies before this many new tokens.
    pub(crate) min_new_tokens: u32,
    /// How to choose tokens.
    pub(crate) sampling: Sampling,
    /// When to stop early.
    pub(crate) stop: StopRules,
    /// If set, the routed experts are reported for all positions from this one on.
    pub(crate) routes_from: Option<u32>,
    /// If set, the log-probability of every new token is reported, with this many alternatives.
    pub(crate) logprobs: Option<u8>,
    /// The rank that the sequence was pinned to, or that ran it before attention switched to tp. The sequence returns
    /// there if attention switches to dp.
    pub(crate) home: Option<u16>,
    /// The client's priority; 0 if it set none.
    pub(crate) priority: i16,
    /// The due time ([`super::due_us`]), set by rank 0.
    pub(crate) due_us: i64,
}

/// How to sample a token from the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sampling {
    /// 0 is greedy.
    pub(crate) temperature: f32,
    /// Above 0, at most 1.
    pub(crate) top_p: f32,
    /// Maximum number of candidates; 0 means all.
    pub(crate) top_k: u32,
    /// Equal seeds produce equal tokens.
    pub(crate) seed: u64,
}

/// Conditions that end a sequence before `max_new_tokens`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StopRules {
    /// Tokens that end the sequence, including the model's own end tokens unless the request ignores them.
    pub(crate) token_ids: Vec<u32>,
    /// Texts that end the sequence.
    pub(crate) texts: Vec<String>,
    /// Whether special tokens are removed before the text is searched for stop texts.
    pub(crate) skip_special: bool,
}

/// Why a sequence ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Finish {
    /// A stop token, the last token of the sequence.
    Token(u32),
    /// A stop text.
    Text(String),
    /// Reached `max_new_tokens`.
    Length(u32),
    /// Cancelled.
    Abort,
}

/// An event of one sequence.
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
        /// The routed experts of every position but the last, if requested, in SGLang's encoding.
        routes: Option<String>,
    },
    /// An error that affects only this sequence.
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
    /// The most likely tokens, in descending order.
    pub(crate) top: Vec<(u32, f32)>,
}

impl SequenceEvent {
    /// Whether this is the sequence's last event.
    pub(crate) fn is_last(&self) -> bool {
        !matches!(self, Self::Begun { .. } | Self::Token { .. })
    }
}

/// One rank's counters and load between two steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankStats {
    /// Activations, bytes and tokens since startup.
    pub(crate) counters: Counters,
    /// Times since the start.
    pub(crate) timings: Timings,
    /// Number of sequences in the running batch.
    pub(crate) running: u64,
    /// Sequences waiting.
    pub(crate) waiting: u64,
    /// Prompt tokens of the waiting sequences.
    pub(crate) waiting_tokens: u64,
    /// KV cache page usage.
    pub(crate) kv: KvUsage,
    /// Prompt tokens found in the cache since startup.
    pub(crate) cached_tokens: u64,
    /// Statistics of streamed experts.
    pub(crate) fetches: Option<ExpertFetches>,
    /// Statistics of the rank's GPU, if it has one.
    #[serde(default)]
    pub(crate) device: Option<DeviceWork>,
    /// Prompt and generated tokens of all running and waiting sequences on this rank.
    pub(crate) total_tokens: u64,
}
