//! One layer's attention on the GPU: grouped heads over KV cache pages.

use semmoe_kernels::{Dtype, Element};
use semmoe_kernels_cuda::Buffer;
use semmoe_kernels_cuda::compute::{
    Attend, GroupLimit, GroupScore, HeadNorms, HeadRows, PagedHeads, ProjectedHeads, RotaryAngles, RotaryLayout,
};

use super::matrix::{DeviceMatrix, Uploader};
use super::memory::Stream;
use super::rows::DevicePlaces;
use crate::ep::UnitError;
use crate::model::attention::Attention;
use crate::model::config::{self, RopeLayout};
use crate::model::grouped::{Grouped, Projected};
use crate::model::kv::{CacheShape, PageMoves};
use crate::model::rope::RotaryTable;
use crate::model::switch::Obstacle;
use crate::model::{LATENT, ModelConfig, ModelError, PAGE_TOKENS};

/// Keys and values of all pages, and the rotary angles for queries and keys.
pub(in crate::model) struct Cache {
    /// Memory large enough for the pages of either attention layout.
    pub(super) pool: Buffer,
    element_bytes: usize,
    now: PageLayout,
    /// The other attention layout's pages, if attention can switch.
    other: Option<PageLayout>,
    angles: RotaryAngles,
}

/// The pages of one attention layout.
pub(super) struct PageLayout {
    pub(super) pages: usize,
    pub(super) shape: CacheShape,
    /// `[pages]`: the position of each page in the pool, in units of pages, indexed by page id.
    pub(super) places: Vec<u32>,
}

impl PageLayout {
    /// Creates the initial layout, with pages in the order of their ids.
    pub(super) fn new(pages: usize, shape: CacheShape) -> Self {
        Self { pages, shape, places: (0..pages as u32).collect() }
    }
}

/// Buffers for a step's attention.
#[derive(Clone, Copy)]
pub(super) struct AttentionBuffers {
    /// `[rows, kv_heads, group, dim]`
    pub(super) queries: Buffer,
    /// Scratch memory for rows whose keys are split among blocks.
    pub(super) scratch: Buffer,
}

impl Cache {
    pub(super) fn new<T: Element>(
        config: &ModelConfig,
        now: PageLayout,
        other: Option<PageLayout>,
        uploader: &Uploader<T>,
    ) -> Result<Self, ModelError> {
        let mut table = RotaryTable::new(config.rope_dim(), &config.rope);
        table.grow(now.shape.max_positions);
        let [cos, sin] = table.all();
        let bytes = |of: &PageLayout| of.pages * Self::page_elements(&of.shape) * size_of::<T>();
        let pool = uploader.allocate(other.iter().map(bytes).fold(bytes(&now), usize::max))?;
        let angles = RotaryAngles {
            cos: uploader.vector(cos)?,
            sin: uploader.vector(sin)?,
            positions: (cos.len() / (config.rope_dim() / 2)) as u64,
            elements: config.rope_dim() as u64,
            layout: match config.rope.layout {
                RopeLayout::Halves => RotaryLayout::Halves,
                RopeLayout::Pairs => RotaryLayout::Pairs,
            },
        };
        Ok(Self { pool, element_bytes: size_of::<T>(), now, other, angles })
    }

    /// Elements in one page of keys and values.
    fn page_elements(shape: &CacheShape) -> usize {
        shape.layers * shape.kv_heads * Self::head_elements(shape)
    }

    /// Elements per head and layer in one page.
    fn head_elements(shape: &CacheShape) -> usize {
        PAGE_TOKENS * (shape.key_width + shape.value_width)
    }

    /// Bytes per head and layer in one page.
    pub(in crate::model) fn head_bytes(&self) -> usize {
        Self::head_elements(&self.now.shape) * self.element_bytes
    }

    /// Maximum number of pages.
    pub(in crate::model) fn pages(&self) -> usize {
        self.now.pages
    }

    /// Returns the position of each page, indexed by page id.
    pub(super) fn places(&self) -> &[u32] {
        &self.now.places
    }

    /// Returns the bytes per page in the current layout and in the other one.
    pub(super) fn page_bytes(&self) -> [usize; 2] {
        let of = |layout: &PageLayout| Self::page_elements(&layout.shape) * self.element_bytes;
        [of(&self.now), self.other.as_ref().map_or(0, of)]
    }

    /// Returns the current positions of the pages to move, and the positions of all pages in the other layout. New
    /// pages come first in the latter, at positions that do not overlap a page in use.
    pub(super) fn place(&self, moves: &PageMoves) -> Result<(Vec<u32>, Vec<u32>), Obstacle> {
        let Some(other) = &self.other else {
            return Err(Obstacle::Own("it was not started with another attention layout".to_owned()));
        };
        let old: Vec<u32> = moves.ids.iter().map(|&id| self.now.places[id as usize]).collect();
        let [from, to] = self.page_bytes();
        let mut in_use = vec![false; other.pages];
        for &place in &old {
            let (first, end) = (place as usize * from / to, ((place as usize + 1) * from).div_ceil(to));
            in_use[first.min(other.pages)..end.min(other.pages)].fill(true);
        }
        let (mut new, behind): (Vec<u32>, Vec<u32>) =
            (0..other.pages as u32).partition(|&place| !in_use[place as usize]);
        if new.len() < moves.new_pages {
            return Err(Obstacle::Own(format!(
                "{} new KV cache pages do not fit alongside those in use, which leave room for {}",
                moves.new_pages,
                new.len()
            )));
        }
        new.extend(behind);
        Ok((old, new))
    }

    /// Records the positions of the other layout's pages.
    pub(super) fn moved_to(&mut self, places: Vec<u32>) {
        if let Some(other) = &mut self.other {
            other.places = places;
        }
    }

    /// Switches to the other layout's pages.
    pub(super) fn exchange(&mut self) {
        if let Some(other) = &mut self.other {
            std::mem::swap(&mut self.now, other);
        }
    }

    /// Returns the scratch bytes that attention over this many rows needs, in whichever layout needs more.
    pub(super) fn scratch_bytes<'a>(
        &self,
        rows: usize,
        dtype: Dtype,
        layouts: impl Iterator<Item = &'a Grouped<DeviceMatrix>>,
    ) -> u64 {
        let shapes = std::iter::once(&self.now).chain(&self.other).map(|layout| layout.shape);
        let bytes = |(shape, of): (CacheShape, &Grouped<DeviceMatrix>)| {
            self.heads_of(shape, 0, of, dtype).scratch_bytes(rows as u64, shape.max_positions as u64)
        };
        shapes.zip(layouts).map(bytes).max().unwrap_or(0)
    }

    /// Describes a layer's heads over these pages.
    fn heads(&self, layer: usize, of: &Grouped<DeviceMatrix>, dtype: Dtype) -> PagedHeads {
        self.heads_of(self.now.shape, layer, of, dtype)
    }

    fn heads_of(&self, shape: CacheShape, layer: usize, of: &Grouped<DeviceMatrix>, dtype: Dtype) -> PagedHeads {
        let CacheShape { layers, kv_heads, key_width, .. } = shape;
        PagedHeads {
            pool: self.pool,
            pages: self.now.pages as u64,
            layer: layer as u64,
            layers: layers as u64,
            kv_heads: kv_heads as u64,
            group: of.heads.group as u64,
            dim: key_width as u64,
            dtype,
        }
    }
}

/// The query and key norms on the GPU.
pub(super) struct DeviceHeadNorms {
    query: Buffer,
    key: Buffer,
}

/// Returns a layer's grouped attention. Other attention kinds are rejected before this point.
pub(super) fn grouped(attention: &Attention<DeviceMatrix>) -> Result<&Grouped<DeviceMatrix>, ModelError> {
    match attention {
        Attention::Grouped(grouped) => Ok(grouped),
        Attention::Latent(_) => Err(ModelError::NotOnGpu(LATENT)),
    }
}

impl DeviceHeadNorms {
    pub(super) fn new<T: Element>(
        grouped: &Grouped<DeviceMatrix>,
        uploader: &Uploader<T>,
    ) -> Result<Option<Self>, ModelError> {
        let norms = grouped
            .norms
            .as_ref()
            .map(|norms| Ok(Self { query: uploader.vector(&norms.query)?, key: uploader.vector(&norms.key)? }));
        norms.transpose()
    }
}

/// Computes attention for rows whose projections are in `qkv`, and writes it to `out`, `[rows, heads x dim]`.
pub(super) struct AttentionCall<'a> {
    pub(super) layer: usize,
    pub(super) heads: &'a Grouped<DeviceMatrix>,
    pub(super) norms: Option<&'a DeviceHeadNorms>,
    pub(super) cache: &'a Cache,
    pub(super) places: &'a DevicePlaces,
    pub(super) buffers: AttentionBuffers,
    pub(super) qkv: Buffer,
    pub(super) out: Buffer,
    pub(super) dtype: Dtype,
}

impl AttentionCall<'_> {
    pub(super) fn run(self, stream: &mut Stream) -> Result<(), UnitError> {
        let Self { layer, heads: of, cache, places, buffers, dtype, .. } = self;
        let (heads, rows) = (cache.heads(layer, of, dtype), places.rows as u64);
        let norms = of.norms.as_ref().zip(self.norms).map(|(host, device)| HeadNorms {
            query: device.query,
            key: device.key,
            whole: host.query.len() != of.heads.key_width,
            epsilon: host.eps,
        });
        let Projected { queries, keys, first_query, first_key } = of.projected;
        let [queries, keys, first_query, first_key] = [queries, keys, first_query, first_key].map(|at| at as u64);
        let prepare = HeadRows {
            heads,
            qkv: self.qkv,
            projected: ProjectedHeads { queries, keys, first_query, first_key },
            norms,
            clip: of.clip,
            angles: cache.angles,
            positions: places.positions,
            page_of: places.page_of,
            queries: buffers.queries,
            rows,
        };
        stream.launch(prepare.launch())?;
        let attend = Attend {
            heads,
            scale: of.heads.scale,
            queries: buffers.queries,
            positions: places.positions,
            sequence_of: places.sequence_of,
            page_table: places.page_table,
            sequences: places.sequences as u64,
            table_width: places.table_width as u64,
            longest: places.last as u64,
            scratch: buffers.scratch,
            out: self.out,
            rows,
        };
        attend
            .launch()
            .map_err(|error| stream.refused(&error))?
            .into_iter()
            .try_for_each(|each| stream.launch(Ok(each)))
    }
}

/// Converts a group limit to the router kernel's type.
pub(super) fn group_limit(limit: &config::GroupLimit) -> GroupLimit {
    let by = match limit.by {
        config::GroupScore::Best => GroupScore::Best,
        config::GroupScore::TwoBest => GroupScore::TwoBest,
    };
    GroupLimit { groups: limit.groups as u64, kept: limit.kept as u64, by }
}
