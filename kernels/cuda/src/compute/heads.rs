//! Computes queries, keys and values from a projection's rows; defines the KV cache pages.

use semmoe_kernels::Dtype;

use super::params::HeadRowsParams;
use super::rows::MAX_ROWS;
use super::{address, apart, bytes_of, of_type};
use crate::calls::ELEMENT_ALIGNMENT;
use crate::error::LaunchError;
use crate::launch::Launch;
use crate::team::{Buffer, in_range};

/// Tokens per page (`PAGE_TOKENS`).
pub const PAGE_TOKENS: u64 = 64;
/// Maximum number of elements per head (`HEAD_PAIRS`).
pub const MAX_HEAD_ELEMENTS: u64 = 256;
/// Threads per block, one warp per head (`HEAD_THREADS`).
const HEAD_THREADS: u32 = 256;

/// One layer's heads, and the page pool. For each layer and KV head, a page has the keys, `[dim, PAGE_TOKENS]`, then
/// the values, `[PAGE_TOKENS, dim]`.
#[derive(Clone, Copy, Debug)]
pub struct PagedHeads {
    /// `[pages, layers, kv_heads, 2, dim x PAGE_TOKENS]`
    pub pool: Buffer,
    /// Number of pages in the pool.
    pub pages: u64,
    /// The layer.
    pub layer: u64,
    /// Number of layers per page.
    pub layers: u64,
    /// Number of KV heads.
    pub kv_heads: u64,
    /// Query heads per KV head.
    pub group: u64,
    /// Elements per head; must be even.
    pub dim: u64,
    /// Element type of queries, keys and values.
    pub dtype: Dtype,
}

/// Checked [`PagedHeads`], with addresses in place of buffers.
#[derive(Clone, Copy)]
pub(crate) struct CheckedHeads {
    pub(crate) pool: u64,
    pub(crate) page_elements: u64,
    pub(crate) layer_begins: u64,
    pub(crate) pages: u32,
    pub(crate) kv_heads: u32,
    pub(crate) group: u32,
    pub(crate) dim: u32,
}

impl PagedHeads {
    /// Returns the number of elements of all queries of a row.
    pub fn query_width(&self) -> u64 {
        bytes_of(&[self.kv_heads, self.group, self.dim])
    }

    /// Returns the number of elements of all keys of a row, which is also that of all values.
    pub fn key_width(&self) -> u64 {
        bytes_of(&[self.kv_heads, self.dim])
    }

    /// Returns the number of elements of one layer in a page.
    fn layer_elements(&self) -> u64 {
        bytes_of(&[self.kv_heads, self.dim, 2 * PAGE_TOKENS])
    }

    /// Returns the size of a page.
    pub fn page_bytes(&self) -> u64 {
        bytes_of(&[self.layers, self.layer_elements(), self.dtype.bytes() as u64])
    }

    pub(crate) fn check(&self) -> Result<CheckedHeads, LaunchError> {
        let dim = in_range("elements per head", self.dim, 2, MAX_HEAD_ELEMENTS)?;
        in_range("elements per head modulo 2", self.dim % 2, 0, 0)?;
        let layers = in_range("layers", self.layers, 1, 1 << 16)?;
        let layer = in_range("layer", self.layer, 0, u64::from(layers) - 1)?;
        let kv_heads = in_range("key-value heads", self.kv_heads, 1, 1 << 12)?;
        let group = in_range("query heads per key-value head", self.group, 1, 1 << 12)?;
        Ok(CheckedHeads {
            pool: address("pool of pages", self.pool, bytes_of(&[self.pages, self.page_bytes()]), ELEMENT_ALIGNMENT)?,
            page_elements: u64::from(layers) * self.layer_elements(),
            layer_begins: u64::from(layer) * self.layer_elements(),
            pages: in_range("pages", self.pages, 0, u64::from(u32::MAX) - 1)?,
            kv_heads,
            group,
            dim,
        })
    }

    /// `[rows, kv_heads, group, dim]`
    pub(crate) fn queries(&self, what: &'static str, buffer: Buffer, rows: u64) -> Result<u64, LaunchError> {
        let bytes = bytes_of(&[rows, self.query_width(), self.dtype.bytes() as u64]);
        address(what, buffer, bytes, ELEMENT_ALIGNMENT)
    }
}

/// Layout of a projection's row: queries, then keys, then values. If a norm spans all ranks' heads, the row has more
/// queries and keys than this rank's heads need.
#[derive(Clone, Copy, Debug)]
pub struct ProjectedHeads {
    /// Number of query elements.
    pub queries: u64,
    /// Number of key elements; values have only the elements of this rank's heads.
    pub keys: u64,
    /// The first query element of this rank's heads.
    pub first_query: u64,
    /// The first key element of this rank's heads.
    pub first_key: u64,
}

/// RMSNorm of queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms {
    /// f32, `[dim]`; or `[queries]`, for a norm over all queries of the projection
    pub query: Buffer,
    /// f32, `[dim]` or `[keys]`
    pub key: Buffer,
    /// Whether a norm spans all heads of the projection.
    pub whole: bool,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// How the elements of a head are paired for rotation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RotaryLayout {
    /// Each element of the first half with its counterpart in the second.
    Halves,
    /// Each element at an even index with the next one.
    Pairs,
}

/// Rotation angles by position.
#[derive(Clone, Copy, Debug)]
pub struct RotaryAngles {
    /// f32 `[positions, elements / 2]`
    pub cos: Buffer,
    /// f32 `[positions, elements / 2]`
    pub sin: Buffer,
    /// Number of positions; keys and queries at larger positions become NaN.
    pub positions: u64,
    /// Number of leading elements of a head that are rotated; must be even.
    pub elements: u64,
    /// How elements are paired for rotation.
    pub layout: RotaryLayout,
}

/// Computes queries, and writes keys and values into their pages, after norm, clipping and rotation.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows {
    /// Heads and pages.
    pub heads: PagedHeads,
    /// `[rows, queries + keys + kv_heads x dim]`
    pub qkv: Buffer,
    /// Layout of `qkv`.
    pub projected: ProjectedHeads,
    /// Norms of queries and keys.
    pub norms: Option<HeadNorms>,
    /// Maximum magnitude of queries, keys and values.
    pub clip: Option<f32>,
    /// Rotations of queries and keys.
    pub angles: RotaryAngles,
    /// `[rows]` u32
    pub positions: Buffer,
    /// `[rows]` u32: each row's page. If the pool has no such page, nothing is written and the queries become NaN.
    pub page_of: Buffer,
    /// `[rows, kv_heads, group, dim]`
    pub queries: Buffer,
    /// Rows.
    pub rows: u64,
}

impl HeadRows {
    /// Returns the addresses of the norms' weights.
    fn norms(&self) -> Result<[u64; 2], LaunchError> {
        let Some(norms) = self.norms else { return Ok([0; 2]) };
        let elements = match norms.whole {
            true => [self.projected.queries, self.projected.keys],
            false => [self.heads.dim; 2],
        };
        Ok([
            address("query norm", norms.query, bytes_of(&[elements[0], 4]), 4)?,
            address("key norm", norms.key, bytes_of(&[elements[1], 4]), 4)?,
        ])
    }

    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self) -> Result<Launch, LaunchError> {
        let Self { heads, projected, angles, rows, .. } = self;
        let kernel = of_type("attention", heads.dtype, ["semmoe_head_rows_f32", "semmoe_head_rows_bf16"])?;
        let CheckedHeads { pool, page_elements, layer_begins, pages, kv_heads, group, dim } = heads.check()?;
        let query_elements = in_range("projected queries", projected.queries, heads.query_width(), 1 << 24)?;
        let key_elements = in_range("projected keys", projected.keys, heads.key_width(), 1 << 24)?;
        let width = bytes_of(&[projected.queries + projected.keys + heads.key_width(), heads.dtype.bytes() as u64]);
        let angle_bytes = bytes_of(&[angles.positions, angles.elements / 2, 4]);
        in_range("rotated elements modulo 2", angles.elements % 2, 0, 0)?;
        let [query_norm, key_norm] = self.norms()?;
        let params = HeadRowsParams {
            qkv: address("qkv", self.qkv, bytes_of(&[*rows, width]), heads.dtype.bytes() as u64)?,
            query_norm,
            key_norm,
            cos: address("cosines", angles.cos, angle_bytes, 4)?,
            sin: address("sines", angles.sin, angle_bytes, 4)?,
            positions: address("positions", self.positions, bytes_of(&[*rows, 4]), 4)?,
            page_of: address("pages of rows", self.page_of, bytes_of(&[*rows, 4]), 4)?,
            queries: heads.queries("queries", self.queries, *rows)?,
            pool,
            page_elements,
            layer_begins,
            rows: in_range("rows", *rows, 0, MAX_ROWS)?,
            pages,
            query_elements,
            key_elements,
            first_query: in_range("first query", projected.first_query, 0, projected.queries - heads.query_width())?,
            first_key: in_range("first key", projected.first_key, 0, projected.keys - heads.key_width())?,
            kv_heads,
            group,
            dim,
            rotated: in_range("rotated elements", angles.elements, 0, heads.dim)?,
            angles: in_range("positions with angles", angles.positions, 0, u64::from(u32::MAX))?,
            neighbours: u32::from(angles.layout == RotaryLayout::Pairs),
            whole: u32::from(self.norms.is_some_and(|norms| norms.whole)),
            epsilon: self.norms.map_or(0.0, |norms| norms.epsilon),
            clip: self.clip.unwrap_or(f32::INFINITY),
            padding: 0,
        };
        let warps = u64::from(HEAD_THREADS / 32);
        let blocks = (heads.kv_heads * (heads.group + 2)).div_ceil(warps);
        apart(kernel, [blocks, *rows], HEAD_THREADS, &params)
    }
}
