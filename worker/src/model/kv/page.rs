//! One page of the KV cache.

use super::CacheShape;
use crate::model::compute::{Arena, NR, Piece};

/// Tokens per page, which is the granularity of prefix sharing. A page is two panels wide, so that a product with one
/// page keeps the vector units busy.
pub const PAGE_TOKENS: usize = 64;
const _: () = assert!(PAGE_TOKENS.is_multiple_of(NR));

/// Pages are allocated in arenas of this size: two huge pages on most machines.
const ARENA_BYTES: usize = 4 << 20;

/// Keys and values of [`PAGE_TOKENS`] tokens in every layer, and the tokens' experts. Data past the end of the sequence
/// is finite or masked, and never affects results.
#[derive(Debug)]
pub(in crate::model) struct Page {
    /// `[layers, kv_heads]`, each with keys `[key_width, PAGE_TOKENS]` (the right operand of queries x keys), then
    /// values `[PAGE_TOKENS, value_stride]` (the right operand of scores x values), so that both are read in memory
    /// order.
    data: Piece<f32>,
    /// `[tokens so far, L, k]`
    pub(super) routes: Vec<u16>,
}

/// Elements per head and layer in a page.
pub(super) fn head_elements(shape: &CacheShape) -> usize {
    PAGE_TOKENS * (shape.key_width + shape.value_stride())
}

/// Elements of a page.
pub(super) fn elements(shape: &CacheShape) -> usize {
    shape.layers * shape.kv_heads * head_elements(shape)
}

/// Creates an arena for as many pages as fit into [`ARENA_BYTES`], but at least one.
pub(super) fn arena(shape: &CacheShape) -> Arena {
    let page = Arena::bytes_of::<f32>(elements(shape));
    Arena::new(page.saturating_mul((ARENA_BYTES / page.max(1)).max(1)))
}

impl Page {
    /// Allocates the next page from an arena, if there is room for one.
    pub(super) fn take(shape: &CacheShape, arena: &mut Arena) -> Option<Self> {
        Some(Self { data: arena.take(elements(shape))?, routes: Vec::new() })
    }

    /// Returns the memory of keys and values to the operating system until they are written again.
    pub(super) fn release(&mut self) {
        self.data.release();
    }

    fn head(&self, shape: &CacheShape, layer: usize, head: usize) -> &[f32] {
        &self.data[(layer * shape.kv_heads + head) * head_elements(shape)..][..head_elements(shape)]
    }

    /// Returns one head's keys, `[key_width, PAGE_TOKENS]`.
    pub(in crate::model) fn keys(&self, shape: &CacheShape, layer: usize, head: usize) -> &[f32] {
        &self.head(shape, layer, head)[..PAGE_TOKENS * shape.key_width]
    }

    /// Returns one head's values, `[PAGE_TOKENS, value_stride]`.
    pub(in crate::model) fn values(&self, shape: &CacheShape, layer: usize, head: usize) -> &[f32] {
        &self.head(shape, layer, head)[PAGE_TOKENS * shape.key_width..]
    }

    /// Writes one head's key and value for token `at` of the page.
    pub(super) fn write(
        &mut self,
        shape: &CacheShape,
        layer: usize,
        head: usize,
        at: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let from = (layer * shape.kv_heads + head) * head_elements(shape);
        let (keys, values) = self.data[from..][..head_elements(shape)].split_at_mut(PAGE_TOKENS * shape.key_width);
        for (slot, element) in keys[at..].iter_mut().step_by(PAGE_TOKENS).zip(key) {
            *slot = *element;
        }
        values[at * shape.value_stride()..][..shape.value_width].copy_from_slice(value);
    }

    /// Appends the routes of the most recently written tokens, `width` per token. The first call allocates memory for
    /// the whole page.
    pub(super) fn push_routes(&mut self, routes: &[u16], width: usize) {
        if self.routes.is_empty() {
            self.routes.reserve_exact(PAGE_TOKENS * width);
        }
        self.routes.extend_from_slice(routes);
    }

    /// Drops the routes of all but the first `tokens` of the `held` tokens in this page.
    pub(super) fn truncate_routes(&mut self, tokens: usize, held: usize) {
        let width = self.routes.len() / held.max(1);
        self.routes.truncate(tokens * width);
    }

    /// Returns the keys and values as bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.data)
    }

    /// Returns the keys and values as bytes to be filled.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.data)
    }
}
