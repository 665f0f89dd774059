//! The content of a cache without its pages: read token by token and head by head, and written into another cache.

use super::*;

/// Keys and values of a sequence by layer and head of the model, token by token.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Content {
    pub(super) tokens: Vec<u32>,
    pub(super) routes: Vec<u16>,
    /// By layer and head.
    pub(super) heads: BTreeMap<(usize, usize), Vec<KeyValue>>,
}

/// The bits of a token's key and value in one head.
type KeyValue = (Vec<u32>, Vec<u32>);

pub(super) fn bits(values: impl Iterator<Item = f32>) -> Vec<u32> {
    values.map(f32::to_bits).collect()
}

/// The content of a cache; its first head is the model's head `first`.
pub(super) fn content(cache: &KvCache, first: usize) -> Content {
    let shape = *cache.shape();
    let mut content = Content { tokens: cache.tokens().to_vec(), routes: cache.routes(0), ..Content::default() };
    for (layer, head) in (0..shape.layers).flat_map(|layer| (0..shape.kv_heads).map(move |head| (layer, head))) {
        let of_head = content.heads.entry((layer, first + head)).or_default();
        for (_, held, page) in cache.pages(cache.len()) {
            for at in 0..held {
                let key = bits(page.keys(&shape, layer, head).iter().skip(at).step_by(PAGE_TOKENS).copied());
                let value = &page.values(&shape, layer, head)[at * shape.value_stride()..][..shape.value_width];
                of_head.push((key, bits(value.iter().copied())));
            }
        }
    }
    content
}

/// A separate cache with that content.
pub(super) fn rebuilt(model: &Model, content: &Content, first: usize) -> KvCache {
    let mut cache = model.new_sequence();
    let shape = *cache.shape();
    assert!(cache.reserve(content.tokens.len()));
    for (layer, head) in (0..shape.layers).flat_map(|layer| (0..shape.kv_heads).map(move |head| (layer, head))) {
        for (position, (key, value)) in content.heads[&(layer, first + head)].iter().enumerate() {
            let floats = |bits: &[u32]| bits.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<f32>>();
            cache.write(layer, head, position, &floats(key), &floats(value));
        }
    }
    cache.commit(&content.tokens, &content.routes);
    cache
}

/// The first head of the model that a cache with this share holds.
pub(super) fn first_head(config: &ModelConfig, share: HeadSlice) -> usize {
    match &config.attention {
        AttentionKind::Grouped(grouped) => share.kv_heads(grouped.kv_heads).start,
        AttentionKind::Latent(_) => 0,
    }
}
