//! One page.

use super::CacheShape;
use crate::model::compute::{Arena, NR, Piece};

/// Tokens of a page: the granularity of prefix sharing. Two panels, so that a product with one page keeps the vector
/// units busy.
pub const PAGE_TOKENS: usize = 64;
const _: () = assert!(PAGE_TOKENS.is_multiple_of(NR));

/// Pages are allocated in arenas of this size: two huge pages on most machines.
const ARENA_BYTES: usize = 4 << 20;

/// Keys and values of [`PAGE_TOKENS`] tokens in every layer, and the tokens' experts. Content past the sequence's end
/// is finite or masked, and never affects results.
#[derive(Debug)]
pub(in crate::model) struct Page {
    /// `[layers, kv_heads]` of keys `[key_width, PAGE_TOKENS]` (the right operand of queries x keys), then values
    /// `[PAGE_TOKENS, value_stride]` (the right operand of scores x values): both are read in memory order.
    data: Piece<f32>,
    /// `[tokens so far, L, k]`
    pub(super) routes: Vec<u16>,
}

/// Elements of one head of one layer.
pub(super) fn head_elements(shape: &CacheShape) -> usize {
    PAGE_TOKENS * (shape.key_width + shape.value_stride())
}

/// Elements of a page.
pub(super) fn elements(shape: &CacheShape) -> usize {
    shape.layers * shape.kv_heads * head_elements(shape)
}

/// An arena for as many pages as fit into [`ARENA_BYTES`], at least one.
pub(super) fn arena(shape: &CacheShape) -> Arena {
    let page = Arena::bytes_of::<f32>(elements(shape));
    Arena::new(page.saturating_mul((ARENA_BYTES / page.max(1)).max(1)))
}

impl Page {
    /// The next page of an arena, if one is left.
    pub(super) fn take(shape: &CacheShape, arena: &mut Arena) -> Option<Self> {
        Some(Self { data: arena.take(elements(shape))?, routes: Vec::new() })
    }

    /// Returns the memory of keys and values to the system until they are written again.
    pub(super) fn release(&mut self) {
        self.data.release();
    }

    fn head(&self, shape: &CacheShape, layer: usize, head: usize) -> &[f32] {
        &self.data[(layer * shape.kv_heads + head) * head_elements(shape)..][..head_elements(shape)]
    }

    /// One head's keys, `[key_width, PAGE_TOKENS]`.
    pub(in crate::model) fn keys(&self, shape: &CacheShape, layer: usize, head: usize) -> &[f32] {
        &self.head(shape, layer, head)[..PAGE_TOKENS * shape.key_width]
    }

    /// One head's values, `[PAGE_TOKENS, value_stride]`.
    pub(in crate::model) fn values(&self, shape: &CacheShape, layer: usize, head: usize) -> &[f32] {
        &self.head(shape, layer, head)[PAGE_TOKENS * shape.key_width..]
    }

    /// Writes one head's key and value of the page's token `at`.
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

    /// Appends the routes of the tokens written last, `width` for each; the first call allocates for the whole page.
    pub(super) fn push_routes(&mut self, routes: &[u16], width: usize) {
        if self.routes.is_empty() {
            self.routes.reserve_exact(PAGE_TOKENS * width);
        }
        self.routes.extend_from_slice(routes);
    }

    /// Drops the routes of all but the first `tokens` tokens, `width` for each.
    pub(super) fn truncate_routes(&mut self, tokens: usize, held: usize) {
        let width = self.routes.len() / held.max(1);
        self.routes.truncate(tokens * width);
    }

    /// The bytes of keys and values.
    pub(super) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.data)
    }

    /// The bytes of keys and values, to be filled.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.data)
    }
}
