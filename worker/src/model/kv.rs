//! Keys and values of one sequence, laid out as the attention kernel reads them.

use super::ModelConfig;
use super::compute::NR;

/// Tokens by which a cache grows; a multiple of [`NR`].
const CHUNK_TOKENS: usize = 256;
const _: () = assert!(CHUNK_TOKENS.is_multiple_of(NR));

/// Keys and values of one sequence in every layer: contiguous per layer and head, grown in chunks, at most
/// `max_position_embeddings` tokens.
pub struct KvCache {
    /// `[layers, kv_heads]`
    heads: Vec<HeadCache>,
    kv_heads: usize,
    head_dim: usize,
    len: usize,
    max_positions: usize,
}

/// Keys and values of one head of one layer. What lies past the sequence's end is finite and never counts.
#[derive(Clone, Default)]
pub(super) struct HeadCache {
    /// Panels of [`NR`] keys, each `[head_dim, NR]`: the right operand of queries x keys.
    pub(super) keys: Vec<f32>,
    /// `[tokens, value_stride]`: the right operand of scores x values.
    pub(super) values: Vec<f32>,
}

impl KvCache {
    pub(super) fn new(config: &ModelConfig) -> Self {
        Self {
            heads: vec![HeadCache::default(); config.num_layers * config.kv_heads],
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            len: 0,
            max_positions: config.max_positions,
        }
    }

    /// Tokens of the sequence so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token has been taken yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that the sequence may still take.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.max_positions - self.len
    }

    /// Bytes of memory that it holds.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.heads.iter().map(|head| (head.keys.capacity() + head.values.capacity()) * size_of::<f32>()).sum()
    }

    /// Forgets all tokens after the first `len`; what remains is as if they had never been taken.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Makes room for `tokens` more; they count only after [`KvCache::commit`].
    pub(super) fn reserve(&mut self, tokens: usize) {
        let chunks = (self.len + tokens).div_ceil(CHUNK_TOKENS);
        let (keys, values) = (chunks * CHUNK_TOKENS * self.head_dim, chunks * CHUNK_TOKENS * self.value_stride());
        for head in &mut self.heads {
            if head.keys.len() < keys {
                head.keys.reserve_exact(keys - head.keys.len());
                head.keys.resize(keys, 0.0);
                head.values.reserve_exact(values - head.values.len());
                head.values.resize(values, 0.0);
            }
        }
    }

    pub(super) fn commit(&mut self, tokens: usize) {
        self.len += tokens;
    }

    pub(super) fn head(&self, layer: usize, head: usize) -> &HeadCache {
        &self.heads[layer * self.kv_heads + head]
    }

    /// Elements from one value to the next.
    pub(super) fn value_stride(&self) -> usize {
        self.head_dim.next_multiple_of(NR)
    }

    /// Writes one head's key and value at a position that was reserved.
    pub(super) fn write(&mut self, layer: usize, head: usize, position: usize, key: &[f32], value: &[f32]) {
        let (head_dim, stride) = (self.head_dim, self.value_stride());
        let cache = &mut self.heads[layer * self.kv_heads + head];
        let panel = &mut cache.keys[position / NR * NR * head_dim..][..NR * head_dim];
        for (slot, element) in panel[position % NR..].iter_mut().step_by(NR).zip(key) {
            *slot = *element;
        }
        cache.values[position * stride..][..head_dim].copy_from_slice(value);
    }
}
