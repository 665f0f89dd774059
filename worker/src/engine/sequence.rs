//! One sequence from its prompt to its finish.

use semmoe_engines::sglang::encode_routed_experts;
use semmoe_text::{TextError, Tokenizer};
use serde::{Deserialize, Serialize};

use super::batch::Ready;
use super::logprobs::logprobs;
use super::queue::Due;
use super::request::{Finish, SequenceRequest, TokenLogprobs};
use super::sampler::Sampler;
use super::text::SequenceText;
use crate::ep::StepPhase;
use crate::model::{KvCache, ModelConfig, Next, StepItem, Wants};

/// Fills the expert ids of dense layers.
const NO_EXPERT: i32 = -1;

/// A running sequence.
pub(super) struct Sequence {
    pub(super) carried: Carried,
    /// Under attention tp, the rank that samples the sequence's tokens.
    pub(super) owner: usize,
    pub(super) kv: KvCache,
    /// Present only if there are stop texts.
    text: Option<SequenceText>,
}

/// A sequence's state between two steps, without its KV cache, as sent to other ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Carried {
    pub(super) request: SequenceRequest,
    /// Number of prompt tokens processed by the model.
    fed: usize,
    generated: Vec<u32>,
    sampler: Sampler,
}

impl Carried {
    /// Returns the number of prompt and generated tokens so far.
    pub(super) fn tokens(&self) -> usize {
        self.request.tokens.len() + self.generated.len()
    }

    /// Restores the sequence with its KV cache.
    pub(super) fn resume(self, kv: KvCache, owner: usize, tokenizer: &Tokenizer) -> Result<Sequence, TextError> {
        let mut sequence = Sequence::of(self, kv, owner);
        if let Some(text) = &mut sequence.text {
            for &token in &sequence.carried.generated {
                text.push(tokenizer, token)?;
            }
        }
        Ok(sequence)
    }
}

impl Sequence {
    /// Starts a sequence; `kv` may already contain a prefix of the prompt.
    pub(super) fn new(request: SequenceRequest, kv: KvCache, owner: usize) -> Self {
        let sampler = Sampler::new(request.sampling);
        Self::of(Carried { request, fed: kv.len(), generated: Vec::new(), sampler }, kv, owner)
    }

    fn of(carried: Carried, kv: KvCache, owner: usize) -> Self {
        let text = (!carried.request.stop.texts.is_empty()).then(|| SequenceText::new(&carried.request));
        Self { carried, owner, kv, text }
    }

    pub(super) fn ready(&self) -> Ready {
        match self.carried.request.tokens.len() - self.carried.fed {
            0 => Ready::Decode,
            tokens => Ready::Prompt { tokens, due: Due::of(&self.carried.request) },
        }
    }

    /// Builds the model's input for the next `count` tokens, with an output if they include the last known token.
    pub(super) fn step_item(&mut self, count: usize) -> StepItem<'_> {
        let wants = self.wants();
        let prompt = &self.carried.request.tokens[self.carried.fed..];
        let (tokens, ends, phase) = match self.carried.generated.last() {
            Some(last) if prompt.is_empty() => (std::slice::from_ref(last), true, StepPhase::Decode),
            _ => (&prompt[..count], count == prompt.len(), StepPhase::Prefill),
        };
        StepItem { kv: &mut self.kv, tokens, wants: if ends { wants } else { Wants::Nothing }, phase }
    }

    /// Records that a step processed `count` tokens.
    pub(super) fn advance(&mut self, count: usize) {
        self.carried.fed = (self.carried.fed + count).min(self.carried.request.tokens.len());
    }

    /// Whether stop tokens are still disallowed.
    fn is_early(&self) -> bool {
        self.carried.generated.len() < self.carried.request.min_new_tokens as usize
    }

    /// Returns the cheapest model output that suffices to sample the next token.
    fn wants(&self) -> Wants {
        let SequenceRequest { logprobs, stop, .. } = &self.carried.request;
        let filtered = self.is_early() && !stop.token_ids.is_empty();
        match self.carried.sampler.draw() {
            _ if logprobs.is_some() || filtered => Wants::Logits,
            Some(draw) => Wants::Drawn(draw),
            None => Wants::Likeliest,
        }
    }

    /// Samples the next token; returns `None` if the logits are unusable.
    pub(super) fn sample(&mut self, next: Next<'_>) -> Option<Sampled> {
        let logits = match next {
            Next::Token(token) => {
                self.carried.sampler.advance();
                return token.map(|token| Sampled { token, logprobs: None });
            }
            Next::Logits(logits) => logits,
        };
        let (early, stop) = (self.is_early(), &self.carried.request.stop);
        let token = self.carried.sampler.sample(logits, |id| !(early && stop.token_ids.contains(&id)))?;
        let logprobs = self.carried.request.logprobs.map(|top| logprobs(logits, token, usize::from(top)));
        Some(Sampled { token, logprobs })
    }

    /// Appends the next token; returns the finish reason if the sequence ends with it.
    pub(super) fn push(&mut self, token: u32, tokenizer: &Tokenizer) -> Result<Option<Finish>, TextError> {
        self.carried.generated.push(token);
        let stopped = match &mut self.text {
            Some(text) => text.push(tokenizer, token)?.1,
            None => None,
        };
        Ok(if self.carried.request.stop.token_ids.contains(&token) {
            Some(Finish::Token(token))
        } else if let Some(text) = stopped {
            Some(Finish::Text(text))
        } else {
            let limit = self.carried.request.max_new_tokens;
            (self.carried.generated.len() >= limit as usize).then_some(Finish::Length(limit))
        })
    }

    /// Returns the routed experts in SGLang's encoding, if requested: base64 of i32 `[positions, all layers, k]`.
    pub(super) fn encoded_routes(&self, model: &ModelConfig) -> Option<String> {
        let routes = self.kv.routes(self.carried.request.routes_from? as usize);
        Some(encode_routed_experts(&with_dense_layers(&routes, model)))
    }
}

/// A token sampled for a sequence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sampled {
    pub(super) token: u32,
    pub(super) logprobs: Option<TokenLogprobs>,
}

/// Returns the most cache tokens that a sequence can need; its last token never enters the cache.
pub(super) fn reservation(request: &SequenceRequest) -> usize {
    request.tokens.len().saturating_add(request.max_new_tokens as usize).saturating_sub(1)
}

/// Expands `[n, L, k]` to `[n, all layers, k]`.
fn with_dense_layers(routes: &[u16], model: &ModelConfig) -> Vec<i32> {
    let k = model.top_k;
    let mut rows = Vec::with_capacity(routes.len() / model.num_moe_layers().max(1) * model.num_layers);
    for position in routes.chunks_exact(model.num_moe_layers() * k) {
        let begin = rows.len();
        rows.resize(begin + model.num_layers * k, NO_EXPERT);
        for (layer, experts) in model.moe_layers.iter().zip(position.chunks_exact(k)) {
            let at = begin + usize::from(*layer) * k;
            for (slot, expert) in rows[at..at + k].iter_mut().zip(experts) {
                *slot = i32::from(*expert);
            }
        }
    }
    rows
}
