//! One sequence from its prompt to its end.

use semmoe_engines::sglang::encode_routed_experts;
use semmoe_text::{TextError, Tokenizer};

use super::batch::Ready;
use super::request::{Finish, SequenceRequest};
use super::sampler::Sampler;
use super::text::SequenceText;
use crate::ep::StepPhase;
use crate::model::{KvCache, ModelConfig};

/// In place of an expert in the rows of a dense layer.
const NO_EXPERT: i32 = -1;

/// A running sequence.
pub(super) struct Sequence {
    request: SequenceRequest,
    pub(super) kv: KvCache,
    /// Prompt tokens that went through the model.
    fed: usize,
    generated: Vec<u32>,
    sampler: Sampler,
    /// Only where there are stop texts to look for.
    text: Option<SequenceText>,
    /// `[positions from routes_from, L, k]`
    routes: Vec<u16>,
}

impl Sequence {
    pub(super) fn new(request: SequenceRequest, kv: KvCache) -> Self {
        Self {
            kv,
            fed: 0,
            generated: Vec::new(),
            sampler: Sampler::new(request.sampling),
            text: (!request.stop.texts.is_empty()).then(|| SequenceText::new(&request)),
            routes: Vec::new(),
            request,
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.request.id
    }

    /// Tokens of prompt and answer so far.
    pub(super) fn tokens(&self) -> usize {
        self.request.tokens.len() + self.generated.len()
    }

    /// Tokens of cache that it may come to need.
    pub(super) fn reserved(&self) -> usize {
        reservation(&self.request)
    }

    pub(super) fn ready(&self) -> Ready {
        match self.request.tokens.len() - self.fed {
            0 => Ready::Decode,
            left => Ready::Prompt(left),
        }
    }

    /// What the model needs for the next `count` tokens: cache, tokens, whether logits are wanted, and the phase.
    pub(super) fn step_parts(&mut self, count: usize) -> (&mut KvCache, &[u32], bool, StepPhase) {
        let prompt = &self.request.tokens[self.fed..];
        match self.generated.last() {
            Some(last) if prompt.is_empty() => (&mut self.kv, std::slice::from_ref(last), true, StepPhase::Decode),
            _ => (&mut self.kv, &prompt[..count], count == prompt.len(), StepPhase::Prefill),
        }
    }

    /// Takes note of a step with `count` tokens; `routes` is `[count, L, k]`.
    pub(super) fn advance(&mut self, count: usize, routes: &[u16]) {
        let begin = self.fed + self.generated.len().saturating_sub(1);
        self.fed = (self.fed + count).min(self.request.tokens.len());
        if let Some(from) = self.request.routes_from {
            let width = routes.len() / count.max(1);
            let skipped = (from as usize).saturating_sub(begin).min(count);
            self.routes.extend_from_slice(&routes[skipped * width..]);
        }
    }

    /// Chooses the next token and says whether the sequence ends with it; `None` if the logits are unusable.
    pub(super) fn choose(
        &mut self,
        logits: &[f32],
        tokenizer: &Tokenizer,
    ) -> Result<Option<(u32, Option<Finish>)>, TextError> {
        let stop = &self.request.stop;
        let early = self.generated.len() < self.request.min_new_tokens as usize;
        let Some(token) = self.sampler.sample(logits, |id| !(early && stop.token_ids.contains(&id))) else {
            return Ok(None);
        };
        self.generated.push(token);
        let stopped = match &mut self.text {
            Some(text) => text.push(tokenizer, token)?.1,
            None => None,
        };
        let finish = if stop.token_ids.contains(&token) {
            Some(Finish::Token(token))
        } else if let Some(text) = stopped {
            Some(Finish::Text(text))
        } else {
            let limit = self.request.max_new_tokens;
            (self.generated.len() >= limit as usize).then_some(Finish::Length(limit))
        };
        Ok(Some((token, finish)))
    }

    /// The experts in SGLang's encoding, if asked for: base64 of i32 `[positions, all layers, k]`.
    pub(super) fn encoded_routes(&self, model: &ModelConfig) -> Option<String> {
        self.request.routes_from?;
        Some(encode_routed_experts(&with_dense_layers(&self.routes, model)))
    }
}

/// Tokens of cache that a sequence may come to need: the last token never enters it.
pub(super) fn reservation(request: &SequenceRequest) -> usize {
    request.tokens.len().saturating_add(request.max_new_tokens as usize)
}

/// `[n, L, k]` to `[n, all layers, k]`.
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
